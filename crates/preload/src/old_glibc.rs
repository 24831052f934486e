//! Names that glibc before 2.34 has in libdl or libpthread, under older versions, or not at all.
//! The linker would record the symbol versions of the build machine in the library, and an older
//! loader would refuse to load it. So this library defines these names, and calls glibc's function
//! if there is one. It needs no symbol newer than glibc 2.28. It also needs neither libdl nor
//! libpthread, which newer programs would load in vain.
//!
//! This is for programs in containers with glibc 2.28 to 2.33 (Debian 10 and 11, RHEL 8, Ubuntu
//! 20.04): their loader refuses a library that names a newer version.

use core::ffi::{c_char, CStr};
use core::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use libc::{c_int, c_void, clockid_t, pid_t, pthread_key_t, pthread_t, RTLD_DEFAULT, RTLD_NOW};

/// These symbols are weak. Address 0: the function does not exist.
#[repr(C)]
struct Weak {
    dlsym: usize,
    /// Private functions of glibc before 2.34, which exist even if libdl is not loaded.
    dlopen_mode: usize,
    libc_dlsym: usize,
    register_atfork: usize,
    /// A function that only musl's loader has.
    musl: usize,
}

extern "C" {
    #[link_name = "fsocket_weak"]
    static WEAK: Weak;
}

macro_rules! names {
    ($($name:literal: $to:ident,)*) => {
        core::arch::global_asm!(
            ".weak fsocket_dlsym, __libc_dlopen_mode, __libc_dlsym, __register_atfork, __dls3",
            ".symver fsocket_dlsym, dlsym@GLIBC_2.2.5",
            ".pushsection .data.rel.ro.fsocket_weak, \"aw\"",
            ".balign 8",
            ".hidden fsocket_weak",
            ".globl fsocket_weak",
            "fsocket_weak: .quad fsocket_dlsym, __libc_dlopen_mode, __libc_dlsym, __register_atfork, __dls3",
            ".popsection",
            $(
                concat!(".hidden ", $name),
                concat!(".globl ", $name),
                concat!($name, ": jmp {", stringify!($to), "}"),
            )*
            $($to = sym $to,)*
        );
    };
}

names! {
    "dlsym": symbol,
    "dlinfo": dlinfo,
    "dlerror": dlerror,
    "gettid": gettid,
    "stat64": stat,
    "pthread_getcpuclockid": getcpuclockid,
    "pthread_once": once,
    "pthread_key_create": key_create,
    "__pthread_key_create": key_create_too,
    "pthread_key_delete": key_delete,
    "pthread_setspecific": setspecific,
}

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// `dlsym`. For RTLD_NEXT, too, its caller counts as this library.
unsafe extern "C" fn symbol(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    match dlsym_at() {
        0 => core::ptr::null_mut(),
        // SAFETY: dlsym has this type, and this library has called it with these arguments.
        at => unsafe { core::mem::transmute::<usize, Dlsym>(at)(handle, name) },
    }
}

fn dlsym_at() -> usize {
    // SAFETY: the linker has set the address.
    let at = unsafe { (&raw const WEAK.dlsym).read_volatile() };
    match at {
        0 => from_libdl(),
        at => at,
    }
}

/// The address of `__register_atfork`; 0: there is none.
#[link_section = ".text.fsocket_start"]
pub fn register_atfork() -> usize {
    // SAFETY: the linker has set the address.
    unsafe { (&raw const WEAK.register_atfork).read_volatile() }
}

/// Has musl's loader loaded this library?
#[link_section = ".text.fsocket_start"]
pub fn has_musls_loader() -> bool {
    // SAFETY: the linker has set the address.
    unsafe { (&raw const WEAK.musl).read_volatile() != 0 }
}

/// `dlsym` in a program that has not loaded libdl.
#[cold]
fn from_libdl() -> usize {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    /// `__RTLD_DLOPEN`, which glibc's own callers pass.
    const DLOPEN: c_int = i32::MIN;
    let known = FOUND.load(Ordering::Acquire);
    if !known.is_null() {
        return known as usize;
    }
    // SAFETY: glibc's functions of these names have these types, and the strings are
    // NUL-terminated.
    unsafe {
        let (open, find) =
            ((&raw const WEAK.dlopen_mode).read_volatile(), (&raw const WEAK.libc_dlsym).read_volatile());
        if open == 0 || find == 0 {
            return 0;
        }
        type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
        let libdl = core::mem::transmute::<usize, Open>(open)(c"libdl.so.2".as_ptr(), RTLD_NOW | DLOPEN);
        if libdl.is_null() {
            return 0;
        }
        let at = core::mem::transmute::<usize, Dlsym>(find)(libdl, c"dlsym".as_ptr());
        FOUND.store(at, Ordering::Release);
        at as usize
    }
}

/// The function of that name, if the process has one.
fn found(cache: &AtomicPtr<c_void>, name: &CStr) -> Option<*mut c_void> {
    let known = cache.load(Ordering::Relaxed);
    if !known.is_null() {
        return Some(known);
    }
    // SAFETY: the name is NUL-terminated.
    let at = unsafe { symbol(RTLD_DEFAULT, name.as_ptr()) };
    cache.store(at, Ordering::Relaxed);
    (!at.is_null()).then_some(at)
}

/// Calls glibc's function of that name, or uses the given value if there is none.
macro_rules! or_none {
    (fn $own:ident = $name:literal($($arg:ident: $ty:ty),*) -> $ret:ty, $none:expr) => {
        unsafe extern "C" fn $own($($arg: $ty),*) -> $ret {
            static CACHE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
            match found(&CACHE, $name) {
                // SAFETY: the function of that name has this type, and this library has called it
                // with these arguments.
                Some(at) => unsafe {
                    core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> $ret>(at)($($arg),*)
                },
                None => $none,
            }
        }
    };
}

type Destructor = Option<unsafe extern "C" fn(*mut c_void)>;

or_none!(fn dlinfo = c"dlinfo"(handle: *mut c_void, request: c_int, info: *mut c_void) -> c_int, -1);
or_none!(fn dlerror = c"dlerror"() -> *mut c_char, core::ptr::null_mut());
or_none!(fn getcpuclockid = c"pthread_getcpuclockid"(thread: pthread_t, clock: *mut clockid_t) -> c_int, libc::ENOSYS);
or_none!(fn key_create = c"pthread_key_create"(key: *mut pthread_key_t, end: Destructor) -> c_int, libc::EAGAIN);
or_none!(fn key_create_too = c"__pthread_key_create"(key: *mut pthread_key_t, end: Destructor) -> c_int, libc::EAGAIN);
or_none!(fn key_delete = c"pthread_key_delete"(key: pthread_key_t) -> c_int, libc::EINVAL);
or_none!(fn setspecific = c"pthread_setspecific"(key: pthread_key_t, value: *const c_void) -> c_int, libc::EINVAL);
// Without libpthread the process has only one thread.
or_none!(fn once = c"pthread_once"(control: *const AtomicI32, init: unsafe extern "C" fn()) -> c_int, {
    // SAFETY: the argument of pthread_once(3) is a `pthread_once_t`, which is an integer.
    if unsafe { &*control }.swap(1, Ordering::AcqRel) == 0 {
        // SAFETY: pthread_once(3) gets a function that it must run once.
        unsafe { init() };
    }
    0
});

/// glibc has this function since 2.30.
unsafe extern "C" fn gettid() -> pid_t {
    fsocket_sys::gettid()
}

/// glibc has this function since 2.33. Before, an inline function called `__xstat64`.
unsafe extern "C" fn stat(path: *const c_char, status: *mut c_void) -> c_int {
    let args = [libc::AT_FDCWD as usize, path as usize, status as usize, 0, 0, 0];
    // SAFETY: stat(2) gets a NUL-terminated path and room for a `stat`. On 64 bits the kernel's
    // structure is that of glibc.
    match unsafe { fsocket_sys::raw(libc::SYS_newfstatat, args) } {
        Ok(_) => 0,
        Err(e) => {
            e.set();
            -1
        }
    }
}
