//! The life cycle of the library: it is unloaded, called before its constructor, or called after
//! its destructor.

use fsocket_e2e::native::{self, Echo};
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{artifacts, stock_mode, Delta, Host, Proc};
use std::path::Path;
use std::time::Duration;

/// More connections than any program here opens.
const MANY: usize = 1000;

/// Runs a program against an echo server. Returns the changes of the counters.
#[track_caller]
fn against(host: &Host, echo: &Path, server: Side, client: Side, program: &Path, more: &[&Path]) -> Delta {
    let (_server, port) = Echo::default().serve(host, server, echo, MANY);
    let before = host.snapshot();
    let mut command = host.command(client, program);
    // Tells the monitor's socket to a stock program, which may load the library itself.
    command.env("FASTSOCKET_SOCKET", host.socket()).arg(&port).args(more);
    Proc::spawn(host.logs(), "program", command).finish(Duration::from_secs(60)).success().says("ok");
    host.snapshot().since(&before)
}

/// dlopen and dlclose of the library itself, and of a plugin that leaves connections open. If the
/// library was not preloaded, it serves only calls of functions that the program looked up in it:
/// one connection uses shared memory, all others the kernel.
#[test]
fn loaded_and_unloaded() {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let unload = native::build(&host, "unload", &["loading/unload.c"], &["-ldl"]);
    let plugin = native::build(&host, "plugin.so", &["loading/plugin.c"], &["-shared", "-fPIC"]);
    let library = artifacts::library();
    let more = [library.as_path(), plugin.as_path()];
    // These are 1 + 4 + 4 connections, one through a looked-up function, and 4 + 4 with the
    // plugin.
    against(&host, &echo, Accel, Accel, &unload, &more).assert_shm(18);
    against(&host, &echo, Stock, Accel, &unload, &more).assert_kernel_only();
    let by_name = against(&host, &echo, Accel, Stock, &unload, &more);
    let accepted = (by_name.get("accept_shm"), by_name.get("accept_kernel"));
    assert!(stock_mode() || accepted == (1, 17), "{by_name}");
    assert!(stock_mode() || by_name.get("connect_shm") == 1, "{by_name}");
}

/// Plugins that look for libc's functions in their own dependencies first (RTLD_DEEPBIND). They
/// are bound lazily, or at once and then sealed. They must be able to use connections of the
/// program.
#[test]
fn plugins_that_look_at_home_first() {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let deep = native::build(&host, "deep", &["loading/deep.c"], &["-ldl"]);
    let plugin = |name: &str, how: &[&str]| {
        native::build(&host, name, &["loading/deep_plugin.c"], &[&["-shared", "-fPIC"], how].concat())
    };
    let lazy = plugin("lazy.so", &["-Wl,-z,lazy"]);
    let sealed = plugin("sealed.so", &["-Wl,-z,now,-z,relro"]);
    let no_plt = plugin("no_plt.so", &["-fno-plt"]);
    let delta = against(&host, &echo, Accel, Accel, &deep, &[&lazy, &sealed, &no_plt]);
    delta.assert_shm(6);
}

/// Calls from an IFUNC resolver, .preinit_array, another library's constructor, atexit, another
/// library's destructor, and a thread that outlives main.
#[test]
fn before_the_constructor_and_after_the_destructor() {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let library = native::build(&host, "libphases.so", &["loading/phases_lib.c"], &["-shared", "-fPIC"]);
    let dir = format!("-Wl,-rpath,{}", host.path().display());
    let lib = library.display().to_string();
    let phases = native::build(&host, "phases", &["loading/phases.c"], &[&lib, &dir]);
    let delta = against(&host, &echo, Accel, Accel, &phases, &[]);
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    // Five connections are made after main has started. Earlier calls go to libc: two connections
    // from .preinit_array, two from the constructor. One more goes to a listener that is older
    // than the library; the kernel serves this listener until a process with the library has
    // accepted there.
    assert_eq!((delta.get("connect_shm"), delta.get("accept_shm")), (5, 5), "{delta}");
    assert_eq!((delta.get("connect_kernel"), delta.get("accept_kernel")), (1, 5), "{delta}");
    assert_eq!((delta.get("hostile_peer"), delta.get("reset_shm")), (0, 0), "{delta}");
    against(&host, &echo, Stock, Accel, &phases, &[]);
    against(&host, &echo, Accel, Stock, &phases, &[]).assert_kernel_only();
}

/// The output of `secure.py` with these arguments, in a mount namespace.
fn secure(host: &Host, args: &[&str]) -> String {
    let mut command = host.command(Stock, "unshare");
    command.args(["-m", fsocket_testkit::PYTHON]).arg(fsocket_testkit::helper("secure.py")).args(args);
    let library = artifacts::library();
    command.arg(library);
    Proc::spawn(host.logs(), "secure", command).finish(Duration::from_secs(60)).success().says("ok").stdout
}

/// /etc/ld.so.preload also loads the library into programs with more rights than their caller.
/// There it must stay inactive.
#[test]
fn a_set_user_id_program_greets_nobody() {
    let said = secure(&Host::new(), &[]);
    let lines: Vec<_> = said.lines().take(2).collect();
    let silent = ["FASTSOCKET_SUCCESSOR socket as 0 False False", "FASTSOCKET_SOCKET socket as 0 False False"];
    assert_eq!(lines, silent, "the user's own monitor was greeted");
}

/// If a user namespace does not map the monitor's user, that user appears as nobody. If it maps
/// nobody, other users do not appear so, and the user nobody must not be taken for the monitor's.
#[test]
fn nobody_is_not_the_monitor_of_root_in_a_user_namespace() {
    let said = secure(&Host::new(), &["nobody"]);
    assert!(said.contains("a number False") && said.contains("none True"), "{said}");
}
