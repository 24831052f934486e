//! The kernel's view of a thread's activity.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Reads the state of a thread again and again.
pub struct Watch {
    stat: Option<File>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// The thread runs, is about to run, or waits for a disk.
    Running,
    /// The thread sleeps until something happens.
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

    /// The wait status of a process that has ended and is not collected yet.
    pub fn status(&self) -> Option<i32> {
        let mut buffer = [0; 512];
        self.read(&mut buffer)?.split_whitespace().last()?.parse().ok()
    }
}
