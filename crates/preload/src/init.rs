//! Before `main`.

use fsocket_core::zone::{self, Pin};
use fsocket_core::{fork, process};
use libc::{c_char, c_int};

// Some hooks run earlier (constructors of other libraries): until this one has
// run, everything is passed on to libc.
#[used]
#[link_section = ".init_array"]
static INIT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = init;

extern "C" fn init(_argc: c_int, _argv: *const *const c_char, envp: *const *const c_char) {
    let _errno = fsocket_sys::errno::Saved::errno();
    let socket = env(envp, b"FASTSOCKET_SOCKET=");
    let off =
        |part: &[u8]| env(envp, b"FASTSOCKET_DISABLE=").is_some_and(|v| v.split(|c| *c == b',').any(|w| w == part));
    let (disabled, no_zones) = (off(b"shm"), off(b"zones"));
    let pin = Pin::parse(env(envp, b"FASTSOCKET_PIN=").unwrap_or(b""));
    // SAFETY: a NUL-terminated name; glibc's symbol is a `const ptrdiff_t`.
    let rseq_offset = unsafe {
        let p = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) as *const isize;
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()) as *const u32;
        // A size of 0 means that registration failed or was switched off.
        if p.is_null() || size.is_null() || *size == 0 {
            None
        } else {
            Some(*p)
        }
    };
    process::init(&process::Config { socket, disabled, no_zones, pin, rseq_offset });
    // SAFETY: handlers of the library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}

#[used]
#[link_section = ".fini_array"]
static FINI: extern "C" fn() = fini;

extern "C" fn fini() {
    zone::at_exit();
}

unsafe extern "C" fn before() {
    let _errno = fsocket_sys::errno::Saved::errno();
    fork::prepare();
}
unsafe extern "C" fn in_parent() {
    let _errno = fsocket_sys::errno::Saved::errno();
    fork::parent();
}
unsafe extern "C" fn in_child() {
    let _errno = fsocket_sys::errno::Saved::errno();
    fork::child();
}

/// Value of an environment variable; `name` ends with '='.
fn env<'a>(envp: *const *const c_char, name: &[u8]) -> Option<&'a [u8]> {
    if envp.is_null() {
        return None;
    }
    let mut p = envp;
    // SAFETY: a null-terminated array of C strings that the loader passes.
    unsafe {
        while !(*p).is_null() {
            let s = core::ffi::CStr::from_ptr(*p).to_bytes();
            if let Some(v) = s.strip_prefix(name) {
                return Some(v);
            }
            p = p.add(1);
        }
    }
    None
}
