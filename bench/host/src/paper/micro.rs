//! Rows of single operations between two processes.

use super::experiment::{bytes_text, Claim, Experiment, Measure, WAYS_AND_QUEUE};
use super::{bare, several};
use crate::runner;
use crate::scenario::{Layout, Unit};
use crate::step::{Step, Values};
use crate::worker::Op;
use anyhow::Result;
use fsocket_bench_args::{Paper as Args, Path};

const SIZES: [usize; 10] = [8, 32, 128, 512, 2 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
const AXIS: &str = "bytes of a message";

/// SocksDirect, figure 7.
pub fn sizes(_: &Args) -> Vec<Experiment> {
    let text = |times| Claim::Times { low: times, high: times, source: "section 5.2.1" };
    let round_trip = |size: usize| {
        let claim = match size {
            8 => Some(Claim::Values { linux: 35.0 * 300.0, system: 300.0, source: "section 5.2.1" }),
            8192 => Some(text(4.0)),
            1048576 => Some(text(13.0)),
            _ => None,
        };
        let mut measures = vec![Measure::lower("mean", "round trip, mean", Unit::Nanoseconds).claims(claim)];
        if size == 8 {
            measures.push(Measure::lower("p1", "round trip, p1", Unit::Nanoseconds));
            measures.push(Measure::lower("p99", "round trip, p99", Unit::Nanoseconds));
        }
        Experiment::micro(bytes_text(size) + ",", Op::Rtt, size)
            .ways(WAYS_AND_QUEUE)
            .at(AXIS, size as f64)
            .measures(measures)
    };
    let one_way = |size: usize| {
        let claim = match size {
            8 => Some(text(20.0)),
            8192 => Some(text(1.6)),
            1048576 => Some(text(26.0)),
            _ => None,
        };
        let measure = match size {
            8 => Measure::higher("rate", "one way, messages/s", Unit::PerSecond),
            _ => Measure::higher("bytes", "one way, bytes/s", Unit::BytesPerSecond),
        };
        let e = Experiment::micro(bytes_text(size) + ",", Op::Rate, size).ways(WAYS_AND_QUEUE);
        e.at(AXIS, size as f64).measures([measure.claims(claim)])
    };
    SIZES.into_iter().map(round_trip).chain(SIZES.into_iter().map(one_way)).collect()
}

/// SocksDirect, table 2.
pub fn operations(_: &Args) -> Vec<Experiment> {
    const WAYS: &[Path] = &[Path::Stock, Path::Ours, Path::Control, Path::Queue, Path::Unix];
    let source = "table 2";
    let latency = Claim::Values { linux: 11_000.0, system: 300.0, source };
    let rate = Claim::Values { linux: 0.9e6, system: 22e6, source };
    let open = Claim::Value { system: 1_600.0, source: "table 2, Linux" };
    let mut all = vec![
        Experiment::micro("8 bytes,", Op::Rtt, 8).ways(WAYS).measures([Measure::lower(
            "mean",
            "round trip",
            Unit::Nanoseconds,
        )
        .claims(latency)]),
        Experiment::micro("8 bytes,", Op::Rate, 8).ways(WAYS).measures([Measure::higher(
            "rate",
            "one way",
            Unit::PerSecond,
        )
        .claims(rate)]),
        Experiment::micro("socket and close", Op::Open, 8)
            .measures([Measure::lower("mean", "", Unit::Nanoseconds).claims(open)]),
    ];
    all.extend(bare::operations());
    all
}

/// SocksDirect, table 4.
pub fn breakdown(_: &Args) -> Vec<Experiment> {
    let row = |key, label, linux, system| {
        Measure::lower(key, label, Unit::Nanoseconds).claims(Claim::Values { linux, system, source: "table 4" })
    };
    vec![
        Experiment::micro("operation", Op::Fcntl, 8).measures([row("mean", "(fcntl)", 413.0, 53.0)]),
        Experiment::new("one way:", packet_and_kib)
            .measures([row("packet", "packet", 5_800.0, 150.0), row("kib", "KiB", 160.0, 13.0)]),
        Experiment::micro("connection", Op::Conn, 64).measures([row("mean", "(connect)", 14_700.0, 700.0)]),
    ]
}

/// Nanoseconds of half a round trip of 8 bytes, and the nanoseconds that each KiB of 256 KiB adds.
fn packet_and_kib(step: &Step) -> Result<Values> {
    let half = |size| -> Result<f64> {
        let values = runner::micro(step, Op::Rtt, size)?;
        Ok(values["p50"] / 2.0)
    };
    let (small, large) = (half(8)?, half(256 << 10)?);
    Ok(Values::from([("packet", small), ("kib", (large - small) / 256.0)]))
}

/// SocksDirect, section 4.1.1.
pub fn take_over(_: &Args) -> Vec<Experiment> {
    let rate = |system| {
        let claim = Claim::Value { system, source: "section 4.1.1" };
        [Measure::higher("rate", "", Unit::PerSecond).claims(claim)]
    };
    vec![
        Experiment::micro("two senders in turns", Op::TurnsRate, 8).measures(rate(1.6e6)),
        Experiment::new("two senders at once", several::two_senders).measures(rate(1.6e6)),
        Experiment::micro("one sender", Op::Rate, 8).measures(rate(27e6)),
    ]
}

/// SocksDirect, section 6.
pub fn connections(_: &Args) -> Vec<Experiment> {
    let claim = Claim::Times { low: 20.0, high: 20.0, source: "1.4 M/s, section 6" };
    let row = |name: &str, layout| {
        Experiment::micro(name, Op::Conn, 64)
            .on(layout)
            .measures([Measure::higher("rate", "", Unit::PerSecond).claims(claim)])
    };
    vec![row("connections, two CPUs", Layout::TwoCpus), row("connections, one CPU", Layout::SameCpu)]
}
