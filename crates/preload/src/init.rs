//! Before `main`, and the beginning of the library: at the first call that concerns it.
//!
//! Most programs open no socket. They pay for the mappings of the library, a look at what they have inherited, and
//! nothing else: no monitor is greeted, and hooks pass on what they are called for ([`is_asleep`], ADR 62).

use crate::{home, musl, summary};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicU8, Ordering};
use fsocket_fdtable::ctl;
use fsocket_lifecycle::exec::environment;
use fsocket_lifecycle::{fork, inherit, passing, start};
use fsocket_listeners::short_lived;
use fsocket_runtime::process::is_asleep;
use fsocket_runtime::signals::Held;
use fsocket_runtime::{lent, process, stats};
use fsocket_sys as sys;
use fsocket_zones as zone;
use fsocket_zones::Pin;
use libc::{c_char, c_int};

// Some hooks run earlier (constructors of other libraries): until this one has
// run, everything is passed on to libc.
#[used]
#[link_section = ".init_array"]
static INIT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = init;

// What the C library's start files would define: by its address libc knows whose a destructor of a thread is.
core::arch::global_asm!(
    ".pushsection .rodata.fsocket_dso_handle, \"a\"",
    ".hidden __dso_handle",
    ".globl __dso_handle",
    "__dso_handle: .quad 0",
    ".popsection"
);

// The last of the code (layout.ld).
core::arch::global_asm!(".pushsection .fsocket_end, \"ax\"", ".byte 0", ".popsection");

/// How far it is: one of the values below, or the identity of the thread that begins it.
#[link_section = ".data.fsocket_start"]
static STATE: AtomicU64 = AtomicU64::new(UNBORN);
/// The constructor has not run.
const UNBORN: u64 = 0;
const ASLEEP: u64 = 1;
/// It has begun, or never will.
const SETTLED: u64 = 2;

#[link_section = ".text.fsocket_start"]
extern "C" fn init(_argc: c_int, _argv: *const *const c_char, envp: *const *const c_char) {
    let _errno = sys::errno::Saved::errno();
    if is_secure() {
        // (Nothing of the environment is believed: a set-user-ID program was started by somebody else.)
        return STATE.store(SETTLED, Ordering::Release);
    }
    if !musl::recognise() || !musl::at_fork(before, in_parent, in_child) {
        return STATE.store(SETTLED, Ordering::Release);
    }
    let envp = match fsocket_runtime::musl::is_here() {
        // (It calls constructors without arguments.)
        // SAFETY: libc's variable, which its loader has set; a copy of the pointer.
        true => unsafe { environ },
        false => envp,
    };
    let once = environment::note(envp);
    if let Some(pid) = once.summary {
        summary::begin(pid);
    }
    STATE.store(ASLEEP, Ordering::Release);
    if once.successor.is_some() || inherit::any_of_concern() {
        begin(once.successor, true);
    }
    if once.successor.is_some() {
        forget(envp, environment::SUCCESSOR);
    }
}

/// Has the kernel given this program more rights than its caller's? (/etc/ld.so.preload loads the library there, too.)
#[link_section = ".text.fsocket_start"]
fn is_secure() -> bool {
    // SAFETY: a number.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

extern "C" {
    static environ: *const *const c_char;
}

/// How long a thread waits for another one that is beginning, nanoseconds. Its call is the kernel's then.
const BEGINNING_FOR: u64 = 1_000_000_000;

/// Before a call that concerns the library.
#[cold]
pub fn wake() {
    if is_asleep() {
        begin(None, false);
    }
}

/// Before the program gives up system calls: what has not begun by now never does.
pub fn never() {
    let _ = STATE.compare_exchange(ASLEEP, SETTLED, Ordering::AcqRel, Ordering::Relaxed);
}

#[inline(never)]
fn begin(successor: Option<&'static [u8]>, inherits: bool) {
    let _errno = sys::errno::Saved::errno();
    // (A handler would find it half begun, and must not wait for the thread that it has interrupted.)
    let _held = Held::all();
    let me = sys::cpu::thread_id();
    if is_in_parents_memory() || STATE.compare_exchange(ASLEEP, me, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return await_beginning();
    }
    set_up(successor, inherits);
    STATE.store(SETTLED, Ordering::Release);
}

fn set_up(successor: Option<&'static [u8]>, inherits: bool) {
    // SAFETY: libc's variable; a copy of the pointer.
    let now = unsafe { environ };
    let socket = environment::at_start(environment::SOCKET, now);
    let disabled = environment::at_start(environment::DISABLE, now);
    let off = |part: &[u8]| disabled.is_some_and(|v| v.split(|c| *c == b',').any(|w| w == part));
    let number = |v: &[u8]| core::str::from_utf8(v).ok()?.parse().ok();
    environment::remember(now, library());
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
    // (A program's own one may be one that watches: ThreadSanitizer's would call the order of a ring's words a race.)
    if let Some(memcpy) = crate::memory::libcs_memcpy() {
        fsocket_uaccess::copy_by(memcpy);
    }
    start::init(&start::Config {
        socket,
        disabled: off(b"shm"),
        no_zones: off(b"zones"),
        no_balance: off(b"balance"),
        no_unix: off(b"unix"),
        pin: Pin::parse(environment::at_start(environment::PIN, now).unwrap_or(b"")),
        upgrade: environment::at_start(environment::UPGRADE, now).and_then(number),
        patience: environment::at_start(environment::PATIENCE, now).and_then(number),
        rseq_offset,
        single_threaded: single_threaded(),
        successor,
        inherits,
    });
    process::awake();
}

/// glibc's word of whether the process has one thread, since 2.32.
fn single_threaded() -> Option<&'static AtomicU8> {
    // SAFETY: a NUL-terminated name; glibc's symbol is a `char`, which is read and written whole.
    unsafe { (libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) as *const AtomicU8).as_ref() }
}

/// Another thread may just be beginning: what this one makes meanwhile would stay the kernel's.
#[cold]
fn await_beginning() {
    let began = sys::now_ns();
    while STATE.load(Ordering::Acquire) > SETTLED && sys::now_ns().saturating_sub(began) < BEGINNING_FOR {
        sys::nanosleep(20_000);
    }
}

/// Of the last call that made a child which runs in this process's memory (`vfork`); 0: there was none.
#[link_section = ".data.fsocket_start"]
static LENDER: AtomicI32 = AtomicI32::new(0);

/// This process is about to lend its memory to a child until that executes a program.
pub fn lends_memory() {
    let pid = sys::getpid();
    if LENDER.load(Ordering::Relaxed) != pid {
        LENDER.store(pid, Ordering::Relaxed);
    }
}

/// Is this such a child? What it began would be the parent's, with the child's descriptors.
fn is_in_parents_memory() -> bool {
    ![0, sys::getpid()].contains(&LENDER.load(Ordering::Relaxed))
}

#[used]
#[link_section = ".fini_array"]
static FINI: extern "C" fn() = fini;

#[link_section = ".text.fsocket_start"]
extern "C" fn fini() {
    if lent::is_borrower() {
        // (`exit` in the child of a `vfork`: the parent goes on.)
        return;
    }
    if is_asleep() {
        return summary::print();
    }
    short_lived::at_exit();
    passing::at_exit();
    zone::at_exit();
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
    let _errno = sys::errno::Saved::errno();
    before_fork();
    // (Beside other threads the loader's lock might be taken.)
    if !HAS_FOUND_EXEC.load(Ordering::Relaxed) && is_alone() {
        HAS_FOUND_EXEC.store(true, Ordering::Relaxed);
        crate::real::find_for_exec();
    }
    // (Such children have sockets to serve, over the kernel, too.)
    let serves = short_lived::is_for_connection() || !is_asleep() && is_alone();
    if serves && !HAS_FOUND.load(Ordering::Relaxed) {
        HAS_FOUND.store(true, Ordering::Relaxed);
        crate::real::find_for_children();
    }
}
#[link_section = ".text.fsocket_start"]
unsafe extern "C" fn in_parent() {
    let _errno = unless_asleep();
    after_fork();
}
#[link_section = ".text.fsocket_start"]
unsafe extern "C" fn in_child() {
    born();
}

/// Nothing changes errno while the library is asleep, and libc's way to it is a page fault for the child of a shell.
#[inline(always)]
fn unless_asleep() -> Option<sys::errno::Saved> {
    (!is_asleep()).then(sys::errno::Saved::errno)
}

/// Has this process never had a second thread?
fn is_alone() -> bool {
    match is_asleep() {
        true => single_threaded().is_some_and(|word| word.load(Ordering::Relaxed) != 0),
        false => process::is_single_threaded(),
    }
}

/// The process is about to fork.
#[link_section = ".text.fsocket_start"]
pub fn before_fork() {
    if STATE.load(Ordering::Relaxed) > SETTLED {
        // (The child would have half of it.)
        await_beginning();
    }
    if !is_asleep() && !lent::is_borrower() {
        fork::prepare();
    }
}

/// In the parent.
#[link_section = ".text.fsocket_start"]
pub fn after_fork() {
    if !is_asleep() && !lent::is_borrower() {
        fork::parent();
    }
}

/// In the child. While the library has not begun nothing is written: each page would be copied.
#[link_section = ".text.fsocket_start"]
pub fn born() {
    if lent::is_borrower() {
        // A child of the child of a `vfork`: it goes on as that one, with memory of its own.
        return lent::become_child();
    }
    if !is_asleep() {
        return fork::child();
    }
    if LENDER.load(Ordering::Relaxed) != 0 {
        LENDER.store(0, Ordering::Relaxed);
    }
    if STATE.load(Ordering::Relaxed) > SETTLED {
        // The thread that was beginning is not here.
        STATE.store(SETTLED, Ordering::Relaxed);
    }
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
