//! One library serves glibc and musl (ADR 77). Detects the libc of this process, and handles names
//! that musl lacks.
//!
//! musl's loader maps `libc.so.6` to musl itself and ignores versions, but it does not start a
//! program with an undefined name. So names that only glibc has are weak, or are defined here and
//! call glibc's function if it exists.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_runtime::musl;
use libc::{c_int, c_void, dlsym, RTLD_DEFAULT};

fn find(name: &CStr) -> *mut c_void {
    // SAFETY: the name is NUL-terminated.
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

/// Detects the libc of the process, before anything else runs. False: neither glibc nor musl, or
/// musl with glibc's functions on top (gcompat), on which programs for glibc rely. The library
/// does nothing there.
#[link_section = ".text.fsocket_start"]
pub fn recognise() -> bool {
    if !crate::old_glibc::has_musls_loader() {
        return crate::old_glibc::register_atfork() != 0;
    }
    musl::note();
    find(c"gnu_get_libc_version").is_null()
}

type Handler = unsafe extern "C" fn();

/// Registers handlers as `pthread_atfork` does. (In glibc that function is in a static part, and
/// calls `__register_atfork`.) False: the handlers could not be registered.
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
    // SAFETY: glibc's function of that name has this type. The handle is null, because the
    // handlers stay for the life of the process.
    unsafe {
        core::mem::transmute::<usize, Register>(register)(before, in_parent, in_child, core::ptr::null_mut()) == 0
    }
}

#[cold]
fn at_fork_of_musl(before: Handler, in_parent: Handler, in_child: Handler) -> bool {
    type Register = unsafe extern "C" fn(Handler, Handler, Handler) -> c_int;
    let register = find(c"pthread_atfork");
    // SAFETY: musl's function of that name has this type. The library, and so its handlers, are
    // never unloaded.
    !register.is_null()
        && unsafe { core::mem::transmute::<*mut c_void, Register>(register)(before, in_parent, in_child) == 0 }
}

// These two symbols are local to this library.
core::arch::global_asm!(
    ".hidden _dl_find_object, __tls_get_addr",
    ".globl _dl_find_object, __tls_get_addr",
    "_dl_find_object: jmp {find_object}",
    "__tls_get_addr: jmp {thread_local}",
    find_object = sym find_object,
    thread_local = sym thread_local,
);

/// Through this function the unwinder finds the tables of a function.
unsafe extern "C" fn find_object(pc: *mut c_void, result: *mut c_void) -> c_int {
    static CACHE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let p = found(&CACHE, c"_dl_find_object");
    if p.is_null() {
        return -1;
    }
    // SAFETY: glibc's function of that name has this type. The unwinder has called it with these
    // arguments.
    unsafe {
        core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int>(p)(pc, result)
    }
}

/// Finds thread-local variables, for the standard library, which counts panics in one. glibc has
/// this function in its loader, which musl would have to load as well.
unsafe extern "C" fn thread_local(index: *mut c_void) -> *mut c_void {
    static CACHE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let p = found(&CACHE, c"__tls_get_addr");
    // SAFETY: every libc has this function, and the compiler has made the argument for it.
    unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> *mut c_void>(p)(index) }
}
