//! Before `main`.

use crate::{home, musl, summary};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use fsocket_lifecycle::exec::environment;
use fsocket_lifecycle::zone::{self, Pin};
use fsocket_lifecycle::{brief, ctl, fork, listen, passing, process, start, stats};
use libc::{c_char, c_int};

// Some hooks run earlier (constructors of other libraries): until this one has
// run, everything is passed on to libc.
#[used]
#[link_section = ".init_array"]
static INIT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = init;

#[link_section = ".text.fsocket_start"]
extern "C" fn init(_argc: c_int, _argv: *const *const c_char, envp: *const *const c_char) {
    let _errno = fsocket_sys::errno::Saved::errno();
    if musl::is_here() {
        return;
    }
    let socket = env(envp, b"FASTSOCKET_SOCKET=");
    let off =
        |part: &[u8]| env(envp, b"FASTSOCKET_DISABLE=").is_some_and(|v| v.split(|c| *c == b',').any(|w| w == part));
    let (disabled, no_zones, no_balance) = (off(b"shm"), off(b"zones"), off(b"balance"));
    let pin = Pin::parse(env(envp, b"FASTSOCKET_PIN=").unwrap_or(b""));
    let upgrade = env(envp, b"FASTSOCKET_UPGRADE=").and_then(|v| core::str::from_utf8(v).ok()?.parse().ok());
    environment::remember(envp, library());
    if let Some(pid) = env(envp, b"FASTSOCKET_SUMMARY=") {
        summary::begin(pid);
    }
    let successor = env(envp, environment::SUCCESSOR);
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
    // SAFETY: a NUL-terminated name; glibc's symbol is a `char`, which is read and written whole.
    let single_threaded =
        unsafe { (libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) as *const AtomicU8).as_ref() };
    past_thread_sanitizer();
    start::init(&start::Config {
        socket,
        disabled,
        no_zones,
        no_balance,
        pin,
        upgrade,
        rseq_offset,
        single_threaded,
        successor,
    });
    if successor.is_some() {
        forget(envp, environment::SUCCESSOR);
    }
    musl::at_fork(before, in_parent, in_child);
}

#[used]
#[link_section = ".fini_array"]
static FINI: extern "C" fn() = fini;

#[link_section = ".text.fsocket_start"]
extern "C" fn fini() {
    brief::at_end();
    // (Else those are the parent's.)
    if !listen::is_deferred() {
        passing::at_exit();
        zone::at_exit();
    }
    stats::at_exit(ctl::alive());
    summary::print();
}

/// Was [`crate::real::find_for_exec`] called?
#[link_section = ".data.fsocket_start"]
static HAS_FOUND_EXEC: AtomicBool = AtomicBool::new(false);
/// Was [`crate::real::find_for_children`] called?
#[link_section = ".data.fsocket_start"]
static HAS_FOUND: AtomicBool = AtomicBool::new(false);

#[link_section = ".text.fsocket_start"]
unsafe extern "C" fn before() {
    let _errno = fsocket_sys::errno::Saved::errno();
    fork::prepare();
    // (Beside other threads the loader's lock might be taken.)
    if !HAS_FOUND_EXEC.load(Ordering::Relaxed) && process::is_single_threaded() {
        HAS_FOUND_EXEC.store(true, Ordering::Relaxed);
        crate::real::find_for_exec();
    }
    if brief::is_for_connection() && !HAS_FOUND.swap(true, Ordering::Relaxed) {
        crate::real::find_for_children();
    }
}
#[link_section = ".text.fsocket_start"]
unsafe extern "C" fn in_parent() {
    let _errno = fsocket_sys::errno::Saved::errno();
    fork::parent();
}
#[link_section = ".text.fsocket_start"]
unsafe extern "C" fn in_child() {
    let _errno = fsocket_sys::errno::Saved::errno();
    fork::child();
}

/// ThreadSanitizer takes the place of `memcpy`, for us too: rings are copied by libc's own.
fn past_thread_sanitizer() {
    if !copies_and_locks() {
        return;
    }
    // SAFETY: NUL-terminated names; a library that is there already, of which nothing is closed;
    // libc's memcpy has that type.
    unsafe {
        let own = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if own.is_null() {
            return;
        }
        let memcpy = libc::dlsym(own, c"memcpy".as_ptr());
        if !memcpy.is_null() {
            fsocket_lifecycle::copy_by(core::mem::transmute::<*mut libc::c_void, fsocket_lifecycle::Memcpy>(memcpy));
        }
    }
}

/// Does something else than libc give the program its `memcpy` and its locks? ThreadSanitizer does, and
/// nothing else need be known of it (the loader knows little more if its runtime lies in the program);
/// AddressSanitizer, which is to see what we copy, leaves those of readers and writers alone.
fn copies_and_locks() -> bool {
    // SAFETY: NUL-terminated names. (All are there: one that is not would cost as much as all else here.)
    let find = |handle, name: &core::ffi::CStr| unsafe { libc::dlsym(handle, name.as_ptr()) };
    let copies = find(libc::RTLD_DEFAULT, c"memcpy");
    copies != find(libc::RTLD_NEXT, c"memcpy")
        && home::of(copies) != home::of(find(libc::RTLD_NEXT, c"memcpy"))
        && home::of(copies) == home::of(find(libc::RTLD_DEFAULT, c"pthread_rwlock_rdlock"))
}

/// The path under which the loader knows this library.
fn library() -> &'static [u8] {
    home::of(init as *const libc::c_void).map_or(b"", |h| h.name.to_bytes())
}

/// Take a variable out of the environment: it was for us.
fn forget(envp: *const *const c_char, name: &[u8]) {
    let mut from = envp as *mut *const c_char;
    let mut to = from;
    // SAFETY: the array that the loader passes is the program's own, writable and
    // ends with null; nothing else runs yet.
    unsafe {
        while !(*from).is_null() {
            if !core::ffi::CStr::from_ptr(*from).to_bytes().starts_with(name) {
                *to = *from;
                to = to.add(1);
            }
            from = from.add(1);
        }
        *to = core::ptr::null();
    }
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
