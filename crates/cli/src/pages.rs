//! Manual pages and shell completions, generated from the definition of the command line (`make
//! pages`).

use crate::cmdline::Pages;
use anyhow::{Context, Result};
use clap_complete::Shell;

/// Writes `fastsocket.1`, one page for each subcommand, and one completion file for each shell.
pub fn run(args: &Pages, mut command: clap::Command) -> Result<i32> {
    let directory = &args.directory;
    std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    clap_mangen::generate_to(command.clone(), directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "fastsocket", directory)?;
    }
    Ok(0)
}
