//! What one process or user leaves undone, or does too much, costs others nothing.

use crate::support::*;
use fsocket_proto::kind;

/// A parent that waits for its children and reads nothing; each of them listens and is connected to.
#[test]
fn a_parent_that_does_not_read_can_fork_for_ever() {
    let d = Daemon::start();
    let mut parent = d.process_with_arena();
    let mut client = d.process();
    for i in 0..500 {
        // (Its HELLO is answered only if the parent's message has been read.)
        let mut child = parent.adopt();
        let (l, port) = listener();
        let id = child.listen(&l);
        child.work(id);
        let channel = client.connect(port);
        child.request(fsocket_proto::Msg { id, seq: 0, ..fsocket_proto::Msg::new(kind::UNLISTEN) }, None);
        wait_until("the channel has ended", || channel.listener_closed());
        client.sync();
        client.unasked.clear();
        assert!(parent.unasked.is_empty(), "{i}");
    }
    parent.sync();
    assert!(parent.unasked.is_empty(), "it has nothing to do with those channels");
}

#[test]
fn a_worker_that_does_not_read_keeps_what_there_is() {
    let d = Daemon::start();
    let mut worker = d.process_with_arena();
    let (l, port) = listener();
    let id = worker.listen(&l);
    worker.work(id);
    for _ in 0..3000 {
        let mut client = d.process();
        client.connect(port);
    }
    // (It stays: of one that has ended before the worker reads, the worker need not know.)
    let mut client = d.process();
    let last = client.connect(port).id;
    let told = |worker: &mut Proc| loop {
        let (m, _) = worker.wait_unasked();
        if (m.kind, m.id) == (kind::CHANNEL_SRV, u64::from(last)) {
            return;
        }
    };
    worker.sync();
    assert!(worker.unasked.len() < 2000, "{}", worker.unasked.len());
    told(&mut worker);
}
