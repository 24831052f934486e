//! Short runs; `make hostile` and `make kills` do the long ones. Only those judge times, because
//! other tests may run at the same time as these.

use std::process::Command;

#[track_caller]
fn run(args: &[&str]) {
    // SAFETY: the call takes no argument.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: needs root, to be several users");
        return;
    }
    let out = Command::new(env!("CARGO_BIN_EXE_fsocket-hostile")).args(args).output().expect("it starts");
    let (said, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{said}");
    assert!(out.status.success(), "{said}{errors}");
}

/// Runs every script, each life as a different user.
#[test]
fn honest_users_beside_hostile_ones_see_nothing_wrong() {
    run(&["run", "--time", "8", "--turns", "1", "--uids", "400", "--seed", "11"]);
}

/// Hostile users that share no memory with the servers' user.
#[test]
fn nor_beside_strangers() {
    run(&[
        "run",
        "--strangers",
        "--servers",
        "redis,epoll",
        "--time",
        "4",
        "--turns",
        "1",
        "--uids",
        "8",
        "--seed",
        "12",
    ]);
}

/// `tail = head + 2^31` once kept a server busy for good, and so did each of the other scripts
/// here.
#[test]
fn a_few_writes_do_not_keep_a_server_busy() {
    // Percentage of a CPU. A server that is kept busy takes a whole CPU. (The connections that some
    // scripts open cost something as well, and builds with extra checks cost more.)
    for script in ["queue positions", "a status that no side has", "moves and never arrives", "bad records"] {
        let args = ["run", "--servers", "epoll,threaded", "--time", "3", "--turns", "1", "--uids", "1"];
        run(&[&args[..], &["--cpu-share", "60", "--script", script]].concat());
    }
}

#[test]
fn the_other_side_learns_of_each_kill() {
    run(&["kills", "--count", "60", "--seed", "5"]);
}
