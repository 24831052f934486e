//! How far a benchmark has come, on standard error: one line that changes on a terminal, a line a step
//! elsewhere.

use std::io::{IsTerminal, Write};

pub struct Progress {
    done: usize,
    all: usize,
    is_terminal: bool,
}

impl Progress {
    /// `all`: how many steps there are.
    pub fn new(all: usize) -> Progress {
        Progress { done: 0, all, is_terminal: std::io::stderr().is_terminal() }
    }

    /// The next step begins. (Nobody may read it.)
    pub fn step(&mut self, what: &str) {
        self.done += 1;
        let mut err = std::io::stderr().lock();
        let _ = match self.is_terminal {
            true => write!(err, "\r\x1b[2K[{}/{}] {what}", self.done, self.all),
            false => writeln!(err, "[{}/{}] {what}", self.done, self.all),
        };
    }

    /// Something else is to be printed.
    pub fn clear(&self) {
        if self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
