//! The executor: the fork servers, and the processes and threads of a program. It runs with or
//! without the library. It makes every call of a program through libc, and all calls of its own as
//! raw system calls.

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
/// The path by which `exec` can open the memory again.
pub(crate) static PATH: OnceLock<String> = OnceLock::new();

thread_local! {
    /// The slot of this thread, for signal handlers.
    static MINE: Cell<Option<&'static Slot>> = const { Cell::new(None) };
}

/// An actor that gets no order for this long ends, because its scheduler is dead.
const ORPHAN_NS: u64 = 60_000_000_000;
/// Limit of a process's life, in seconds.
const LIFE: u32 = 180;

fn attach(path: &str) -> &'static Shared {
    let shared = shared::open(path).expect("the scheduler's memory");
    let _ = PATH.set(path.to_owned());
    SHARED.get_or_init(|| shared)
}

/// Main function of a fork server. Never returns.
pub fn serve(path: &str, flavour: usize) -> ! {
    let shared = attach(path);
    let slot = shared.server(flavour);
    // This process adopts the orphans of its children, so that it can collect them.
    // SAFETY: the call takes numbers only.
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

/// Waits until a child has ended, and collects it. Returns false if there is no child.
fn wait_child() -> bool {
    // SAFETY: the status pointer is null.
    unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) > 0 }
}

fn spawn(shared: &'static Shared, actor: usize) {
    // SAFETY: this process has one thread, so the child may go on like its parent.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: the call takes numbers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            begin_process();
            perform(shared, actor)
        }
        pid => assert!(pid > 0, "fork: {}", std::io::Error::last_os_error()),
    }
}

/// Main function of a process after `exec`. Never returns.
pub fn resume(path: &str, actor: usize) -> ! {
    let shared = attach(path);
    let slot = shared.slot(actor);
    // The slot must be known before any process can send a signal.
    MINE.with(|mine| mine.set(Some(slot)));
    begin_process();
    slot.tid.store(sys::gettid(), Relaxed);
    slot.ret.store(0, Relaxed);
    shared.answered(slot);
    perform(shared, actor)
}

fn begin_process() {
    // SAFETY: `alarm` takes a number only.
    unsafe { libc::alarm(LIFE) };
    handle_signals(0);
}

fn handle_signals(flags: i32) {
    // SAFETY: `action` is a valid local value, and the handler only touches atomics.
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

/// Executes the orders for `actor`. Returns only by the end of the process.
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
            // SAFETY: `_exit` takes a number only.
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

/// Executes the `fork` of a program: the child becomes actor `child`.
fn fork_actor(shared: &'static Shared, child: usize) -> i64 {
    // SAFETY: the child continues in `perform` on a copy of this memory, as after any `fork`.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: `alarm` takes a number only. (A child does not inherit an alarm.)
            unsafe { libc::alarm(LIFE) };
            perform(shared, child)
        }
        -1 => -1,
        _ => wait_for(shared, child),
    }
}

/// Executes `clone(CLONE_FILES)`: the child shares only its descriptors with this process.
fn clone_files(shared: &'static Shared, child: usize) -> i64 {
    // SAFETY: without CLONE_VM this is a `fork`: the child runs on a copy of this stack.
    match unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => {
            // SAFETY: `alarm` takes a number only. (A child does not inherit an alarm.)
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

/// Waits until an actor exists, for about 50 s at most. Returns 0, or -1 if there is none.
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

/// Executes the `exec` of a program: this executable starts again, as the same actor.
fn exec(shared: &Shared, slot: &Slot) -> i64 {
    let actor = (0..crate::program::ACTORS).find(|i| std::ptr::eq(shared.slot(*i), slot)).unwrap_or(0);
    let path = PATH.get().map_or("", String::as_str);
    let words = ["fsocket-differential", "actor", path, &actor.to_string()];
    let words: Vec<_> = words.iter().map(|w| std::ffi::CString::new(*w).expect("no NUL")).collect();
    let mut argv: Vec<_> = words.iter().map(|w| w.as_ptr()).collect();
    argv.push(std::ptr::null());
    // SAFETY: the path is a C string, and `argv` is a null-terminated array of C strings.
    unsafe { libc::execv(c"/proc/self/exe".as_ptr(), argv.as_ptr()) };
    -1
}
