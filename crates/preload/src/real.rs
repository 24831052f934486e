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
        /// Places of the addresses.
        #[allow(non_camel_case_types, dead_code, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy)]
        enum Place { $($name,)* Count }
        #[link_section = ".data.fsocket_start"]
        static CACHES: [AtomicPtr<c_void>; Place::Count as usize] =
            [const { AtomicPtr::new(core::ptr::null_mut()) }; Place::Count as usize];
        $(
            // A few hooks replace the real function altogether.
            #[allow(non_snake_case, dead_code)]
            pub unsafe fn $name($($arg: $ty),*) -> $ret {
                let cache = &CACHES[Place::$name as usize];
                let mut p = cache.load(Ordering::Acquire);
                if p.is_null() {
                    const NAME: &core::ffi::CStr =
                        match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(n) => n,
                            Err(_) => panic!(),
                        };
                    p = lookup(cache, NAME);
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
macro_rules! find {
    ($($name:ident)*) => {$(
        let cache = &CACHES[Place::$name as usize];
        if cache.load(Ordering::Relaxed).is_null() {
            const NAME: &[u8] = concat!(stringify!($name), "\0").as_bytes();
            if let Ok(name) = core::ffi::CStr::from_bytes_with_nul(NAME) {
                lookup(cache, name);
            }
        }
    )*};
}

/// Looks up what the child of a shell calls, as [`find_for_children`] does.
#[cold]
pub fn find_for_exec() {
    find!(sigaction execve);
}

/// Looks up what a child calls that serves a connection. Each child would do so itself else: that
/// touches the symbol tables of all libraries, a dozen pages.
#[cold]
pub fn find_for_children() {
    find!(close dup dup2 dup3 fcntl ioctl read write readv writev recv send recvfrom sendto recvmsg sendmsg sendfile
          shutdown getsockname getpeername setsockopt getsockopt poll ppoll select
          epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait signal sigaction);
}

/// libc's, of which ours is written in instructions.
///
/// # Safety
/// As syscall(2).
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
    // SAFETY: every libc has it, with this signature; the caller's arguments.
    unsafe { core::mem::transmute::<*mut c_void, Syscall>(p)(number, a, b, c, d, e, f) }
}

/// Address of libc's function of that name; null: there is none.
pub fn address(name: &core::ffi::CStr) -> *const c_void {
    // SAFETY: a NUL-terminated name.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}
extern "C" fn missing() -> c_int {
    enosys();
    -1
}

/// Where a hook jumps to that is libc's function.
pub fn target(name: &core::ffi::CStr) -> *const c_void {
    match address(name) {
        p if p.is_null() => missing as *const c_void,
        p => p,
    }
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
