//! Commands that are programs of their own, as git has them: whoever does not measure need not have what measures.

use fsocket_client::{locate, EXIT_OWN};
use std::os::unix::process::CommandExt;

/// Becomes that program, with the words behind the command. Returns only if that cannot be.
pub fn to(name: &str) -> i32 {
    let why = match locate::program(name) {
        Ok(path) => std::process::Command::new(path).args(std::env::args_os().skip(2)).exec().to_string(),
        Err(why) => format!("{why}: it is a program of its own (of a checkout, `make benchmark`)"),
    };
    eprintln!("fastsocket: {why}");
    EXIT_OWN
}
