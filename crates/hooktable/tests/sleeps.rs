//! The library sleeps for the program in one place, [`WHERE`]: there are the limits of a sleep, signals and cancellation.
//! Elsewhere a system call that can sleep has the time limit 0, or it is a short wait for what another thread, process or
//! the monitor is in the middle of ([`INTERNAL`]).

use std::path::{Path, PathBuf};

const WHERE: &str = "wait/src";
/// The crates of the library.
const LIBRARY: &[&str] = &[
    "client",
    "compat",
    "fdtable",
    "lifecycle",
    "listeners",
    "migrate",
    "ops",
    "preload",
    "readiness",
    "reuseport",
    "runtime",
    "shm",
    "streams",
    "uaccess",
    "wait",
    "zones",
];
/// Calls that sleep. (`sys::` or not: some crates name the crate in full.)
const SLEEPS: &[&str] = &[
    "sys::ppoll(",
    "sys::epoll_wait(",
    "sys::futex_wait(",
    "sys::futex_wait_any(",
    "sys::nanosleep(",
    "sys::beside::wait(",
    "asleep::sleep(",
    "libc::SYS_ppoll,",
    "libc::SYS_nanosleep,",
    "libc::SYS_futex,",
];
/// File, calls in it, and for what they wait.
const INTERNAL: &[(&str, usize, &str)] = &[
    (
        "compat/src/unhooked.rs",
        1,
        "another thread that is about to enter a descriptor in our tables: a few milliseconds",
    ),
    ("fdtable/src/ctl/find.rs", 2, "another thread that looks for the monitor, and the monitor's greeting"),
    ("fdtable/src/ctl/wire.rs", 2, "the monitor's answer, and room in the kernel for a message"),
    ("fdtable/src/pristine.rs", 1, "nothing: the time limit is a constant 0"),
    ("lifecycle/src/lend.rs", 1, "a child made by vfork, as its parent does in the kernel"),
    ("lifecycle/src/pidfd_transfer.rs", 1, "another process that moves a connection to the kernel for us"),
    ("migrate/src/path/carry.rs", 2, "room in a kernel socket for what was left in a ring"),
    ("migrate/src/path/pair.rs", 2, "the handshake of two kernel sockets of this host"),
    ("migrate/src/path/patience.rs", 1, "the peer, in the middle of a path switch"),
    ("migrate/src/path/settle.rs", 1, "the monitor, which closes the peer's Unix socket: 100 ms"),
    ("migrate/src/path/queue.rs", 1, "a kernel socket that the path switch has just connected"),
    (
        "migrate/src/upgrade.rs",
        2,
        "another thread that decides on the same connection, and a stream that comes to rest",
    ),
    ("migrate/src/upgrade/offer.rs", 1, "the other side's answer to an offer: some milliseconds"),
    ("migrate/src/upgrade/passed.rs", 1, "another thread that decides on the same connection"),
    ("preload/src/init.rs", 1, "another thread that starts the library"),
    ("readiness/src/epoll/wrapper.rs", 1, "threads that are leaving an instance"),
    ("runtime/src/lock.rs", 1, "the holder of a lock"),
    ("runtime/src/slab.rs", 1, "another thread that takes memory"),
    ("runtime/src/token.rs", 1, "the holder of a token"),
    ("shm/src/asleep.rs", 1, "a cancelled thread that has not looked yet"),
    ("shm/src/cancel.rs", 1, "the thread in pthread_cancel"),
    ("shm/src/cancel_in_musl.rs", 1, "the thread in pthread_cancel"),
    ("shm/src/peers.rs", 1, "this is the sleep on a word beside processes, for the crate `wait`"),
    ("zones/src/page.rs", 1, "the holder of a lock between processes"),
];

fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(dir).expect("directory").map(|e| e.expect("entry").path()) {
        if path.is_dir() {
            files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// The arguments of a call that begins at the start of `text`, behind its bracket.
fn arguments(text: &str) -> &str {
    let mut depth = 1;
    let end = text.find(|c| {
        depth += match c {
            '(' | '[' => 1,
            ')' | ']' => -1,
            _ => 0,
        };
        depth == 0
    });
    &text[..end.unwrap_or(text.len())]
}

/// Calls in `text` that may sleep.
fn sleeps(text: &str) -> usize {
    let code: String = text.lines().filter(|l| !l.trim_start().starts_with("//")).flat_map(|l| [l, "\n"]).collect();
    let calls = SLEEPS.iter().flat_map(|call| code.match_indices(call).map(|(at, call)| at + call.len()));
    calls.filter(|at| !arguments(&code[*at..]).contains("Some(0)")).count()
}

#[test]
fn only_one_place_sleeps_for_the_program() {
    assert_eq!(sleeps("let r = sys::ppoll(&mut p, 1, Some(0), core::ptr::null());"), 0);
    assert_eq!(sleeps("sys::epoll_wait(\n    fd, events.as_mut_ptr(), (n as i32), None)"), 1);
    assert_eq!(sleeps("// sys::nanosleep(1)\nfsocket_sys::nanosleep(ns)"), 1);
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = Vec::new();
    LIBRARY.iter().for_each(|name| files(&crates.join(name).join("src"), &mut all));
    assert!(all.len() > 200, "the crates have moved: {} files", all.len());
    let (mut found, mut used) = (Vec::new(), Vec::new());
    for path in all {
        let name = path.strip_prefix(&crates).expect("a path below").display().to_string();
        let calls = sleeps(&std::fs::read_to_string(&path).expect("a source file"));
        let allowed = INTERNAL.iter().find(|(file, ..)| *file == name);
        used.extend(allowed.map(|(file, ..)| *file));
        if !name.starts_with(WHERE) && calls != allowed.map_or(0, |(_, n, _)| *n) {
            found.push(format!("{name}: {calls} calls that may sleep"));
        }
    }
    assert!(found.is_empty(), "use `fsocket_wait::sleep`, or say in `INTERNAL` for what they wait: {found:#?}");
    assert_eq!(used.len(), INTERNAL.len(), "files that are no more in the library");
    assert!(INTERNAL.iter().all(|(.., why)| !why.is_empty()));
}
