//! Listeners that were closed without our being told.
//!
//! A process may close a listening socket past the library, and another service may have the port
//! next. What a client was told of a listener holds until a socket with that port stops to listen,
//! or begins to (it may be nearer): the kernel counts those in a page that clients map
//! (`fsocket_bpf::closings`), and a client whose number is not the page's asks again. We then ask the
//! kernel for that very socket, in its own network namespace.
//!
//! A private monitor has no such page: what it says holds for `ROUTE_SECS`.

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

/// Network namespaces of others in which listeners are asked for; those in further ones are believed.
const PLACES: usize = 256;

#[derive(Default)]
pub struct Closings {
    counts: Option<(Counts, Rc<ForeignFd>)>,
    /// In the monitor's own network namespace.
    own: Option<SockDiag>,
    /// By network namespace; `None`: we may not enter it.
    places: HashMap<u64, Option<SockDiag>>,
}

impl Closings {
    pub fn start(private: bool, broker: &Broker) -> Closings {
        let counts = if private { None } else { counts(broker) };
        Closings { counts, own: SockDiag::new(), places: HashMap::new() }
    }
}

fn counts(broker: &Broker) -> Option<(Counts, Rc<ForeignFd>)> {
    // Where everybody may load programs, one of them could write to a map that it was shown.
    let everybody = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled");
    if everybody.is_ok_and(|v| v.trim() == "0") {
        tracing::warn!("kernel.unprivileged_bpf_disabled is 0: listeners that are closed in secret are noticed late");
        return None;
    }
    let page = broker.closings().ok()?;
    let counts = Counts::of(page.as_fd()).ok()?;
    Some((counts, Rc::new(ForeignFd::new(page, 0))))
}

impl Closings {
    /// The count of this port, for an answer to a client, which gets the page first if it has not got it.
    pub fn count_for(&mut self, ctx: &mut Context, id: ConnId, port: u16) -> u32 {
        let Some((counts, page)) = &self.counts else { return 0 };
        let count = counts.count(port);
        let fd = page.clone();
        if ctx.clients.get_mut(id).is_some_and(|c| !std::mem::replace(&mut c.has_closings, true)) {
            // Read on the way to that answer, so not one to be counted.
            let out = Outgoing { unasked: false, ..Outgoing::with(notice::Closings {}, fd) };
            ctx.clients.send(id, out);
        }
        count
    }

    /// Asks about the listeners of a network namespace. `place`: a TCP socket there.
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

    /// No listener is there any more. Our socket would keep the namespace.
    pub fn forget(&mut self, netns: u64) {
        self.places.remove(&netns);
    }
}
