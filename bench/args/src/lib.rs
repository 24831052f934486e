//! What `fastsocket bench` can be told. The command line has it for its help, its manual pages and its completions;
//! `fastsocket-bench`, to which it hands over, does it.

#![deny(unsafe_code)]

use clap::{Args, Subcommand, ValueEnum};
use fsocket_client::locate::Pieces;
use serde::Serialize;
use std::path::PathBuf;

/// The program's name.
pub const PROGRAM: &str = "fastsocket-bench";

/// Measure stock sockets and ours in turn, and say what must show.
///
/// Exit status: 1 if a measurement failed or was not accelerated, or (with
/// --strict) missed what it must show; else 0.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Bench {
    #[command(subcommand)]
    pub other: Option<Other>,
    /// Shorter measurements, three repetitions
    #[arg(long)]
    pub quick: bool,
    /// Only these, by name or by the beginning of it up to a dash
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only these ways
    #[arg(long, value_delimiter = ',')]
    pub paths: Vec<Path>,
    /// Repetitions; the median counts [default: 5, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub reps: Option<u32>,
    /// Client and server on two CPUs, on the same one, or one after the other
    #[arg(long, value_enum, default_value_t = Layouts::Both)]
    pub layout: Layouts,
    /// Write machine, command, every value
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a picture: one HTML file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Loops that keep each of the CPUs busy meanwhile, as other programs would; the bars are
    /// for CPUs that are free
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "strict")]
    pub hogs: u32,
    /// Fail also if a bar is missed
    #[arg(long)]
    pub strict: bool,
    /// Say what there is to measure
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub pieces: Pieces,
}

#[derive(Debug, Subcommand)]
pub enum Other {
    Shapes(Shapes),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Layouts {
    TwoCpus,
    SameCpu,
    Both,
}

/// What carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    /// Loopback TCP, without the library
    Stock,
    /// Unix stream sockets
    Unix,
    /// TCP sockets with the library
    Ours,
    /// A bare queue in shared memory
    Queue,
}

impl Path {
    pub const ALL: [Path; 4] = [Path::Stock, Path::Unix, Path::Ours, Path::Queue];

    pub fn name(self) -> &'static str {
        match self {
            Path::Stock => "stock",
            Path::Unix => "unix",
            Path::Ours => "ours",
            Path::Queue => "queue",
        }
    }
}

/// Servers and clients of many kinds, with work in each request: requests a second and CPU time a
/// request, stock and ours in turn.
#[derive(Debug, Args)]
pub struct Shapes {
    /// A few shapes, shortly: under a minute
    #[arg(long)]
    pub quick: bool,
    /// Only shapes whose name contains one of these
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Repetitions; the median counts [default: 5, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub reps: Option<u32>,
    /// Length of a measurement [default: 1, with --quick 0.3]
    #[arg(long, value_name = "SECONDS")]
    pub secs: Option<f64>,
    /// Measure also what lies in this directory (library and monitor), as "before"
    #[arg(long, value_name = "DIR")]
    pub before: Option<PathBuf>,
    /// Write machine, command, every value
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a picture: one HTML file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Fail also if a shape is slower than stock, takes more CPU time, or has a longer tail
    #[arg(long)]
    pub strict: bool,
    /// Say what there is to measure
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub pieces: Pieces,
}
