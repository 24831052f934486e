//! Handles libraries that are loaded with `RTLD_DEEPBIND`, as PHP loads its extensions.
//!
//! Such a library finds libc's functions in its own dependencies first. So it would call libc
//! directly, on connections that the program has made through the hooks. After `dlopen` this
//! module replaces each such address by the address of the hook. (Without it, 51 tests of PHP's
//! `ext/ftp` fail.) The module changes a word only if it holds the address of libc's function with
//! that name.

use crate::table::{hooks, variadic_hooks};
use crate::{home, real};
use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::*;

/// An entry of the loader's symbol table, and one of its relocations (ELF-64).
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}
#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}
/// The first members of the loader's `struct link_map` (link.h).
#[repr(C)]
struct LinkMap {
    addr: usize,
    name: *const c_char,
    dynamic: *const [usize; 2],
}

// Tags of the dynamic section, and kinds of relocations whose value is a plain address (elf.h).
const DT_PLTRELSZ: usize = 2;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_RELA: usize = 7;
const DT_RELASZ: usize = 8;
const DT_JMPREL: usize = 23;
/// A relocation with lazy binding: until the first call, the word has the address of a stub in the
/// same library.
const LAZY: u32 = 7;
const OTHERS: [u32; 2] = [6, 1];

macro_rules! names {
    ($($family:ident($($property:ident),*) $what:literal
        fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $(, lent $lent:ident)?
        $(= $how:ident($($code:tt)*))?;)*) => {
        const NAMES: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
    };
}
hooks!(names);
macro_rules! more_names {
    ($($family:ident $what:literal $first:ident fn $name:ident;)*) => {
        const MORE: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
    };
}
variadic_hooks!(more_names);

/// A function: the exported address (the hook), and the address in libc that the hook calls.
#[derive(Clone, Copy)]
struct Function {
    name: &'static CStr,
    ours: usize,
    libcs: usize,
}
const COUNT: usize = NAMES.len() + MORE.len();

/// Must a `dlopen` with these arguments go through [`load`]? (The loader searches a plain name
/// relative to its caller, which must then stay the program.)
pub fn wanted(file: *const c_char, flags: c_int) -> bool {
    if flags & RTLD_DEEPBIND == 0 || file.is_null() {
        return false;
    }
    // SAFETY: the argument of dlopen is null or a string, and not null here.
    let path = unsafe { CStr::from_ptr(file) }.to_bytes();
    path.contains(&b'/') && !path.contains(&b'$')
}

/// Calls `dlopen`, and then binds to the hooks what the loader has bound to libc directly.
pub extern "C" fn load(file: *const c_char, flags: c_int) -> *mut c_void {
    let real = real::address(c"dlopen");
    // SAFETY: libc's function of that name has this type. The program has called it with these
    // arguments.
    unsafe {
        let handle = core::mem::transmute::<*const c_void, extern "C" fn(*const c_char, c_int) -> *mut c_void>(real)(
            file, flags,
        );
        if !handle.is_null() {
            let _errno = fsocket_sys::errno::Saved::errno();
            bind(handle);
            // A failed dlsym leaves a message for dlerror(3). This call removes the message, to
            // hide it from the program.
            dlerror();
        }
        handle
    }
}

/// # Safety
/// `handle` is one that dlopen has just returned.
unsafe fn bind(handle: *mut c_void) {
    let mut map: *const LinkMap = core::ptr::null();
    // SAFETY: the handle is valid, and the loader writes one pointer to `map`.
    if unsafe { dlinfo(handle, RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0 || map.is_null() {
        return;
    }
    let mut functions = [Function { name: c"", ours: 0, libcs: 0 }; COUNT];
    let mut n = 0;
    for (i, name) in NAMES.iter().chain(MORE).enumerate() {
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else { continue };
        let (ours, libcs) = addresses(i, name);
        // In all other cases the library does not find libc's function, or defines the function
        // itself.
        // SAFETY: the handle is valid, and the name is NUL-terminated.
        if ours != 0 && libcs != 0 && unsafe { dlsym(handle, name.as_ptr()) } as usize == libcs {
            functions[n] = Function { name, ours, libcs };
            n += 1;
        }
    }
    // SAFETY: the loader keeps the link map while the library is loaded.
    let dynamic = unsafe { (*map).dynamic };
    let mut walk = Walk { from: dynamic, there: false, functions: &functions[..n] };
    // SAFETY: `each` expects a `Walk`, which lives until the call returns.
    unsafe { dl_iterate_phdr(Some(each), (&raw mut walk).cast()) };
}

/// For a name that leads to a hook in an ordinary library: the address of the hook, and of the
/// function that it calls. Looked up once.
fn addresses(i: usize, name: &CStr) -> (usize, usize) {
    static KNOWN: [[AtomicUsize; 2]; COUNT] = [const { [AtomicUsize::new(0), AtomicUsize::new(0)] }; COUNT];
    let [ours, libcs] = &KNOWN[i];
    if libcs.load(Ordering::Acquire) == 0 {
        let (everybodys, next) = (real::object(name), real::address(name));
        ours.store(if is_ours(everybodys) { everybodys as usize } else { 0 }, Ordering::Release);
        // 1 is not the address of a function: it marks that the lookup is done.
        libcs.store((next as usize).max(1), Ordering::Release);
    }
    (ours.load(Ordering::Acquire), libcs.load(Ordering::Acquire))
}

fn is_ours(p: *const c_void) -> bool {
    home::of(p).is_some_and(|h| Some(h) == home::of(load as *const c_void))
}

struct Walk<'a> {
    /// The dynamic section of the library that was loaded. Its dependencies follow in the loader's
    /// list.
    from: *const [usize; 2],
    there: bool,
    functions: &'a [Function],
}

/// The parts of a loaded library that this module reads.
#[derive(Default)]
struct Library {
    base: usize,
    end: usize,
    /// The range that the loader has made read-only after binding (RELRO).
    sealed: [usize; 2],
    strings: usize,
    symbols: usize,
}

unsafe extern "C" fn each(info: *mut dl_phdr_info, _: size_t, walk: *mut c_void) -> c_int {
    // SAFETY: the loader passes valid structures, and does not change them during this call.
    // `walk` is the `Walk` of `bind`.
    unsafe {
        let walk = &mut *walk.cast::<Walk>();
        let info = &*info;
        let base = info.dlpi_addr as usize;
        let mut l = Library { base, ..Library::default() };
        let mut dynamic: *const [usize; 2] = core::ptr::null();
        for h in core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) {
            let at = base + h.p_vaddr as usize;
            match h.p_type {
                PT_LOAD => l.end = l.end.max(at + h.p_memsz as usize),
                PT_DYNAMIC => dynamic = at as *const [usize; 2],
                PT_GNU_RELRO => l.sealed = [at, at + h.p_memsz as usize],
                _ => {}
            }
        }
        walk.there |= dynamic == walk.from;
        if !walk.there || dynamic.is_null() {
            return 0;
        }
        let (mut plt, mut rela) = ([0; 2], [0; 2]);
        while (*dynamic)[0] != 0 {
            let [tag, value] = *dynamic;
            // The loader has replaced most offsets by addresses, but not those in memory that it
            // cannot write.
            let at = if value < base { base + value } else { value };
            match tag {
                DT_STRTAB => l.strings = at,
                DT_SYMTAB => l.symbols = at,
                DT_JMPREL => plt[0] = at,
                DT_PLTRELSZ => plt[1] = value,
                DT_RELA => rela[0] = at,
                DT_RELASZ => rela[1] = value,
                _ => {}
            }
            dynamic = dynamic.add(1);
        }
        for [at, size] in [plt, rela] {
            if at != 0 && l.strings != 0 && l.symbols != 0 {
                let n = size / size_of::<Relocation>();
                for r in core::slice::from_raw_parts(at as *const Relocation, n) {
                    l.relocation(r, walk.functions);
                }
            }
        }
    }
    0
}

impl Library {
    /// # Safety
    /// `r` is a relocation of this library, and the loader has processed it.
    unsafe fn relocation(&self, r: &Relocation, functions: &[Function]) {
        let kind = r.info as u32;
        if r.addend != 0 || (kind != LAZY && !OTHERS.contains(&kind)) {
            return;
        }
        // SAFETY: the loader has used the same indices and offsets to process this relocation.
        unsafe {
            let symbol = &*(self.symbols as *const Symbol).add((r.info >> 32) as usize);
            let name = CStr::from_ptr((self.strings + symbol.name as usize) as *const c_char);
            let Some(f) = functions.iter().find(|f| f.name == name) else { return };
            let slot = (self.base + r.offset as usize) as *const AtomicUsize;
            if !slot.is_aligned() {
                return;
            }
            let now = (*slot).load(Ordering::Relaxed);
            let unbound = kind == LAZY && symbol.section == 0 && (self.base..self.end).contains(&now);
            if now == f.libcs || unbound {
                self.write(&*slot, f.ours);
            }
        }
    }

    /// # Safety
    /// `slot` is a word of this library that is writable, or lies in its RELRO range.
    unsafe fn write(&self, slot: &AtomicUsize, to: usize) {
        // SAFETY: the page belongs to this loaded library. Only this word changes, and the
        // protection is restored.
        unsafe {
            let size = fsocket_sys::page_size();
            let page = (slot as *const AtomicUsize as usize) & !(size - 1);
            let sealed = page >= self.sealed[0] & !(size - 1) && page < self.sealed[1] & !(size - 1);
            if sealed && fsocket_sys::mprotect(page as *mut u8, size, PROT_READ | PROT_WRITE).is_err() {
                return;
            }
            slot.store(to, Ordering::Release);
            if sealed {
                let _ = fsocket_sys::mprotect(page as *mut u8, size, PROT_READ);
            }
        }
    }
}
