//! `fastsocket`: runs programs with the library, and shows what it does.
//!
//! `main` is a C function, because std changes the process before its own `main`: it ignores
//! SIGPIPE and opens `/dev/null` on closed descriptors 0 to 2. `fastsocket run` must hand over to
//! its program exactly what it was given.
#![cfg_attr(not(test), no_main)]

mod capture;
mod cmdline;
mod doctor;
mod drops;
mod explain;
mod glibc;
mod handover;
mod locality;
mod locks;
mod measure;
mod metrics;
mod operate;
mod others;
mod pages;
mod place;
mod private;
mod program;
mod run;
mod ss;
mod stat;
mod steer;
mod text;
mod top;
mod tune;
mod units;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use cmdline::{Disable, Doctor, Enable, Explain, Pages, Run, Stat, Steer};
use fsocket_client::EXIT_OWN;

/// Shared memory instead of loopback TCP, for programs as they are.
#[derive(Debug, Parser)]
#[command(name = "fastsocket", version, max_term_width = 100, after_help = cmdline::ENVIRONMENT)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Run),
    /// Counters: totals, processes, why the kernel was used
    Stat(Stat),
    Ss(ss::Ss),
    Top(top::Top),
    Explain(Explain),
    Metrics(metrics::Metrics),
    Steer(Steer),
    Off(operate::Off),
    On(operate::On),
    Capture(capture::Capture),
    Enable(Enable),
    Disable(Disable),
    Doctor(Doctor),
    /// Prepare a network device and the kernel for short connections, and undo it
    Tune(tune::Tune),
    /// Compare kernel TCP, fastsocket, Unix sockets and a reference queue
    Bench(fsocket_bench_args::Bench),
    #[command(hide = true)]
    Pages(Pages),
}

#[cfg(not(test))]
#[no_mangle]
extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    // glibc also passes argv to the initialiser of std, so `std::env::args_os` works without std's
    // `main`.
    std::panic::catch_unwind(entry).unwrap_or(EXIT_OWN)
}

/// Runs the command line and returns its exit status.
#[cfg_attr(test, allow(dead_code))]
fn entry() -> i32 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return match e.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => 0,
                _ => EXIT_OWN,
            };
        }
    };
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Stat(args) => report_errors(stat::stat(&args)),
        Command::Ss(args) => report_errors(ss::run(&args)),
        Command::Top(args) => report_errors(top::run(&args)),
        Command::Metrics(args) => report_errors(metrics::run(&args)),
        Command::Explain(args) => explain::run(&args),
        Command::Off(args) => operate::off(&args),
        Command::On(args) => operate::on(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Steer(args) => report_errors(steer::steer(args)),
        Command::Enable(args) => report_errors(units::enable(&args)),
        Command::Disable(args) => report_errors(units::disable(&args)),
        Command::Pages(args) => report_errors(pages::run(&args, Cli::command())),
        Command::Doctor(args) => doctor::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Bench(_) => handover::to(fsocket_bench_args::PROGRAM),
    }
}

/// Prints the error of a command that failed, and returns its exit status.
fn report_errors(result: anyhow::Result<i32>) -> i32 {
    result.unwrap_or_else(|e| {
        eprintln!("fastsocket: {e:#}");
        1
    })
}
