//! One library for glibc and musl: which of the two it is in, and names that musl lacks.
//!
//! musl's loader takes `libc.so.6` for musl itself and ignores versions, but a name that is nowhere keeps the program from
//! starting. So the names that glibc alone has are weak, or defined in here and lead to glibc's where there is one.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_runtime::musl;
use libc::{c_int, c_void, dlsym, RTLD_DEFAULT};

fn find(name: &CStr) -> *mut c_void {
    // SAFETY: a NUL-terminated name.
    unsafe { dlsym(RTLD_DEFAULT, name.as_ptr()) }
}

fn found(cache: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = cache.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    let address = find(name);
    cache.store(address, Ordering::Relaxed);
    address
}

/// Before anything else: which libc it is. False: neither of the two, or musl with functions of glibc above it (gcompat),
/// which a program built for glibc expects to be glibc's. The library does nothing there.
#[link_section = ".text.fsocket_start"]
pub fn recognise() -> bool {
    if !crate::old_glibc::has_musls_loader() {
        return crate::old_glibc::register_atfork() != 0;
    }
    musl::note();
    find(c"gnu_get_libc_version").is_null()
}

type Handler = unsafe extern "C" fn();

/// `pthread_atfork`, which glibc has in a static part that calls `__register_atfork`. False: the handlers are not known.
#[link_section = ".text.fsocket_start"]
pub fn at_fork(before: Handler, in_parent: Handler, in_child: Handler) -> bool {
    if musl::is_here() {
        return at_fork_of_musl(before, in_parent, in_child);
    }
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    let register = crate::old_glibc::register_atfork();
    if register == 0 {
        return false;
    }
    // SAFETY: glibc's function of that name; no library's handle, as the handlers are there for good.
    unsafe {
        core::mem::transmute::<usize, Register>(register)(before, in_parent, in_child, core::ptr::null_mut()) == 0
    }
}

#[cold]
fn at_fork_of_musl(before: Handler, in_parent: Handler, in_child: Handler) -> bool {
    type Register = unsafe extern "C" fn(Handler, Handler, Handler) -> c_int;
    let register = find(c"pthread_atfork");
    // SAFETY: musl's function of that name has this type; the library is never unloaded, and its handlers with it.
    !register.is_null()
        && unsafe { core::mem::transmute::<*mut c_void, Register>(register)(before, in_parent, in_child) == 0 }
}

// Of this library alone: nobody else sees these two.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".hidden _dl_find_object, __tls_get_addr",
    ".globl _dl_find_object, __tls_get_addr",
    "_dl_find_object: jmp {find_object}",
    "__tls_get_addr: jmp {thread_local}",
    find_object = sym find_object,
    thread_local = sym thread_local,
);
#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".hidden _dl_find_object",
    ".globl _dl_find_object",
    "_dl_find_object: b {find_object}",
    find_object = sym find_object,
);

/// The unwinder's way to the tables of a function.
unsafe extern "C" fn find_object(pc: *mut c_void, result: *mut c_void) -> c_int {
    static CACHE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let p = found(&CACHE, c"_dl_find_object");
    if p.is_null() {
        return -1;
    }
    // SAFETY: glibc's function of that name; the arguments are the caller's.
    unsafe {
        core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int>(p)(pc, result)
    }
}

/// Where thread-local variables are: the standard library counts panics in one. It lies in glibc's loader, which
/// musl would have to load as well.
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn thread_local(index: *mut c_void) -> *mut c_void {
    static CACHE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let p = found(&CACHE, c"__tls_get_addr");
    // SAFETY: every libc has this function; the argument is the compiler's.
    unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> *mut c_void>(p)(index) }
}
