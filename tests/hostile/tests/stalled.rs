//! A peer begins a path switch and then gets no CPU, or never continues. Calls that need nothing
//! from the peer must not wait, and the connection must live on.

use fsocket_abi::channel::{slot_state, status};
use fsocket_abi::path_switch::PeerStatus;
use fsocket_hostile::peer::Peer;
use fsocket_hostile::random::Random;
use fsocket_sync::atomic::Ordering;
use fsocket_testkit::host::Accel;
use fsocket_testkit::{helper, net, stock_mode, Host, PYTHON};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_non_blocking_socket_is_shut_down_while_its_peer_moves() {
    if stock_mode() {
        return eprintln!("SKIPPED: there is no shared memory");
    }
    let host = Host::new();
    let (port, path) = (net::free_port(), helper("shut_while_moved.py").display().to_string());
    let [shut, look] = ["shut", "look"].map(|name| host.path().join(name));
    let args = [path.as_str(), &port.to_string(), shut.to_str().expect("text"), look.to_str().expect("text")];
    let mut server = host.start(Accel, "server", PYTHON, &args);
    server.wait_stdout("listening", LIMIT);

    let mut peer = Peer::connect(&host.socket()).expect("a monitor");
    assert!(peer.hello(&mut Random::new(1)), "it is greeted");
    let channel = peer.channel(port).expect("a channel");
    channel.open(&peer, 0);
    channel.say(&peer, 0, b"hello");
    server.wait_stdout("first b'hello'", LIMIT);
    let slot = channel.slot(0);
    assert_eq!(slot.state.load(Ordering::Acquire), slot_state::ESTABLISHED, "over shared memory");

    slot.dir[0].prod.status.store(PeerStatus::MOVING.bits(), Ordering::Release);
    host.file("shut", "");
    server.wait_stdout("shut\n", LIMIT);
    let said = slot.dir[1].prod.status.load(Ordering::Acquire);
    assert_eq!(said & (status::FIN | status::RST | status::CLOSED), status::FIN, "it is shut down, and was not reset");

    slot.dir[0].prod.status.store(0, Ordering::Release);
    host.file("look", "");
    server.wait_stdout("second nothing", LIMIT);
}
