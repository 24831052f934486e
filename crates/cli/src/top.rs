//! `fastsocket top`: shows rates and open connections, and refreshes them.

mod open;
mod options;
mod plain;
mod screen;
mod source;
mod view;

pub use options::Top;

use anyhow::Result;
use source::Source;
use std::io::IsTerminal;

/// `fastsocket top`.
pub fn run(args: &Top) -> Result<i32> {
    // A monitor must run when the command starts. Later, `top` waits if the monitor ends.
    let source = Source::new()?;
    match args.plain || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        true => plain::run(args, source),
        false => screen::run(args, source),
    }
}
