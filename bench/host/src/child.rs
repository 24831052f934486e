//! Child processes. Every wait for one has a deadline, and no child outlives the benchmark.

use anyhow::{bail, Context, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::{kill_process_group, pidfd_open, Pid, PidfdFlags, Signal};
use rustix::thread::{sched_setaffinity, CpuSet};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Binds the calling thread, and what it starts, to one CPU.
pub fn pin_self(cpu: usize) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// A child process with its standard output in a pipe.
pub struct Child {
    inner: std::process::Child,
    name: String,
    /// Output that was read from the pipe but not returned yet.
    pending: Vec<u8>,
}

impl Child {
    /// Starts the command in a process group of its own, on one CPU.
    pub fn spawn(mut command: Command, cpu: Option<usize>) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdout(Stdio::piped()).process_group(0);
        // SAFETY: between fork and exec the closure makes two system calls and allocates no memory.
        unsafe {
            command.pre_exec(move || {
                // If the benchmark is killed, its children get SIGTERM.
                rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
                cpu.map_or(Ok(()), pin_self)
            });
        }
        let inner = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Child { inner, name, pending: Vec::new() })
    }

    pub fn pid(&self) -> u32 {
        self.inner.id()
    }

    pub fn has_ended(&mut self) -> bool {
        !matches!(self.inner.try_wait(), Ok(None))
    }

    /// Gives the child one line of input.
    pub fn poke(&mut self) -> Result<()> {
        use std::io::Write;
        let input = self.inner.stdin.as_mut().context("no standard input")?;
        Ok(input.write_all(b"\n")?)
    }

    /// Sends SIGINT, as Ctrl-C does. The child may still print.
    pub fn interrupt(&self) -> Result<()> {
        Ok(kill_process_group(self.as_pid()?, Signal::INT)?)
    }

    /// The next line of output.
    pub fn line(&mut self, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(end) = self.pending.iter().position(|b| *b == b'\n') {
                let rest = self.pending.split_off(end + 1);
                let line = std::mem::replace(&mut self.pending, rest);
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            if !self.read(deadline)? {
                bail!("{} ended without an answer", self.name);
            }
        }
    }

    /// Reads all output until the child ends. An error if its exit status is not 0.
    pub fn finish(mut self, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        while self.read(deadline)? {}
        self.wait(deadline)?;
        let status = self.inner.wait()?;
        if !status.success() {
            bail!("{}: {status}", self.name);
        }
        Ok(String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned())
    }

    /// Reads one more piece of output. False at its end.
    fn read(&mut self, deadline: Instant) -> Result<bool> {
        let out = self.inner.stdout.as_mut().context("no standard output")?;
        if !ready(&mut *out, deadline)? {
            bail!("{} took too long", self.name);
        }
        let mut buffer = [0; 4096];
        let n = out.read(&mut buffer)?;
        self.pending.extend_from_slice(&buffer[..n]);
        Ok(n > 0)
    }

    fn wait(&mut self, deadline: Instant) -> Result<()> {
        let pidfd = pidfd_open(self.as_pid()?, PidfdFlags::empty())?;
        if !ready(&pidfd, deadline)? {
            bail!("{} took too long to end", self.name);
        }
        Ok(())
    }

    fn as_pid(&self) -> Result<Pid> {
        Pid::from_raw(self.inner.id() as i32).context("no process")
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let Ok(pid) = self.as_pid() else { return };
        if self.has_ended() {
            return;
        }
        // The child has not been reaped, so no other process group can have its number yet.
        let _ = kill_process_group(pid, Signal::TERM);
        if self.wait(Instant::now() + Duration::from_secs(2)).is_err() {
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let _ = self.inner.wait();
    }
}

/// Waits for `fd` to become readable.
fn ready(fd: impl std::os::fd::AsFd, deadline: Instant) -> Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    Ok(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit))? > 0)
}
