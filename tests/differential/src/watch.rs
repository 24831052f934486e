//! What the kernel says a thread is doing.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// State of a thread, read again and again.
pub struct Watch {
    stat: Option<File>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Runs, is about to, or waits for a disk.
    Running,
    /// Sleeps until something happens.
    Sleeping,
    Dead,
}

impl Watch {
    pub fn new(tid: i32) -> Watch {
        Watch { stat: File::open(format!("/proc/{tid}/stat")).ok() }
    }

    fn read<'a>(&self, buffer: &'a mut [u8; 512]) -> Option<&'a str> {
        let n = self.stat.as_ref()?.read_at(buffer, 0).ok()?;
        let text = std::str::from_utf8(&buffer[..n]).ok()?;
        // The name, in parentheses, may contain anything.
        text.rsplit_once(") ").map(|(_, rest)| rest)
    }

    pub fn doing(&self) -> Doing {
        let mut buffer = [0; 512];
        match self.read(&mut buffer).and_then(|text| text.bytes().next()) {
            None | Some(b'Z' | b'X' | b'x') => Doing::Dead,
            Some(b'S') => Doing::Sleeping,
            Some(_) => Doing::Running,
        }
    }

    /// Why a process that nobody has collected yet ended: its wait status.
    pub fn status(&self) -> Option<i32> {
        let mut buffer = [0; 512];
        self.read(&mut buffer)?.split_whitespace().last()?.parse().ok()
    }
}
