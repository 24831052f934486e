//! Listeners that were closed without a message.
//!
//! A process may close a listening socket with a system call that the library does not see, and
//! another service may get the port next. So what a client knows about a listener is valid only
//! until a socket with that port stops or starts listening. (A new one may fit the address
//! better.) The kernel counts such events in a page that clients map (`fsocket_bpf::closings`). A
//! client that finds another count in the page asks the monitor again. The monitor then asks the
//! kernel whether that very socket still listens in its network namespace.
//!
//! A private monitor has no such page. Its answers are valid for `ROUTE_SECS`.

use crate::broker::Broker;
use crate::clients::Outgoing;
use crate::context::Context;
use crate::foreign::ForeignFd;
use crate::sockdiag::SockDiag;
use crate::ConnId;
use fsocket_bpf::closings::Counts;
use fsocket_proto::notice;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::collections::HashMap;
use std::rc::Rc;

/// The monitor checks listeners in at most this many other network namespaces. In further
/// namespaces, the monitor assumes that known listeners still exist.
const PLACES: usize = 256;

#[derive(Default)]
pub struct Closings {
    counts: Option<(Counts, Rc<ForeignFd>)>,
    /// For the monitor's own network namespace.
    own: Option<SockDiag>,
    /// For other network namespaces; `None`: the monitor may not enter it.
    places: HashMap<u64, Option<SockDiag>>,
}

impl Closings {
    pub fn start(private: bool, broker: &Broker) -> Closings {
        let counts = if private { None } else { counts(broker) };
        Closings { counts, own: SockDiag::new(), places: HashMap::new() }
    }
}

fn counts(broker: &Broker) -> Option<(Counts, Rc<ForeignFd>)> {
    // If all users may load BPF programs, a client's program could write to the map behind the
    // page.
    let everybody = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled");
    if everybody.is_ok_and(|v| v.trim() == "0") {
        tracing::warn!("kernel.unprivileged_bpf_disabled is 0: listeners closed past the library are noticed late");
        return None;
    }
    let page = broker.closings().ok()?;
    let counts = Counts::of(page.as_fd()).ok()?;
    Some((counts, Rc::new(ForeignFd::new(page, 0))))
}

impl Closings {
    /// The count of this port, for an answer to a client. If the client does not have the page
    /// yet, it is sent before the answer.
    pub fn count_for(&mut self, ctx: &mut Context, id: ConnId, port: u16) -> u32 {
        let Some((counts, page)) = &self.counts else { return 0 };
        let count = counts.count(port);
        let fd = page.clone();
        if ctx.clients.get_mut(id).is_some_and(|c| !std::mem::replace(&mut c.has_closings, true)) {
            // The client reads this message while it waits for the answer, so it does not count as
            // unrequested.
            let out = Outgoing { unasked: false, ..Outgoing::with(notice::Closings {}, fd) };
            ctx.clients.send(id, out);
        }
        count
    }

    /// A socket for questions about listeners in a network namespace. `place`: a TCP socket there.
    pub fn diag(&mut self, ctx: &Context, netns: u64, place: Option<BorrowedFd<'_>>) -> Option<&mut SockDiag> {
        let own = self.own.as_mut()?;
        if netns == ctx.netns {
            return Some(own);
        }
        let places = &mut self.places;
        if let (false, Some(fd)) = (places.contains_key(&netns) || places.len() >= PLACES, place) {
            let made = ctx.broker.diag(fd);
            match made {
                Err(e) if e != Errno::XDEV => return None,
                made => places.insert(netns, made.ok()),
            };
        }
        places.get_mut(&netns)?.as_mut()
    }

    /// Closes the socket in a namespace that has no listener any more, because that socket would
    /// keep the namespace alive.
    pub fn forget(&mut self, netns: u64) {
        self.places.remove(&netns);
    }
}
