//! Helper programs in C that a test compiles, and pairs of them.

use fsocket_testkit::host::{Accel, Side};
use fsocket_testkit::{artifacts, find_program, helper, net, stock_mode, workspace, Host, Proc};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Compiles `sources` (see [`helper`]) with these further arguments into a file of the host's
/// directory. They may include `talk.h` of `tests/apps`.
#[track_caller]
pub fn build(host: &Host, name: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
    let cc = find_program("cc").expect("a C compiler: building needs it, too");
    build_with(&cc, host, name, sources, flags)
}

/// The same as [`build`], with another compiler.
#[track_caller]
pub fn build_with(cc: &Path, host: &Host, name: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
    let out = host.path().join(name);
    let mut command = Command::new(cc);
    command.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&out);
    command.arg("-I").arg(workspace().join("tests/apps")).args(sources.iter().map(|s| helper(s))).args(flags);
    Proc::spawn(host.logs(), "cc", command).finish(Duration::from_secs(60)).success();
    out
}

/// The loader of this machine's glibc.
#[track_caller]
pub fn loader() -> PathBuf {
    let places = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"].map(PathBuf::from);
    places.into_iter().find(|p| p.exists()).expect("glibc's loader")
}

/// A value of `LD_PRELOAD` that has other libraries before and after ours. In stock mode ours is
/// left out.
pub fn preload(before: &[&Path], after: &[&Path]) -> String {
    let ours = (!stock_mode()).then(artifacts::library);
    let all = before.iter().copied().chain(ours.as_deref()).chain(after.iter().copied());
    all.map(|p| p.display().to_string()).collect::<Vec<_>>().join(":")
}

/// How to run the echo program, as server and as client.
#[derive(Default)]
pub struct Echo<'a> {
    /// Command that runs the program, such as `valgrind -q`. Empty: none.
    pub before: &'a [&'a str],
    pub env: &'a [(&'a str, &'a str)],
    /// The whole value of `LD_PRELOAD`; `None`: only the library.
    pub preload: Option<String>,
}

impl Echo<'_> {
    fn command(&self, host: &Host, side: Side, program: &Path, args: &[&str]) -> Command {
        let mut words: Vec<String> = self.before.iter().map(|w| (*w).to_owned()).collect();
        words.push(program.display().to_string());
        let mut command = host.command(side, &words[0]);
        command.args(&words[1..]).args(args).envs(self.env.iter().copied());
        if let Some(list) = &self.preload {
            command.env("LD_PRELOAD", list);
        }
        command
    }

    /// Starts a server that ends after `connections` connections.
    #[track_caller]
    pub fn serve(&self, host: &Host, side: Side, program: &Path, connections: usize) -> (Proc, String) {
        let port = net::free_port();
        let text = port.to_string();
        let command = self.command(host, side, program, &["serve", &text, &connections.to_string()]);
        let mut server = Proc::spawn(host.logs(), "serve", command);
        let known = || stock_mode() || side != Accel || host.snapshot().report.is_some_and(|r| !r.listeners.is_empty());
        let up = net::wait_until(Duration::from_secs(60), || {
            !server.running() || (net::kernel_sockets(port, "0A") > 0 && known())
        });
        assert!(up.is_ok() && server.running(), "it does not listen:\n{}", server.stderr());
        (server, text)
    }

    /// Runs server and client with `connections` at once, then both in one process. All
    /// connections must use shared memory, and no program may print an error.
    #[track_caller]
    pub fn check(&self, program: &Path, host: &Host, connections: usize, messages: usize) {
        let before = host.snapshot();
        let (server, port) = self.serve(host, Accel, program, connections);
        let (many, each) = (connections.to_string(), messages.to_string());
        let finish = |p: Proc| {
            let done = p.finish(Duration::from_secs(90)).success().says("ok");
            let quiet = !done.stderr.contains("WARNING: ThreadSanitizer") && !done.stderr.contains("runtime error");
            assert!(quiet, "{}", done.stderr);
        };
        let ask = self.command(host, Accel, program, &["ask", &port, &many, &each]);
        finish(Proc::spawn(host.logs(), "ask", ask));
        finish(server);
        let port = net::free_port().to_string();
        let both = self.command(host, Accel, program, &["both", &port, &many, &each]);
        finish(Proc::spawn(host.logs(), "both", both));
        host.snapshot().since(&before).assert_shm(4 * connections as i128);
    }
}
