//! Fails the first call of each place, in a C program with threads and epoll. `make faults` runs
//! all faults.

use fsocket_faults::campaign::{Campaign, Side, Verdict};
use fsocket_faults::plan::Extent;
use fsocket_faults::{daemon, places};
use fsocket_testkit::{artifacts, stock_mode};
use std::time::{Duration, Instant};

/// Time for each part. On an idle machine each fault takes a tenth of a second.
const TIME: Duration = Duration::from_secs(12);

fn library(side: Side) {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    let campaign = Campaign::new("echo-c").expect("the pair works without a fault").expect("a C compiler");
    let faults = campaign.plan(side, Extent::Short).expect("calls of the library");
    assert!(faults.len() >= 20, "only {} places of the library were reached", faults.len());
    let (end, mut failed) = (Instant::now() + TIME, 0);
    let enough = faults.len().min(20) / 2 + 1;
    for fault in &faults {
        if Instant::now() > end && failed >= enough {
            break;
        }
        for run in campaign.run(side, std::slice::from_ref(fault), |_| ()).expect("a run") {
            let place = places::describe(&artifacts::library(), &fault.site);
            assert!(!matches!(run.verdict, Verdict::Wrong(_)), "{fault} {place}: {:?}", run.verdict);
            failed += usize::from(!matches!(run.verdict, Verdict::Missed));
        }
    }
    eprintln!("{failed} of {} faults of the {side:?}", faults.len());
    assert!(failed >= enough, "only {failed} calls were failed");
}

#[test]
fn each_call_of_the_library_in_a_client() {
    library(Side::Client);
}

#[test]
fn each_call_of_the_library_in_a_server() {
    library(Side::Server);
}

#[test]
fn a_signal_has_the_monitor_refuse_nothing() {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    let (seen, verdict) = daemon::interrupted().expect("a run");
    assert!(matches!(verdict, Verdict::Same), "{verdict:?}");
    assert!(seen.failed >= 15, "only {} places of the monitor were interrupted", seen.failed);
}

/// Each call takes longer than the watchdog waits.
#[test]
fn a_slow_machine_has_the_monitor_refuse_no_report() {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    let verdict = daemon::slow(Duration::from_millis(60)).expect("a run");
    assert!(matches!(verdict, Verdict::Same), "{verdict:?}");
}

#[test]
fn calls_of_the_monitor() {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    let faults = daemon::plan(Extent::Short).expect("calls of the monitor");
    assert!(faults.len() >= 15, "only {} places of the monitor were reached", faults.len());
    let end = Instant::now() + TIME;
    for fault in faults.iter().take_while(|_| Instant::now() < end) {
        let verdict = daemon::run(*fault).expect("a run");
        assert!(!matches!(verdict, Verdict::Wrong(_)), "{fault}: {verdict:?}");
    }
}
