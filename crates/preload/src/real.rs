//! The functions we stand in front of, looked up on first use.

use core::sync::atomic::{AtomicPtr, Ordering};
use libc::*;

/// Address of the next definition of a symbol after ours.
#[cold]
fn lookup(cache: &AtomicPtr<c_void>, name: &core::ffi::CStr) -> *mut c_void {
    // SAFETY: a NUL-terminated name.
    let mut p = unsafe { dlsym(RTLD_NEXT, name.as_ptr()) };
    if p.is_null() && name.to_bytes().starts_with(b"io_uring") {
        // Loaded by a plug-in for itself: only its handle leads there.
        // SAFETY: NUL-terminated names; nothing is loaded that is not there.
        unsafe {
            let library = dlopen(c"liburing.so.2".as_ptr(), RTLD_LAZY | RTLD_NOLOAD);
            if !library.is_null() {
                p = dlsym(library, name.as_ptr());
            }
        }
    }
    cache.store(p, Ordering::Release);
    p
}

macro_rules! hook_table {
    ($($family:ident: $what:literal fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(
            // A few hooks replace the real function altogether.
            #[allow(non_snake_case, dead_code)]
            pub unsafe fn $name($($arg: $ty),*) -> $ret {
                static CACHE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
                let mut p = CACHE.load(Ordering::Acquire);
                if p.is_null() {
                    const NAME: &core::ffi::CStr =
                        match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(n) => n,
                            Err(_) => panic!(),
                        };
                    p = lookup(&CACHE, NAME);
                    if p.is_null() {
                        return Missing::missing();
                    }
                }
                // SAFETY: libc's function of this name has this signature.
                unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($ty),*) -> $ret>(p)($($arg),*) }
            }
        )*
    };
}
macro_rules! variadic_table {
    ($($family:ident: $what:literal $first:ident fn $name:ident;)*) => {};
}
/// Address of libc's function of that name; null: there is none.
pub fn address(name: &core::ffi::CStr) -> *const c_void {
    // SAFETY: a NUL-terminated name.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}
/// Address of a variable of libc; null: there is none.
pub fn object(name: &core::ffi::CStr) -> *const c_void {
    // SAFETY: a NUL-terminated name.
    unsafe { dlsym(RTLD_DEFAULT, name.as_ptr()) }
}
macro_rules! limit_table {
    ($($rest:tt)*) => {};
}
include!("table.rs");

/// The libc here is too old to have the function.
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
