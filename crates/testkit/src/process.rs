//! Child processes that end with their test at the latest, and that a test never waits for without
//! a limit.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A running child that leads a process group of its own. Dropping this value kills the group.
pub struct Proc {
    pub name: String,
    child: Child,
    out: PathBuf,
    err: PathBuf,
    status: Option<ExitStatus>,
}

/// The result of a child.
#[derive(Debug)]
pub struct Finished {
    pub name: String,
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// Panics unless the program exited with zero; the message has all of its output.
    #[track_caller]
    pub fn success(self) -> Self {
        assert!(
            self.code == Some(0),
            "{} failed (code {:?}, signal {:?})\n--- stdout\n{}\n--- stderr\n{}",
            self.name,
            self.code,
            self.signal,
            tail(&self.stdout),
            tail(&self.stderr)
        );
        self
    }

    /// Panics unless stdout contains `text`.
    #[track_caller]
    pub fn says(self, text: &str) -> Self {
        assert!(
            self.stdout.contains(text),
            "{} did not say {text:?}\n--- stdout\n{}\n--- stderr\n{}",
            self.name,
            tail(&self.stdout),
            tail(&self.stderr)
        );
        self
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

impl Proc {
    /// Starts `command`. Its output goes to files under `dir`, because a full pipe would stop it.
    #[track_caller]
    pub fn spawn(dir: &Path, name: &str, mut command: Command) -> Proc {
        static SERIAL: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let out = dir.join(format!("{serial:03}-{name}.out"));
        let err = dir.join(format!("{serial:03}-{name}.err"));
        command.process_group(0);
        command.stdin(Stdio::null());
        command.stdout(File::create(&out).expect("output file"));
        command.stderr(File::create(&err).expect("output file"));
        // SAFETY: between fork and exec, the closure makes async-signal-safe calls only, and they
        // take no pointers.
        unsafe {
            command.pre_exec(|| {
                // If the test itself is killed, its children must die, too.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // If a shell starts the tests in the background, these signals are ignored.
                for signal in [libc::SIGINT, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap_or_else(|e| panic!("cannot start {name}: {e}"));
        Proc { name: name.to_owned(), child, out, err, status: None }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn stdout(&self) -> String {
        read_lossy(&self.out)
    }

    pub fn stderr(&self) -> String {
        read_lossy(&self.err)
    }

    /// Sends a signal to the process itself.
    pub fn signal(&self, signal: i32) {
        if self.status.is_none() {
            // SAFETY: `kill` takes no pointers. The pid is that of our child, which is not reaped
            // yet.
            unsafe { libc::kill(self.child.id() as i32, signal) };
        }
    }

    /// Sends a signal to the whole group.
    pub fn signal_group(&self, signal: i32) {
        // SAFETY: `kill` takes no pointers. Our own child leads the group.
        unsafe { libc::kill(-(self.child.id() as i32), signal) };
    }

    pub fn running(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("wait");
        }
        self.status.is_none()
    }

    /// Waits at most `limit` for the end. After that the group is killed and the test fails.
    #[track_caller]
    pub fn finish(mut self, limit: Duration) -> Finished {
        let end = Instant::now() + limit;
        while self.running() {
            if Instant::now() > end {
                let stacks = stacks_of(self.pid());
                self.signal_group(libc::SIGKILL);
                panic!(
                    "{} did not end within {limit:?}\n--- stdout\n{}\n--- stderr\n{}\n--- kernel\n{stacks}",
                    self.name,
                    tail(&self.stdout()),
                    tail(&self.stderr())
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let status = self.status.expect("ended");
        Finished {
            name: self.name.clone(),
            code: status.code(),
            signal: status.signal(),
            stdout: self.stdout(),
            stderr: self.stderr(),
        }
    }

    /// Waits until the child's stdout contains `text`.
    #[track_caller]
    pub fn wait_stdout(&mut self, text: &str, limit: Duration) {
        let end = Instant::now() + limit;
        while !self.stdout().contains(text) {
            if !self.running() || Instant::now() > end {
                // The child may have printed the text just before it ended.
                if self.stdout().contains(text) {
                    return;
                }
                panic!(
                    "{}: no {text:?} within {limit:?}\n--- stdout\n{}\n--- stderr\n{}",
                    self.name,
                    tail(&self.stdout()),
                    tail(&self.stderr())
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Number of open descriptors.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, |dir| dir.count())
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.signal_group(libc::SIGKILL);
        let _ = self.child.wait();
        if std::thread::panicking() {
            let err = self.stderr();
            if !err.is_empty() {
                eprintln!("--- stderr of {} (pid {})\n{}", self.name, self.child.id(), tail(&err));
            }
        }
    }
}

/// The longest time for which a test may take a CPU away from the whole machine.
const CPU_AWAY: Duration = Duration::from_secs(20);

/// Restricts a process or thread (0: the calling one) to these CPUs. Waits while all of them are
/// offline, because tests of hotplug may run at the same time. Allocates nothing.
pub fn set_affinity(pid: i32, cpus: &[usize]) -> std::io::Result<()> {
    // SAFETY: cpu_set_t is an array of integers; all zeros are the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus.iter().filter(|cpu| **cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the loop has checked that the CPU is within the set.
        unsafe { libc::CPU_SET(*cpu, &mut set) };
    }
    let began = Instant::now();
    loop {
        // SAFETY: `set` is live during the call, and its size is passed.
        if unsafe { libc::sched_setaffinity(pid, std::mem::size_of_val(&set), &set) } == 0 {
            return Ok(());
        }
        let e = std::io::Error::last_os_error();
        if e.raw_os_error() != Some(libc::EINVAL) || began.elapsed() > CPU_AWAY {
            return Err(e);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Makes a process or thread run before all ordinary ones (SCHED_FIFO with the lowest priority).
pub fn set_realtime(pid: i32) -> std::io::Result<()> {
    // SAFETY: zero is valid. (musl's struct has more fields.)
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = 1;
    // SAFETY: `parameters` is live during the call.
    match unsafe { libc::sched_setscheduler(pid, libc::SCHED_FIFO, &parameters) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Lets a command run on these CPUs only.
pub fn pin(command: &mut Command, cpus: &[usize]) {
    let cpus = cpus.to_vec();
    // SAFETY: between fork and exec, the closure makes system calls and allocates no memory.
    unsafe { command.pre_exec(move || set_affinity(0, &cpus)) };
}

fn read_lossy(path: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let _ = file.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The kernel stacks of a hung process's threads, as far as the kernel shows them.
fn stacks_of(pid: u32) -> String {
    let mut text = String::new();
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return text };
    for task in tasks.flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        text += &format!("{} {} {}\n", read("comm").trim(), read("wchan"), read("syscall").trim());
    }
    text
}
