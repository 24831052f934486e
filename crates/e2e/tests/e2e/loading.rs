//! The library's own life: unloaded, called before its constructor and after its destructor.

use fsocket_e2e::native::{self, Echo};
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{artifacts, stock_mode, Delta, Host, Proc};
use std::path::Path;
use std::time::Duration;

/// More connections than any program here opens.
const MANY: usize = 1000;

/// Runs a program against an echo server; what the counters say of it.
#[track_caller]
fn against(host: &Host, echo: &Path, server: Side, client: Side, program: &Path, more: &[&Path]) -> Delta {
    let (_server, port) = Echo::default().serve(host, server, echo, MANY);
    let before = host.snapshot();
    let mut command = host.command(client, program);
    // For a stock one that loads the library itself.
    command.env("FASTSOCKET_SOCKET", host.socket()).arg(&port).args(more);
    Proc::spawn(host.logs(), "program", command).finish(Duration::from_secs(60)).success().says("ok");
    host.snapshot().since(&before)
}

/// dlopen and dlclose of the library itself, and of a plugin that leaves connections behind. Where
/// it was not preloaded nobody calls its functions but by name: that one connection is over
/// shared memory, everything else is libc's.
#[test]
fn loaded_and_unloaded() {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let unload = native::build(&host, "unload", &["unload.c"], &["-ldl"]);
    let plugin = native::build(&host, "plugin.so", &["plugin.c"], &["-shared", "-fPIC"]);
    let library = artifacts::library();
    let more = [library.as_path(), plugin.as_path()];
    // One, twice four, one by name, and twice four with the plugin.
    against(&host, &echo, Accel, Accel, &unload, &more).assert_shm(18);
    against(&host, &echo, Stock, Accel, &unload, &more).assert_kernel_only();
    let by_name = against(&host, &echo, Accel, Stock, &unload, &more);
    let accepted = (by_name.get("accept_shm"), by_name.get("accept_kernel"));
    assert!(stock_mode() || accepted == (1, 17), "{by_name}");
    assert!(stock_mode() || by_name.get("connect_shm") == 1, "{by_name}");
}

/// Plugins that find libc's functions before ours (RTLD_DEEPBIND), bound as they go and at once,
/// and sealed then: connections that the program has made are theirs, too.
#[test]
fn plugins_that_look_at_home_first() {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let deep = native::build(&host, "deep", &["deep.c"], &["-ldl"]);
    let plugin = |name: &str, how: &[&str]| {
        native::build(&host, name, &["deep_plugin.c"], &[&["-shared", "-fPIC"], how].concat())
    };
    let lazy = plugin("lazy.so", &["-Wl,-z,lazy"]);
    let sealed = plugin("sealed.so", &["-Wl,-z,now,-z,relro"]);
    let no_plt = plugin("no_plt.so", &["-fno-plt"]);
    let delta = against(&host, &echo, Accel, Accel, &deep, &[&lazy, &sealed, &no_plt]);
    delta.assert_shm(6);
}

/// IFUNC resolver, .preinit_array, another library's constructor; atexit, another library's
/// destructor, a thread that outlives main.
#[test]
fn before_the_constructor_and_after_the_destructor() {
    let host = Host::new();
    let echo = native::build(&host, "echo", &["echo.c"], &[]);
    let library = native::build(&host, "libphases.so", &["phases_lib.c"], &["-shared", "-fPIC"]);
    let dir = format!("-Wl,-rpath,{}", host.path().display());
    let lib = library.display().to_string();
    let phases = native::build(&host, "phases", &["phases.c"], &[&lib, &dir]);
    let delta = against(&host, &echo, Accel, Accel, &phases, &[]);
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    // Five from main's beginning on. Before, the library is not there, and libc is called: two from .preinit_array, two
    // from the constructor. One goes to a listener that is older than the library: it is the kernel's until a process
    // with the library has accepted there.
    assert_eq!((delta.get("connect_shm"), delta.get("accept_shm")), (5, 5), "{delta}");
    assert_eq!((delta.get("connect_kernel"), delta.get("accept_kernel")), (1, 5), "{delta}");
    assert_eq!((delta.get("hostile_peer"), delta.get("reset_shm")), (0, 0), "{delta}");
    against(&host, &echo, Stock, Accel, &phases, &[]);
    against(&host, &echo, Accel, Stock, &phases, &[]).assert_kernel_only();
}

/// The output of `secure.py` with these arguments, in a mount namespace.
fn secure(host: &Host, args: &[&str]) -> String {
    let mut command = host.command(Stock, "unshare");
    command.args(["-m", fsocket_testkit::PYTHON]).arg(fsocket_testkit::script("apps/secure.py")).args(args);
    let library = artifacts::library();
    command.arg(library);
    Proc::spawn(host.logs(), "secure", command).finish(Duration::from_secs(60)).success().says("ok").stdout
}

/// /etc/ld.so.preload loads the library into programs with more rights than whoever starts them.
#[test]
fn a_set_user_id_program_greets_nobody() {
    let said = secure(&Host::new(), &[]);
    let lines: Vec<_> = said.lines().take(2).collect();
    let silent = ["FASTSOCKET_SUCCESSOR socket as 0 False False", "FASTSOCKET_SOCKET socket as 0 False False"];
    assert_eq!(lines, silent, "the user's own monitor was greeted");
}

/// A user namespace without a number for the monitor's user shows that user as nobody. A namespace with a number for
/// nobody does not show others so.
#[test]
fn nobody_is_not_the_monitor_of_root_in_a_user_namespace() {
    let said = secure(&Host::new(), &["nobody"]);
    assert!(said.contains("a number False") && said.contains("none True"), "{said}");
}
