//! Options of `fastsocket bench`. The `fastsocket` program uses them for its help, its manual pages and its
//! completions. It hands the command over to `fastsocket-bench`, which measures.

#![deny(unsafe_code)]

use clap::{Args, Subcommand, ValueEnum};
use fsocket_client::locate::Pieces;
use serde::Serialize;
use std::path::PathBuf;

/// Name of the program that measures.
pub const PROGRAM: &str = "fastsocket-bench";

/// Measure stock sockets and ours in turn, and say what must show.
///
/// Exit status: 1 if a measurement failed or took another path, else 0. With --strict it is also 1
/// if a measurement missed its goal, or if the kernel's path is below stock by more than the
/// control.
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
    /// Only these ways [default: all but kernel]
    #[arg(long, value_delimiter = ',')]
    pub paths: Vec<Way>,
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
    /// Fail also if a bar is missed, or the kernel's path is below stock
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
    Paper(Paper),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Layouts {
    TwoCpus,
    SameCpu,
    Both,
}

/// Names for `--paths`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// Loopback TCP, without the library
    Stock,
    /// Unix stream sockets
    Unix,
    /// TCP sockets with the library
    Ours,
    /// A bare queue in shared memory
    Queue,
    /// Kernel TCP where one end has the library: the server, then the client; and stock a second time
    Kernel,
}

impl Way {
    /// Does `--paths` with this name select `path`?
    pub fn has(self, path: Path) -> bool {
        match self {
            Way::Stock => path == Path::Stock,
            Way::Unix => path == Path::Unix,
            Way::Ours => path == Path::Ours,
            Way::Queue => path == Path::Queue,
            Way::Kernel => Path::BESIDE.contains(&path),
        }
    }
}

/// A transport between the two ends of a measurement, and which of the ends have the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    Stock,
    Unix,
    Ours,
    Queue,
    /// Kernel TCP; the server has the library, its clients do not.
    KernelServer,
    /// Kernel TCP; the client has the library, its server does not.
    KernelClient,
    /// Stock TCP a second time. It shows how far apart two runs of the same are.
    Control,
}

impl Path {
    pub const ALL: [Path; 7] =
        [Path::Stock, Path::Unix, Path::Ours, Path::Queue, Path::KernelServer, Path::KernelClient, Path::Control];
    /// Paths that have a column in the main table.
    pub const MAIN: [Path; 4] = [Path::Stock, Path::Unix, Path::Ours, Path::Queue];
    /// Paths over kernel TCP, which are compared with stock in a table of their own.
    pub const BESIDE: [Path; 3] = [Path::KernelServer, Path::KernelClient, Path::Control];

    pub fn name(self) -> &'static str {
        match self {
            Path::Stock => "stock",
            Path::Unix => "unix",
            Path::Ours => "ours",
            Path::Queue => "queue",
            Path::KernelServer => "kernel-server",
            Path::KernelClient => "kernel-client",
            Path::Control => "control",
        }
    }

    /// Does one end have the library, while the connections must stay in the kernel?
    pub fn is_kernel(self) -> bool {
        matches!(self, Path::KernelServer | Path::KernelClient)
    }

    /// Does an end with this role have the library?
    pub fn has_library(self, role: Role) -> bool {
        match self {
            Path::Ours => true,
            Path::KernelServer => role == Role::Server,
            Path::KernelClient => role == Role::Client,
            Path::Stock | Path::Unix | Path::Queue | Path::Control => false,
        }
    }
}

/// The part that a process plays in a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Server,
    Client,
    /// The server behind the measured server.
    Backend,
}

/// Names for `--paths` of `bench shapes`. Stock is always measured: all others are compared with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ShapePath {
    /// Loopback TCP, without the library
    Stock,
    /// TCP sockets with the library
    Ours,
    /// Kernel TCP where one end has the library: the server, with zones and without, then the clients; and stock a
    /// second time
    Kernel,
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
    /// Only these ways, and stock [default: stock,ours]
    #[arg(long, value_delimiter = ',')]
    pub paths: Vec<ShapePath>,
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

/// The figures and tables of the three papers: the paper's value, stock and ours in turn on this machine.
///
/// Each figure and table of SocksDirect, Fastsocket and Affinity-Accept is measured here, or listed with the reason
/// why this machine cannot measure it. Writes paper.html and paper.json, and prints a table. About 20 minutes, with
/// --quick 9. Exit status: 1 if a measurement failed or took another path, else 0.
#[derive(Debug, Args)]
pub struct Paper {
    /// Shorter measurements, three rounds
    #[arg(long)]
    pub quick: bool,
    /// Only these sections, by name or by the beginning of it up to a dash
    #[arg(long, value_name = "SECTION", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Rounds; the median counts [default: 5, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub reps: Option<u32>,
    /// A C project that make builds in half a minute or more: the parallel build of Affinity-Accept's section 6.5.
    /// It must have been configured; a copy is built
    #[arg(long, value_name = "DIR")]
    pub build: Option<PathBuf>,
    /// Directory for paper.html and paper.json
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Say which sections there are
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub pieces: Pieces,
}
