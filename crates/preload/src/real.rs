//! libc's functions behind the hooks, looked up at first use. Each address is that of the next
//! definition after the hook, so functions of other preloaded libraries are called, too.

use crate::hook::Hook;
use crate::table::hooks;
use core::sync::atomic::{AtomicPtr, Ordering};
use libc::*;

/// The address of the next definition of a symbol after this library's.
#[cold]
fn lookup(cache: &AtomicPtr<c_void>, name: &core::ffi::CStr) -> *mut c_void {
    // SAFETY: the name is NUL-terminated.
    let mut p = unsafe { dlsym(RTLD_NEXT, name.as_ptr()) };
    if p.is_null() && name.to_bytes().starts_with(b"io_uring") {
        // A plug-in may have loaded the function only for itself. Then only the handle of libc
        // leads to the function.
        // SAFETY: the names are NUL-terminated, and no library is loaded that is not there
        // already.
        unsafe {
            let library = dlopen(c"liburing.so.2".as_ptr(), RTLD_LAZY | RTLD_NOLOAD);
            if !library.is_null() {
                p = dlsym(library, name.as_ptr());
            }
        }
    }
    if p.is_null() {
        p = crate::lacking::by_number(name);
    }
    cache.store(p, Ordering::Release);
    p
}

/// Calls libc's function from the hook of that name: `real!(close(fd))`.
macro_rules! real {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the arguments are those with which the program has called the function of that
        // name, or mean the same.
        unsafe { $crate::real::$name($($arg),*) }
    };
}

/// The name of a function as a C string.
macro_rules! c_name {
    ($name:ident) => {
        const {
            match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!(),
            }
        }
    };
}
pub(crate) use c_name;

macro_rules! resolve {
    ($($family:ident($($property:ident),*) $what:literal
        fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $(, lent $lent:ident)?
        $(= $how:ident($($code:tt)*))?;)*) => {
        /// The addresses that were looked up.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy)]
        enum Place { $($name,)* Count }
        #[link_section = ".data.fsocket_start"]
        static CACHES: [AtomicPtr<c_void>; Place::Count as usize] =
            [const { AtomicPtr::new(core::ptr::null_mut()) }; Place::Count as usize];
        $(
            // A few hooks replace the real function completely.
            #[allow(non_snake_case, dead_code)]
            pub unsafe fn $name($($arg: $ty),*) -> $ret {
                let cache = &CACHES[Place::$name as usize];
                let mut p = cache.load(Ordering::Acquire);
                if p.is_null() {
                    p = lookup(cache, c_name!($name));
                    if p.is_null() {
                        return Missing::missing();
                    }
                }
                // SAFETY: libc's function of this name has this signature, and gets the arguments
                // of the program's call.
                unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($ty),*) -> $ret>(p)($($arg),*) }
            }
        )*

        /// Looks up the functions that the child of a shell calls; see [`find_for_children`].
        #[cold]
        pub fn find_for_exec() {
            $(if const { Hook::$family()$(.$property())*.shell } {
                find(Place::$name, c_name!($name));
            })*
        }

        /// Looks up the functions that a child calls to serve a connection. Otherwise each child
        /// would do that itself, and touch the symbol tables of all libraries: a dozen pages.
        #[cold]
        pub fn find_for_children() {
            $(if const { Hook::$family()$(.$property())*.child } {
                find(Place::$name, c_name!($name));
            })*
        }
    };
}
hooks!(resolve);

fn find(place: Place, name: &core::ffi::CStr) {
    let cache = &CACHES[place as usize];
    if cache.load(Ordering::Relaxed).is_null() {
        lookup(cache, name);
    }
}

/// libc's `syscall`. (The hook of that name is written in assembly.)
///
/// # Safety
/// As for syscall(2).
pub unsafe fn syscall(
    number: c_long,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
    e: c_ulong,
    f: c_ulong,
) -> c_long {
    type Syscall = unsafe extern "C" fn(c_long, c_ulong, c_ulong, c_ulong, c_ulong, c_ulong, c_ulong) -> c_long;
    #[link_section = ".data.fsocket_start"]
    static CACHE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let mut p = CACHE.load(Ordering::Acquire);
    if p.is_null() {
        p = lookup(&CACHE, c"syscall");
    }
    // SAFETY: every libc has this function with this signature, and the kernel checks the
    // arguments.
    unsafe { core::mem::transmute::<*mut c_void, Syscall>(p)(number, a, b, c, d, e, f) }
}

/// The address of libc's function of that name; null: there is none.
pub fn address(name: &core::ffi::CStr) -> *const c_void {
    // SAFETY: the name is NUL-terminated.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}
extern "C" fn missing() -> c_int {
    enosys();
    -1
}

/// The address of libc's function, to which a hook jumps.
pub fn target(name: &core::ffi::CStr) -> *const c_void {
    match address(name) {
        p if p.is_null() => missing as *const c_void,
        p => p,
    }
}

/// The address of a variable of libc; null: there is none.
pub fn object(name: &core::ffi::CStr) -> *const c_void {
    // SAFETY: the name is NUL-terminated.
    unsafe { dlsym(RTLD_DEFAULT, name.as_ptr()) }
}

/// Used when this libc is too old to have the function: fails with ENOSYS.
trait Missing {
    fn missing() -> Self;
}
fn enosys() {
    fsocket_sys::Errno::ENOSYS.set();
}
impl Missing for sighandler_t {
    fn missing() -> Self {
        enosys();
        SIG_ERR
    }
}
impl Missing for c_int {
    fn missing() -> Self {
        enosys();
        -1
    }
}
impl Missing for ssize_t {
    fn missing() -> Self {
        enosys();
        -1
    }
}
impl Missing for c_longlong {
    fn missing() -> Self {
        enosys();
        -1
    }
}
impl Missing for () {
    fn missing() -> Self {
        enosys();
    }
}
impl Missing for *mut c_void {
    fn missing() -> Self {
        enosys();
        core::ptr::null_mut()
    }
}
