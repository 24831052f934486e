//! Subcommands that are separate programs, as with git. A machine without the benchmark then needs
//! none of its files.

use fsocket_client::{locate, EXIT_OWN};
use std::os::unix::process::CommandExt;

/// Executes the program `name` with the arguments that follow the subcommand. Returns only on
/// failure.
pub fn to(name: &str) -> i32 {
    let why = match locate::program(name) {
        Ok(path) => std::process::Command::new(path).args(std::env::args_os().skip(2)).exec().to_string(),
        Err(why) => format!("{why}: it is a separate program (in a checkout: `make benchmark`)"),
    };
    eprintln!("fastsocket: {why}");
    EXIT_OWN
}
