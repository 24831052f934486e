//! Options of `fastsocket top`.

use clap::{Args, ValueEnum};

/// Open connections by path, and rates of connections and bytes by process and listener, as they change
///
/// On a terminal: q quits, s sorts by the next column, r turns the order around, / filters by program,
/// pid or address (Esc: no filter any more), p pauses. In a pipe, or with --plain, one block of text each time.
#[derive(Debug, Clone, Args)]
pub struct Top {
    /// Time between two looks
    #[arg(short, long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_delay)]
    pub delay: f64,
    /// Sort processes by this
    #[arg(short, long, value_enum, default_value_t = Sort::Connections)]
    pub sort: Sort,
    /// The smallest first
    #[arg(short, long)]
    pub reverse: bool,
    /// Only processes and listeners whose name, pid or address has this in it
    #[arg(short, long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub filter: String,
    /// Text, also on a terminal
    #[arg(short, long)]
    pub plain: bool,
    /// End after so many looks
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// By what processes are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// All connections a second
    Connections,
    /// Those over the kernel
    Kernel,
    /// Bytes sent and received
    Bytes,
    Fallbacks,
    Name,
    Pid,
}

impl Sort {
    const ALL: [Sort; 6] = [Sort::Connections, Sort::Kernel, Sort::Bytes, Sort::Fallbacks, Sort::Name, Sort::Pid];

    pub fn next(self) -> Sort {
        let at = Sort::ALL.iter().position(|s| *s == self).unwrap_or(0);
        Sort::ALL[(at + 1) % Sort::ALL.len()]
    }

    pub fn word(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
    }
}

fn parse_delay(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0.1 to 3600".into()),
    }
}
