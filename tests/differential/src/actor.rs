//! The executor: fork servers, and the processes and threads of a program.
//! Runs with or without the library; makes every call of a program through
//! libc, and everything of its own by system call.

mod calls;

pub use calls::any::{form, INNER, NAMES as ANY};
pub use calls::child::main as child;
pub use calls::long::NAMES as LONG;
pub use calls::names::unix_port;

use crate::shared::{self, state, Shared, Slot, REAP, SPAWN};
use fsocket_sys as sys;
use std::cell::Cell;
use std::sync::atomic::Ordering::*;
use std::sync::OnceLock;

pub(crate) static SHARED: OnceLock<&'static Shared> = OnceLock::new();
/// Where the memory can be opened again, for `exec`.
pub(crate) static PATH: OnceLock<String> = OnceLock::new();

thread_local! {
    /// Slot of this thread, for signal handlers.
    static MINE: Cell<Option<&'static Slot>> = const { Cell::new(None) };
}

/// An actor that hears nothing for so long ends: its scheduler is dead.
const ORPHAN_NS: u64 = 60_000_000_000;
/// Limit of a process's life, seconds.
const LIFE: u32 = 180;

fn attach(path: &str) -> &'static Shared {
    let shared = shared::open(path).expect("the scheduler's memory");
    let _ = PATH.set(path.to_owned());
    SHARED.get_or_init(|| shared)
}

/// Main of a fork server. Never returns.
pub fn serve(path: &str, flavour: usize) -> ! {
    let shared = attach(path);
    let slot = shared.server(flavour);
    // Orphans of its children are its children: it can collect them.
    // SAFETY: plain prctl.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    slot.pid.store(sys::getpid(), Relaxed);
    slot.tid.store(sys::gettid(), Relaxed);
    shared.answered(slot);
    loop {
        if !slot.next_order(u64::MAX / 2) {
            continue;
        }
        match slot.call.load(Relaxed) {
            SPAWN => spawn(shared, slot.arg(0) as usize),
            REAP => while wait_child() {},
            other => panic!("order {other}"),
        }
        shared.answered(slot);
    }
}

/// Collects one child that has ended or is about to; false: there is none.
fn wait_child() -> bool {
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) > 0 }
}

fn spawn(shared: &'static Shared, actor: usize) {
    // SAFETY: a fork of a process with one thread.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: plain prctl.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            begin_process();
            perform(shared, actor)
        }
        pid => assert!(pid > 0, "fork: {}", std::io::Error::last_os_error()),
    }
}

/// Main of a process that `exec` of a program has made. Never returns.
pub fn resume(path: &str, actor: usize) -> ! {
    let shared = attach(path);
    let slot = shared.slot(actor);
    // Before anybody may send a signal.
    MINE.with(|mine| mine.set(Some(slot)));
    begin_process();
    slot.tid.store(sys::gettid(), Relaxed);
    slot.ret.store(0, Relaxed);
    shared.answered(slot);
    perform(shared, actor)
}

fn begin_process() {
    // SAFETY: plain alarm.
    unsafe { libc::alarm(LIFE) };
    handle_signals(0);
}

fn handle_signals(flags: i32) {
    // SAFETY: handlers that only touch atomics.
    unsafe {
        for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGPIPE] {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = flags;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

extern "C" fn on_signal(signal: i32) {
    let which = match signal {
        libc::SIGUSR1 => 0,
        libc::SIGUSR2 => 1,
        _ => 2,
    };
    if let Some(slot) = MINE.with(Cell::get) {
        slot.signals[which].fetch_add(1, Relaxed);
    }
}

/// Be an actor until told to end. Never returns, except by the end of the
/// process.
fn perform(shared: &'static Shared, actor: usize) -> ! {
    let slot = shared.slot(actor);
    MINE.with(|mine| mine.set(Some(slot)));
    slot.pid.store(sys::getpid(), Relaxed);
    slot.tid.store(sys::gettid(), Relaxed);
    if slot.state.load(Acquire) == state::FREE {
        slot.state.store(state::IDLE, Release);
        shared.answers.fetch_add(1, Release);
        sys::futex_wake(&shared.answers, i32::MAX);
    }
    loop {
        if !slot.next_order(ORPHAN_NS) {
            // SAFETY: ends the process.
            unsafe { libc::_exit(3) };
        }
        slot.n_aux.store(0, Relaxed);
        slot.len.store(0, Relaxed);
        let (ret, errno) = calls::make(shared, slot);
        slot.ret.store(ret, Relaxed);
        slot.errno.store(errno, Relaxed);
        shared.answered(slot);
    }
}

/// `fork` of a program: the child is actor `child`.
fn fork_actor(shared: &'static Shared, child: usize) -> i64 {
    // SAFETY: as any program forks.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: plain alarm; alarms are not inherited.
            unsafe { libc::alarm(LIFE) };
            perform(shared, child)
        }
        -1 => -1,
        _ => wait_for(shared, child),
    }
}

/// `clone(CLONE_FILES)`: a process that shares its descriptors with this one, and nothing else.
fn clone_files(shared: &'static Shared, child: usize) -> i64 {
    // SAFETY: as `fork` of a process, on a copy of this stack.
    match unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => {
            // SAFETY: plain alarm; alarms are not inherited.
            unsafe { libc::alarm(LIFE) };
            perform(shared, child)
        }
        -1 => -1,
        _ => wait_for(shared, child),
    }
}

fn start_thread(shared: &'static Shared, actor: usize) -> i64 {
    let started = std::thread::Builder::new().stack_size(256 * 1024).spawn(move || -> () { perform(shared, actor) });
    match started {
        Ok(_) => wait_for(shared, actor),
        Err(_) => -1,
    }
}

/// Wait until an actor is there.
fn wait_for(shared: &Shared, actor: usize) -> i64 {
    for _ in 0..50_000 {
        let seen = shared.answers.load(Acquire);
        if shared.slot(actor).state.load(Acquire) != state::FREE {
            return 0;
        }
        let _ = sys::futex_wait(&shared.answers, seen, Some(1_000_000));
    }
    -1
}

/// `exec` of a program: this very program again, as the same actor.
fn exec(shared: &Shared, slot: &Slot) -> i64 {
    let actor = (0..crate::program::ACTORS).find(|i| std::ptr::eq(shared.slot(*i), slot)).unwrap_or(0);
    let path = PATH.get().map_or("", String::as_str);
    let words = ["fsocket-differential", "actor", path, &actor.to_string()];
    let words: Vec<_> = words.iter().map(|w| std::ffi::CString::new(*w).expect("no NUL")).collect();
    let mut argv: Vec<_> = words.iter().map(|w| w.as_ptr()).collect();
    argv.push(std::ptr::null());
    // SAFETY: a path, and a null-terminated array of strings.
    unsafe { libc::execv(c"/proc/self/exe".as_ptr(), argv.as_ptr()) };
    -1
}
