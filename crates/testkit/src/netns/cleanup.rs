//! A clean-up stack that survives its owner.
//!
//! The commands that undo something are handed to a small shell *before* the
//! thing is made. It runs them, last first, when its standard input ends: when
//! the owner drops the stack, panics, is interrupted, or is killed with -9.
//! There is one way to clean up, so that it is the one that is always tested.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// How long everything together may take to be undone.
const LIMIT: Duration = Duration::from_secs(60);

/// Reads one command a line and puts each before the earlier ones.
const GUARD: &str = r#"
trap '' HUP INT QUIT TERM
stack=
while IFS= read -r line; do
    stack="$line
$stack"
done
eval "$stack"
"#;

/// Commands to run at the end, whatever the end is.
pub struct Cleanup {
    guard: Child,
    input: Option<ChildStdin>,
}

impl Cleanup {
    /// Starts the guard.
    pub fn new() -> Result<Cleanup, String> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "fastsocket-cleanup"]).current_dir("/");
        // What is already gone is no news.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).env_remove("LD_PRELOAD");
        // Not in the group that a terminal interrupts.
        command.process_group(0);
        let mut guard = command.spawn().map_err(|e| format!("/bin/sh: {e}"))?;
        let input = guard.stdin.take();
        Ok(Cleanup { guard, input })
    }

    /// A shell command, on one line, to be run at the end and before all that
    /// were pushed earlier. Push it before making what it undoes: it must bear
    /// that there is nothing to undo.
    pub fn push(&mut self, undo: &str) -> Result<(), String> {
        assert!(!undo.contains('\n'), "one line: {undo:?}");
        let input = self.input.as_mut().expect("open until dropped");
        writeln!(input, "{undo}").map_err(|e| format!("clean-up guard: {e}"))
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        drop(self.input.take());
        let end = Instant::now() + LIMIT;
        loop {
            match self.guard.try_wait() {
                Ok(Some(_)) => return,
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
                // It goes on by itself; whoever looks for leftovers will find them.
                _ => return eprintln!("clean-up not done within {LIMIT:?}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_last_first_and_bears_failures() {
        let dir = tempfile::tempdir().expect("directory");
        let log = dir.path().join("log");
        let mut cleanup = Cleanup::new().expect("guard");
        for step in ["one", "two"] {
            cleanup.push(&format!("echo {step} >> {}", log.display())).expect("push");
            cleanup.push("false").expect("push");
        }
        assert!(!log.exists(), "nothing is undone before the end");
        drop(cleanup);
        assert_eq!(std::fs::read_to_string(&log).expect("log"), "two\none\n");
    }
}
