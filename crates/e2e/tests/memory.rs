//! What the library's memory costs the program that loads it: core files, locked memory, limits.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{stock_mode, Host};

/// Numbers that `memory.py` has printed.
fn numbers(text: &str) -> impl Fn(&str) -> i64 + '_ {
    move |name| {
        let mut words = text.split_whitespace().skip_while(|w| *w != name).skip(1);
        words.next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
    }
}

/// Channels, arena and tables are in no core file: the kernel would make memory of all that is mapped.
#[test]
fn a_core_file_holds_what_is_the_programs() {
    const MIB: i64 = 1024;
    for (clients, more) in [(0, MIB), (32, MIB)] {
        let host = Host::new();
        let before = host.snapshot();
        let dumped =
            |side: Side| numbers(&e2e::python(&host, side, 60, "memory.py", &[&clients.to_string()]))("dumped");
        let (stock, ours) = (dumped(Stock), dumped(Accel));
        assert!(ours <= stock + more, "{clients} clients: {ours} KiB, on stock sockets {stock}");
        if !stock_mode() {
            host.snapshot().since(&before).assert_shm(clients);
        }
    }
}
