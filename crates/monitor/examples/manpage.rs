//! Writes the manual page fastsocketd(8) to standard output: `make pages`.

#[path = "../src/options.rs"]
mod options;

use clap::CommandFactory;

fn main() -> std::io::Result<()> {
    clap_mangen::Man::new(options::Options::command()).section("8").render(&mut std::io::stdout())
}
