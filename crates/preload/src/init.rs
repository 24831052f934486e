//! Runs before `main`, and starts the library in the first call that concerns it (ADR 62).
//!
//! Most programs open no socket. They pay only for the mappings of the library and for a check of
//! inherited descriptors. Until the library starts it is *asleep*: hooks pass their calls on
//! ([`is_asleep`]), and write nothing to the library's memory. The library starts at most once in
//! a process.

use crate::{home, musl, summary};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicU8, Ordering};
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

// Until this constructor has run, hooks pass everything to libc, because constructors of other
// libraries may call them earlier.
#[used]
#[link_section = ".init_array"]
static INIT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = init;

// The C library's start files would define this symbol. By its address libc knows which library
// has registered a destructor for a thread.
core::arch::global_asm!(
    ".pushsection .rodata.fsocket_dso_handle, \"a\"",
    ".hidden __dso_handle",
    ".globl __dso_handle",
    "__dso_handle: .quad 0",
    ".popsection"
);

// Marks the end of the code (layout.ld).
core::arch::global_asm!(".pushsection .fsocket_end, \"ax\"", ".byte 0", ".popsection");

/// The state of the library: one of the values below, or the identity of the thread that is
/// starting it.
#[link_section = ".data.fsocket_start"]
static STATE: AtomicU64 = AtomicU64::new(UNBORN);
/// The constructor has not run yet.
const UNBORN: u64 = 0;
const ASLEEP: u64 = 1;
/// The library has started, or never will.
const SETTLED: u64 = 2;

#[link_section = ".text.fsocket_start"]
extern "C" fn init(_argc: c_int, _argv: *const *const c_char, envp: *const *const c_char) {
    let _errno = sys::errno::Saved::errno();
    if is_secure() {
        // A set-user-ID program was started by another user, so its environment cannot be trusted.
        return STATE.store(SETTLED, Ordering::Release);
    }
    if !musl::recognise() || !musl::at_fork(before, in_parent, in_child) {
        return STATE.store(SETTLED, Ordering::Release);
    }
    let envp = match fsocket_runtime::musl::is_here() {
        // musl calls constructors without arguments.
        // SAFETY: `environ` is libc's variable, which the loader has set; only its value is
        // copied.
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

/// Has the kernel given this program more rights than its caller has? (/etc/ld.so.preload loads
/// the library there, too.)
#[link_section = ".text.fsocket_start"]
fn is_secure() -> bool {
    // SAFETY: the call takes a number only.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

extern "C" {
    static environ: *const *const c_char;
}

/// How long a thread waits for another thread that is starting the library, in nanoseconds. After
/// that its call goes to the kernel.
const BEGINNING_FOR: u64 = 1_000_000_000;

/// Starts the library, before a call that concerns it.
#[cold]
pub fn wake() {
    if is_asleep() {
        begin(None, false);
    }
}

/// Called before the program gives up system calls: a library that has not started yet never does.
pub fn never() {
    let _ = STATE.compare_exchange(ASLEEP, SETTLED, Ordering::AcqRel, Ordering::Relaxed);
}

#[inline(never)]
fn begin(successor: Option<&'static [u8]>, inherits: bool) {
    let _errno = sys::errno::Saved::errno();
    // A signal handler would find the library half started, and must not wait for the thread that
    // it has interrupted.
    let _held = Held::all();
    let me = sys::cpu::thread_id();
    if is_in_parents_memory() || STATE.compare_exchange(ASLEEP, me, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return await_beginning();
    }
    set_up(successor, inherits);
    STATE.store(SETTLED, Ordering::Release);
    HAS_BEGUN.store(1, Ordering::Release);
    sys::futex_wake(&HAS_BEGUN, i32::MAX);
}

fn set_up(successor: Option<&'static [u8]>, inherits: bool) {
    // SAFETY: `environ` is libc's variable; only its value is copied.
    let now = unsafe { environ };
    let socket = environment::at_start(environment::SOCKET, now);
    let disabled = environment::at_start(environment::DISABLE, now);
    let off = |part: &[u8]| disabled.is_some_and(|v| v.split(|c| *c == b',').any(|w| w == part));
    let number = |v: &[u8]| core::str::from_utf8(v).ok()?.parse().ok();
    environment::remember(now, library());
    // SAFETY: the names are NUL-terminated. glibc's variables of these names have these types.
    let rseq_offset = unsafe {
        let p = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) as *const isize;
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()) as *const u32;
        // A size of 0 means that the registration failed or was switched off.
        if p.is_null() || size.is_null() || *size == 0 {
            None
        } else {
            Some(*p)
        }
    };
    // Uses libc's `memcpy`, because the program's own may be instrumented: ThreadSanitizer's would
    // report the accesses to a ring as a race.
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

/// glibc's variable that says whether the process has only one thread (since 2.32).
fn single_threaded() -> Option<&'static AtomicU8> {
    // SAFETY: the name is NUL-terminated. glibc's variable is a `char`, which is read and written
    // as a whole.
    unsafe { (libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) as *const AtomicU8).as_ref() }
}

/// Waits while another thread is starting the library. (Otherwise a socket made meanwhile would
/// stay in the kernel.)
#[cold]
fn await_beginning() {
    let began = sys::now_ns();
    while STATE.load(Ordering::Acquire) > SETTLED {
        let left = BEGINNING_FOR.saturating_sub(sys::now_ns().saturating_sub(began));
        if left == 0 {
            break;
        }
        let _ = sys::futex_wait(&HAS_BEGUN, 0, Some(left));
    }
}

/// 1: the library has started. Threads that wait for the start sleep on this word.
#[link_section = ".data.fsocket_start"]
static HAS_BEGUN: AtomicU32 = AtomicU32::new(0);

/// The process that last made a child in its own memory (`vfork`); 0: none.
#[link_section = ".data.fsocket_start"]
static LENDER: AtomicI32 = AtomicI32::new(0);

/// Records that this process is about to lend its memory to a child until the child executes a
/// program.
pub fn lends_memory() {
    let pid = sys::getpid();
    if LENDER.load(Ordering::Relaxed) != pid {
        LENDER.store(pid, Ordering::Relaxed);
    }
}

/// Does this process run in its parent's memory? Such a child must not start the library: that
/// would happen in the parent's memory, with the child's descriptors.
fn is_in_parents_memory() -> bool {
    ![0, sys::getpid()].contains(&LENDER.load(Ordering::Relaxed))
}

#[used]
#[link_section = ".fini_array"]
static FINI: extern "C" fn() = fini;

#[link_section = ".text.fsocket_start"]
extern "C" fn fini() {
    if lent::is_borrower() {
        // `exit` in the child of a `vfork`: the parent continues.
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
    // With other threads, the loader's lock might be held.
    if !HAS_FOUND_EXEC.load(Ordering::Relaxed) && is_alone() {
        HAS_FOUND_EXEC.store(true, Ordering::Relaxed);
        crate::real::find_for_exec();
    }
    // Such children serve sockets, also over the kernel.
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

/// Saves errno only if the library has started. While asleep it changes no errno, and the access
/// to errno would cost the child of a shell a page fault.
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

/// Called before a fork.
#[link_section = ".text.fsocket_start"]
pub fn before_fork() {
    if STATE.load(Ordering::Relaxed) > SETTLED {
        // Otherwise the child would have a library that is only half started.
        await_beginning();
    }
    if !is_asleep() && !lent::is_borrower() {
        fork::prepare();
    }
}

/// Called in the parent after a fork.
#[link_section = ".text.fsocket_start"]
pub fn after_fork() {
    if !is_asleep() && !lent::is_borrower() {
        fork::parent();
    }
}

/// Called in the child after a fork. While the library is asleep this writes nothing, because the
/// kernel copies each page that is written.
#[link_section = ".text.fsocket_start"]
pub fn born() {
    if lent::is_borrower() {
        // This child was forked by the child of a `vfork`, so it has its own memory.
        return lent::become_child();
    }
    if !is_asleep() {
        return fork::child();
    }
    if LENDER.load(Ordering::Relaxed) != 0 {
        LENDER.store(0, Ordering::Relaxed);
    }
    if STATE.load(Ordering::Relaxed) > SETTLED {
        // The thread that was starting the library does not exist in the child.
        STATE.store(SETTLED, Ordering::Relaxed);
    }
}

/// The path by which the loader knows this library.
fn library() -> &'static [u8] {
    home::of(init as *const libc::c_void).map_or(b"", |h| h.name.to_bytes())
}

/// Removes the library's own variable from the environment.
fn forget(envp: *const *const c_char, name: &[u8]) {
    let mut from = envp as *mut *const c_char;
    let mut to = from;
    // SAFETY: the loader passes the program's own array, which is writable and ends with null. No
    // other code of the program runs yet.
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
