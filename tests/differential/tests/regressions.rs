//! Every program that differed once, and a short run of new ones.

use fsocket_differential::campaign::{self, Outcome, Plan};
use fsocket_differential::generate::Switches;
use fsocket_differential::lane::Lane;
use fsocket_differential::regression::Regression;
use fsocket_testkit::stock_mode;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn executor() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_fsocket-differential"))
}

#[test]
fn programs_that_differed_once() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let all = Regression::all(&dir).expect("regressions");
    assert!(all.len() > 10, "only {} regressions in {}", all.len(), dir.display());
    let mut lane = Lane::new(&executor()).expect("a lane");
    let failures: Vec<String> = all.iter().filter_map(|r| r.check(&mut lane).err().map(|e| format!("{e:?}"))).collect();
    assert!(failures.is_empty(), "{} of {} differ\n{}", failures.len(), all.len(), failures.join("\n"));
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
    }
}

/// Listeners that shadow each other, some of them the kernel's alone. (Not with a process without the
/// library: one that comes there later is noticed after 2 s only.)
#[test]
fn listeners_that_shadow_each_other() {
    let outcome = equal("listeners", 80);
    let (shm, kernel) = outcome.paths();
    assert!(stock_mode() || shm > outcome.programs && kernel > 0, "{shm} over shared memory, {kernel} over the kernel");
}

/// Pointers that lead nowhere, odd values and options, raw calls.
#[test]
fn odd_arguments() {
    let outcome = equal("odd", 200);
    assert!(stock_mode() || outcome.paths().0 > outcome.programs, "{:?}", outcome.paths());
}

/// Sockets that are changed and closed, looks at the next one, and sockets that the kernel takes by number.
#[test]
fn recycled_sockets() {
    let outcome = equal("recycled", 150);
    let moved = outcome.counters.get("path_switch").copied().unwrap_or(0);
    let shm = outcome.paths().0;
    assert!(stock_mode() || shm > outcome.programs && moved > 0, "{shm} over shared memory, {moved} moved");
}

/// Sends that are held back (TCP_CORK, MSG_MORE, Nagle), and let go.
#[test]
fn held_back() {
    let outcome = equal("cork", 150);
    assert!(stock_mode() || outcome.paths().0 > outcome.programs, "{:?}", outcome.paths());
}

/// Clients that come and go before listeners that are watched by edges.
#[test]
fn listeners_watched_by_edges() {
    let outcome = equal("edges", 80);
    let (shm, kernel) = outcome.paths();
    assert!(stock_mode() || shm > outcome.programs && kernel * 10 < shm, "{shm} over shared memory, {kernel} not");
}

/// Unix streams, most of which go over to shared memory.
#[test]
fn unix_streams() {
    let outcome = equal("unix", 80);
    let over = outcome.counters.get("path_upgrade").copied().unwrap_or(0);
    assert!(stock_mode() || over > outcome.programs, "{over} ends of {} programs went over", outcome.programs);
}

/// Options, each tried by its effect.
#[test]
fn options_that_act() {
    let outcome = equal("acts", 40);
    assert!(stock_mode() || outcome.paths().0 > outcome.programs, "{:?}", outcome.paths());
}

/// vfork, descriptors of one's own, subreapers, limits.
#[test]
fn trees_of_processes() {
    let outcome = equal("trees", 45);
    assert!(stock_mode() || outcome.paths().0 > outcome.programs, "{:?}", outcome.paths());
}

/// The first programs of a generator, without a difference. The run has a number of programs, and no time: so it
/// takes the same paths on every machine.
fn equal(what: &str, programs: u64) -> Outcome {
    finish(&Plan {
        executor: executor(),
        seed: 1,
        count: programs,
        time: None,
        lanes: 3,
        switches: Switches::parse(what).expect("a switch"),
        mixed: 0,
        enough: 3,
    })
}

fn finish(plan: &Plan) -> Outcome {
    let outcome = campaign::run(plan, &|_, _| {}).expect("a run");
    eprint!("{}", outcome.summary());
    for (seed, d) in outcome.different.iter().chain(&outcome.late) {
        eprintln!("=== seed {seed}\n{d}");
    }
    assert!(outcome.broken.is_empty(), "{}", outcome.broken.join("\n"));
    assert!(outcome.different.is_empty() && outcome.late.is_empty(), "see above; replay with the seed");
    outcome
}

/// Programs of the default generator. FASTSOCKET_DIFFERENTIAL_SEED chooses others,
/// FASTSOCKET_DIFFERENTIAL_SECONDS runs them for a time.
#[test]
fn random_programs() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse().expect("a number"));
    let time = number("FASTSOCKET_DIFFERENTIAL_SECONDS").map(Duration::from_secs);
    let outcome = finish(&Plan {
        executor: executor(),
        seed: number("FASTSOCKET_DIFFERENTIAL_SEED").unwrap_or(1),
        count: if time.is_some() { u64::MAX >> 1 } else { 300 },
        time,
        lanes: 3,
        switches: Switches::default(),
        mixed: 25,
        enough: 3,
    });
    assert!(outcome.programs >= 100, "only {} programs", outcome.programs);
    assert!(outcome.varies.len() as u64 * 50 <= outcome.programs, "the kernel varies too often to be an oracle");
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    let (shm, kernel) = outcome.paths();
    assert!(shm > outcome.programs, "{shm} connections over shared memory, {} programs", outcome.programs);
    // (Nearly a tenth of the connections go to listeners that are gone.)
    assert!(kernel * 5 < shm, "{kernel} connections over kernel TCP with the library, {shm} over shared memory");
    assert_eq!(outcome.counters.get("hostile_peer"), Some(&0), "a peer was called hostile");
}
