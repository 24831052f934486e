//! `fastsocket-bench`, which `fastsocket bench` executes. It contains everything that only measuring needs. The
//! verbs `worker` and `end` do not belong to `fastsocket bench`: they are the measured programs.
//!
//! `main` is a C function, not that of std, as in `fastsocket`. The runtime of std ignores SIGPIPE, but the
//! measured processes must be like plain programs.
#![cfg_attr(not(test), no_main)]

mod accel;
mod apps;
mod bench;
mod child;
mod ends;
mod hogs;
mod html;
mod idle;
mod paper;
mod queue;
mod report;
mod runner;
mod scenario;
mod shapes;
mod step;
mod worker;

use clap::error::ErrorKind;
use clap::Parser;
use fsocket_bench_args::{Bench, Other};
use fsocket_client::EXIT_OWN;

#[derive(Debug, Parser)]
#[command(name = "fastsocket bench", version, max_term_width = 100)]
struct Program {
    #[command(flatten)]
    bench: Bench,
}

/// One end of a measurement.
#[derive(Debug, Parser)]
#[command(name = "fastsocket-bench")]
enum Measured {
    Worker(worker::Worker),
    End(ends::End),
}

#[cfg(not(test))]
#[no_mangle]
extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    // glibc passes argv to std's initialiser too, so `std::env::args_os` works.
    std::panic::catch_unwind(entry).unwrap_or(EXIT_OWN)
}

/// Returns the exit status of the program.
#[cfg_attr(test, allow(dead_code))]
fn entry() -> i32 {
    let verb = std::env::args_os().nth(1);
    if verb.is_some_and(|verb| verb == "worker" || verb == "end") {
        return parsed(|measured| match measured {
            Measured::Worker(args) => worker::run(&args),
            Measured::End(args) => ends::run(&args),
        });
    }
    parsed(|Program { bench }| {
        let done = match &bench.other {
            Some(Other::Shapes(args)) => shapes::run(args),
            Some(Other::Paper(args)) => paper::run(args),
            None => bench::run(&bench),
        };
        done.unwrap_or_else(|e| {
            eprintln!("fastsocket bench: {e:#}");
            1
        })
    })
}

/// Parses the command line, and returns the status that `then` returns.
#[cfg_attr(test, allow(dead_code))]
fn parsed<P: Parser>(then: impl FnOnce(P) -> i32) -> i32 {
    match P::try_parse() {
        Ok(args) => then(args),
        Err(e) => {
            let _ = e.print();
            match e.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => 0,
                _ => EXIT_OWN,
            }
        }
    }
}
