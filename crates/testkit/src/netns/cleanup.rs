//! A clean-up stack that survives its owner.
//!
//! A small shell gets each command *before* the test makes what the command undoes. When its
//! standard input ends, the shell runs the commands, the last one first. That happens when the
//! owner drops the stack, panics, is interrupted, or is killed with SIGKILL. There is only this
//! one way to clean up, so it is tested all the time.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for all commands together.
const LIMIT: Duration = Duration::from_secs(60);

/// Reads one command per line, and puts each in front of the earlier ones.
const GUARD: &str = r#"
trap '' HUP INT QUIT TERM
stack=
while IFS= read -r line; do
    stack="$line
$stack"
done
eval "$stack"
"#;

/// Commands that run at the end, however the test ends.
pub struct Cleanup {
    guard: Child,
    input: Option<ChildStdin>,
}

impl Cleanup {
    /// Starts the guard.
    pub fn new() -> Result<Cleanup, String> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "fastsocket-cleanup"]).current_dir("/");
        // No output, because commands may complain of things that are already gone.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).env_remove("LD_PRELOAD");
        // A process group of its own, so that an interrupt from the terminal does not reach the
        // guard.
        command.process_group(0);
        let mut guard = command.spawn().map_err(|e| format!("/bin/sh: {e}"))?;
        let input = guard.stdin.take();
        Ok(Cleanup { guard, input })
    }

    /// Adds a shell command (one line) that runs at the end, before all earlier ones. Push it
    /// before you make what it undoes; so it must also work if there is nothing to undo.
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
                // The guard goes on by itself. A search for leftovers will find what it could not
                // undo.
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
