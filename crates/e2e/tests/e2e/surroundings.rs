//! Programs in unusual surroundings: another allocator, a sanitizer, valgrind, or a kernel that
//! promises no more memory than it has.

use fsocket_e2e::native::{self, Echo};
use fsocket_testkit::host::Accel;
use fsocket_testkit::netns::Cleanup;
use fsocket_testkit::{artifacts, find_program, net, stock_mode, Host, Proc, PYTHON};
use std::path::Path;
use std::time::Duration;

/// The path of a shared library where Debian installs it. Skips the test, with a message, if it is
/// missing.
macro_rules! need_library {
    ($name:literal) => {{
        let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
        match places.iter().map(|p| Path::new(p).join($name)).find(|p| p.exists()) {
            Some(path) => path,
            None if std::env::var_os("FASTSOCKET_TEST_STRICT").is_some() => {
                panic!("{} is not installed (FASTSOCKET_TEST_STRICT is set)", $name)
            }
            None => return eprintln!("SKIPPED: {} is not installed (make deps)", $name),
        }
    }};
}

/// Loads the allocator before and after the library. Runs threads in C, and an interpreter that
/// allocates all objects by it.
#[track_caller]
fn with_allocator(library: &Path) {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    for list in [native::preload(&[library], &[]), native::preload(&[], &[library])] {
        Echo { preload: Some(list.clone()), ..Echo::default() }.check(&echo, &host, 6, 40);
        let before = host.snapshot();
        let port = net::free_port().to_string();
        let path = |name: &str| fsocket_testkit::helper(name).display().to_string();
        let python = |name: &str, args: &[&str]| {
            let mut command = host.command(Accel, PYTHON);
            command.args(args).env("LD_PRELOAD", &list).env("PYTHONMALLOC", "malloc");
            Proc::spawn(host.logs(), name, command)
        };
        let mut server = python("ways-serve", &[&path("process_ways.py"), "serve", &port]);
        let listens = || stock_mode() || host.snapshot().report.is_some_and(|r| !r.listeners.is_empty());
        net::wait_until(Duration::from_secs(60), || {
            listens() && net::kernel_sockets(port.parse().expect("port"), "0A") > 0
        })
        .expect("it listens");
        python("ways-ask", &[&path("process_ways.py"), "ask", &port])
            .finish(Duration::from_secs(60))
            .success()
            .says("ok");
        server.wait_stdout("ok", Duration::from_secs(60));
        host.snapshot().since(&before).assert_shm(6);
    }
}

#[test]
fn jemalloc() {
    with_allocator(&need_library!("libjemalloc.so.2"));
}

#[test]
fn tcmalloc() {
    with_allocator(&need_library!("libtcmalloc_minimal.so.4"));
}

#[test]
fn mimalloc() {
    with_allocator(&need_library!("libmimalloc.so.2.0"));
}

/// gcc's sanitizers with their runtime linked into the program.
#[test]
fn sanitizers_in_the_program() {
    let host = Host::new();
    for flags in [
        &["-fsanitize=address", "-static-libasan"][..],
        &["-fsanitize=thread", "-static-libtsan"],
        &["-fsanitize=undefined", "-fno-sanitize-recover=all"],
    ] {
        let echo = native::build(&host, "echo", &["echo.c"], flags);
        Echo::default().check(&echo, &host, 6, 40);
    }
}

/// The sanitizers as shared libraries (gcc's default). They are loaded after our library.
/// AddressSanitizer would end the program for that, but `fastsocket run` switches this check off.
#[test]
fn sanitizers_as_libraries() {
    let host = Host::new();
    let cli = artifacts::cli().display().to_string();
    let before: &[&str] = if stock_mode() { &[] } else { &[&cli, "run", "--"] };
    for sanitizer in ["-fsanitize=address", "-fsanitize=thread", "-fsanitize=address,undefined"] {
        let echo = native::build(&host, "echo", &["echo.c"], &[sanitizer]);
        // Preload nothing into the command line itself.
        Echo { before, preload: Some(String::new()), ..Echo::default() }.check(&echo, &host, 6, 40);
    }
}

/// valgrind must find no access to invalid or uninitialised memory, by the program or by the
/// library.
#[test]
fn valgrind() {
    let Some(valgrind) = find_program("valgrind") else {
        assert!(std::env::var_os("FASTSOCKET_TEST_STRICT").is_none(), "valgrind is not installed");
        return eprintln!("SKIPPED: valgrind is not installed (make deps)");
    };
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let valgrind = valgrind.display().to_string();
    let before = [valgrind.as_str(), "-q", "--error-exitcode=9", "--fair-sched=yes"];
    Echo { before: &before, ..Echo::default() }.check(&echo, &host, 4, 14);
}

/// Memory in KiB that the kernel has promised to all processes.
fn committed() -> i64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("meminfo");
    let line = text.lines().find(|l| l.starts_with("Committed_AS:")).expect("Committed_AS");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

/// These tests change a setting of the whole machine, which would take memory from other tests.
mod alone {
    use super::*;

    /// With `vm.overcommit_memory=2`, address space that is never touched must not count. This
    /// concerns channels (a server has one for each client) and the library's tables.
    #[test]
    fn no_overcommit() {
        // SAFETY: `geteuid` takes no arguments.
        if unsafe { libc::geteuid() } != 0 {
            return eprintln!("SKIPPED: vm.overcommit_memory needs root");
        }
        const KEYS: [&str; 3] = ["overcommit_memory", "overcommit_kbytes", "overcommit_ratio"];
        let read = |key: &str| std::fs::read_to_string(format!("/proc/sys/vm/{key}")).expect("vm").trim().to_owned();
        let mut cleanup = Cleanup::new().expect("guard");
        for key in KEYS {
            // One of the last two settings is 0 and not in force. Writing the 0 back would reset
            // the other one.
            if read(key) != "0" || key == "overcommit_memory" {
                cleanup.push(&format!("echo {} > /proc/sys/vm/{key}", read(key))).expect("push");
            }
        }
        // Leave enough for everything else on this machine.
        std::fs::write("/proc/sys/vm/overcommit_kbytes", (committed() + (8 << 20)).to_string()).expect("limit");
        std::fs::write("/proc/sys/vm/overcommit_memory", "2").expect("mode");

        let host = Host::new();
        let echo = native::build(&host, "echo", &["echo.c"], &[]);
        const CLIENTS: usize = 20;
        let way = Echo::default();
        let before = host.snapshot();
        let (server, port) = way.serve(&host, Accel, &echo, CLIENTS + 1);
        let own = |pid: u32| accountable(&format!("/proc/{pid}/smaps"));
        let (first, all) = (own(server.pid()), committed());
        for _ in 0..CLIENTS {
            let mut ask = host.command(Accel, &echo);
            ask.args(["ask", &port, "1", "20"]);
            Proc::spawn(host.logs(), "ask", ask).finish(Duration::from_secs(30)).success().says("ok");
        }
        let grown = own(server.pid()) - first;
        // glibc gives each thread a stack of 8 MiB and the start of a heap, and keeps both for the
        // next thread.
        assert!(grown < 100 << 10, "the server holds {grown} KiB more after {CLIENTS} clients");
        assert!(first < 64 << 10, "a server that has just begun holds {first} KiB");
        let grown = committed() - all;
        assert!(grown < 2 << 20, "{grown} KiB promised: a channel that has ended counts");
        let mut last = host.command(Accel, &echo);
        last.args(["ask", &port, "1", "20"]);
        Proc::spawn(host.logs(), "ask", last).finish(Duration::from_secs(30)).success().says("ok");
        server.finish(Duration::from_secs(20)).success().says("ok");
        host.snapshot().since(&before).assert_shm(CLIENTS as i128 + 1);
        way.check(&echo, &host, 6, 40);
    }
}

/// Number of KiB in a process's mappings that count against the limit: those with the flag "ac".
fn accountable(smaps: &str) -> i64 {
    let text = std::fs::read_to_string(smaps).expect("smaps");
    let (mut size, mut sum) = (0, 0);
    for line in text.lines() {
        if let Some(kib) = line.strip_prefix("Size:") {
            size = kib.trim().trim_end_matches(" kB").parse().expect("a size");
        } else if line.starts_with("VmFlags:") && line.split_whitespace().any(|flag| flag == "ac") {
            sum += size;
        }
    }
    sum
}
