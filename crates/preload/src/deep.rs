//! Libraries loaded with `RTLD_DEEPBIND` (PHP's extensions) look for a function in their own
//! dependencies before they look where ours are, and would call libc past us, also for connections
//! that the program has made through us. What they have found in libc is set to ours.
//!
//! PHP needs it: it loads each extension so, and `ftp` reads by its own `recv` what the program has connected (51 tests of
//! `ext/ftp` failed without).

use crate::table::{hooks, variadic_hooks};
use crate::{home, real};
use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::*;

/// A line of the loader's symbol table and one of its list of relocations (ELF-64).
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
/// The beginning of the loader's `struct link_map` (link.h).
#[repr(C)]
struct LinkMap {
    addr: usize,
    name: *const c_char,
    dynamic: *const [usize; 2],
}

// Tags of the dynamic section, and relocations that take an address as it is (elf.h).
const DT_PLTRELSZ: usize = 2;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_RELA: usize = 7;
const DT_RELASZ: usize = 8;
const DT_JMPREL: usize = 23;
#[cfg(target_arch = "x86_64")]
const KINDS: Kinds = Kinds { lazy: 7, others: [6, 1] };
#[cfg(target_arch = "aarch64")]
const KINDS: Kinds = Kinds { lazy: 1026, others: [1025, 257] };
struct Kinds {
    /// Leads into the library itself until the first call.
    lazy: u32,
    others: [u32; 2],
}

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

/// One function: where it is found by everybody, and what that calls.
#[derive(Clone, Copy)]
struct Function {
    name: &'static CStr,
    ours: usize,
    libcs: usize,
}
const COUNT: usize = NAMES.len() + MORE.len();

/// Does `dlopen` with these arguments need `load`? A name that the loader searches for, it searches
/// for on behalf of who calls it: that must stay the program.
pub fn wanted(file: *const c_char, flags: c_int) -> bool {
    if flags & RTLD_DEEPBIND == 0 || file.is_null() {
        return false;
    }
    // SAFETY: dlopen's argument is a string.
    let path = unsafe { CStr::from_ptr(file) }.to_bytes();
    path.contains(&b'/') && !path.contains(&b'$')
}

/// `dlopen`, and what it has bound past us comes to us.
pub extern "C" fn load(file: *const c_char, flags: c_int) -> *mut c_void {
    let real = real::address(c"dlopen");
    // SAFETY: libc's function of that name; the arguments are the caller's.
    unsafe {
        let handle = core::mem::transmute::<*const c_void, extern "C" fn(*const c_char, c_int) -> *mut c_void>(real)(
            file, flags,
        );
        if !handle.is_null() {
            let _errno = fsocket_sys::errno::Saved::errno();
            bind(handle);
            // A dlsym that found nothing is not the program's.
            dlerror();
        }
        handle
    }
}

/// # Safety
/// A handle that dlopen has just returned.
unsafe fn bind(handle: *mut c_void) {
    let mut map: *const LinkMap = core::ptr::null();
    // SAFETY: the loader writes one pointer.
    if unsafe { dlinfo(handle, RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0 || map.is_null() {
        return;
    }
    let mut functions = [Function { name: c"", ours: 0, libcs: 0 }; COUNT];
    let mut n = 0;
    for (i, name) in NAMES.iter().chain(MORE).enumerate() {
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else { continue };
        let (ours, libcs) = addresses(i, name);
        // What finds neither is bound by another rule, or has a function of its own.
        // SAFETY: a live handle, a NUL-terminated name.
        if ours != 0 && libcs != 0 && unsafe { dlsym(handle, name.as_ptr()) } as usize == libcs {
            functions[n] = Function { name, ours, libcs };
            n += 1;
        }
    }
    // SAFETY: a live handle's.
    let dynamic = unsafe { (*map).dynamic };
    let mut walk = Walk { from: dynamic, there: false, functions: &functions[..n] };
    // SAFETY: the callback gets what it is made for.
    unsafe { dl_iterate_phdr(Some(each), (&raw mut walk).cast()) };
}

/// Where a name leads a library that is loaded as usual, if to us; and what we call. Looked up once.
fn addresses(i: usize, name: &CStr) -> (usize, usize) {
    static KNOWN: [[AtomicUsize; 2]; COUNT] = [const { [AtomicUsize::new(0), AtomicUsize::new(0)] }; COUNT];
    let [ours, libcs] = &KNOWN[i];
    if libcs.load(Ordering::Acquire) == 0 {
        let (everybodys, next) = (real::object(name), real::address(name));
        ours.store(if is_ours(everybodys) { everybodys as usize } else { 0 }, Ordering::Release);
        // No function has the address 1.
        libcs.store((next as usize).max(1), Ordering::Release);
    }
    (ours.load(Ordering::Acquire), libcs.load(Ordering::Acquire))
}

fn is_ours(p: *const c_void) -> bool {
    home::of(p).is_some_and(|h| Some(h) == home::of(load as *const c_void))
}

struct Walk<'a> {
    /// The library that was loaded; its own dependencies come behind it in the loader's list.
    from: *const [usize; 2],
    there: bool,
    functions: &'a [Function],
}

/// A loaded library, as far as it matters here.
#[derive(Default)]
struct Library {
    base: usize,
    end: usize,
    /// Made read-only once it was bound.
    sealed: [usize; 2],
    strings: usize,
    symbols: usize,
}

unsafe extern "C" fn each(info: *mut dl_phdr_info, _: size_t, walk: *mut c_void) -> c_int {
    // SAFETY: the loader's structures, which it keeps as they are during this call.
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
            // The loader has made addresses of most, but not where it may not write.
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
    /// A relocation of this library, which has been relocated.
    unsafe fn relocation(&self, r: &Relocation, functions: &[Function]) {
        let kind = r.info as u32;
        if r.addend != 0 || (kind != KINDS.lazy && !KINDS.others.contains(&kind)) {
            return;
        }
        // SAFETY: the loader has followed the same numbers.
        unsafe {
            let symbol = &*(self.symbols as *const Symbol).add((r.info >> 32) as usize);
            let name = CStr::from_ptr((self.strings + symbol.name as usize) as *const c_char);
            let Some(f) = functions.iter().find(|f| f.name == name) else { return };
            let slot = (self.base + r.offset as usize) as *const AtomicUsize;
            if !slot.is_aligned() {
                return;
            }
            let now = (*slot).load(Ordering::Relaxed);
            let unbound = kind == KINDS.lazy && symbol.section == 0 && (self.base..self.end).contains(&now);
            if now == f.libcs || unbound {
                self.write(&*slot, f.ours);
            }
        }
    }

    /// # Safety
    /// A word of this library's that is writable or was sealed.
    unsafe fn write(&self, slot: &AtomicUsize, to: usize) {
        // SAFETY: of the page that the word lies on, nothing changes but whether it can be written.
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
