//! Connected processes, and the messages that wait to be sent to them.

use crate::{wire, ChannelId, ConnId, FamilyId};
pub use client::Client;
use fsocket_abi::channel::KEY_WAKER;
use fsocket_proto::values::Waiter;
use fsocket_proto::{notice, Payload};
pub use queue::Outgoing;
use queue::{By, Cause};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// When the kernel has no room for a message, the monitor sends it again after this time.
const SEND_AGAIN: Duration = Duration::from_millis(10);

/// `1234 (nginx)`.
pub struct Name<'a>(Option<&'a Client>);

impl std::fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(Client { pid, name, .. }) if name.is_empty() => write!(f, "{pid}"),
            Some(Client { pid, name, .. }) => write!(f, "{pid} ({name})"),
            None => f.write_str("one that has ended"),
        }
    }
}

/// The waiter to be woken, and the process that rings. `None`: the monitor itself rings.
type How = (Waiter, Option<ConnId>);

/// All clients. A client that must go is only noted in `doomed`, because removing it touches all
/// other state. The event loop removes it later.
pub struct Clients {
    all: HashMap<ConnId, Client>,
    epoll: Rc<OwnedFd>,
    last_id: ConnId,
    pub doomed: Vec<ConnId>,
    /// Clients for whose messages the kernel had no room, and when to send again.
    unsent: BTreeSet<ConnId>,
    pub send_again: Option<Instant>,
    /// Processes, by the part of a [`waker_key`](fsocket_abi::channel::waker_key) that names the
    /// process.
    by_key: HashMap<u64, Vec<ConnId>>,
    /// Wake-ups to be sent: process, waker and channel, and the other fields of [`notice::Woken`].
    /// They are noted while other state is borrowed, and sent by [`Self::send_wakes`].
    wakes: RefCell<BTreeMap<(ConnId, u8, ChannelId), How>>,
}

impl Clients {
    /// `first_id`: lower numbers in the epoll instance mean other things than clients.
    pub fn new(epoll: Rc<OwnedFd>, first_id: ConnId) -> Clients {
        Clients {
            all: HashMap::new(),
            epoll,
            last_id: first_id,
            doomed: Vec::new(),
            unsent: BTreeSet::new(),
            send_again: None,
            by_key: HashMap::new(),
            wakes: RefCell::default(),
        }
    }

    pub fn get(&self, id: ConnId) -> Option<&Client> {
        self.all.get(&id)
    }

    pub fn get_mut(&mut self, id: ConnId) -> Option<&mut Client> {
        self.all.get_mut(&id)
    }

    /// Process and program of a client, for log messages.
    pub fn name(&self, id: ConnId) -> Name<'_> {
        Name(self.all.get(&id))
    }

    pub fn iter(&self) -> impl Iterator<Item = (ConnId, &Client)> {
        self.all.iter().map(|(id, c)| (*id, c))
    }

    pub fn family_members(&self, family: FamilyId) -> Vec<ConnId> {
        self.all.iter().filter(|(_, c)| c.family == family).map(|(id, _)| *id).collect()
    }

    /// # Errors
    /// Those of `epoll_ctl`; the client is then not added.
    pub fn add(&mut self, client: Client) -> Result<ConnId, Errno> {
        self.last_id += 1;
        epoll::add(&*self.epoll, client.fd.as_fd(), EventData::new_u64(self.last_id), client.interest)?;
        let nonce = client.nonce;
        self.all.insert(self.last_id, client);
        self.named(self.last_id, nonce);
        Ok(self.last_id)
    }

    pub fn remove(&mut self, id: ConnId) -> Option<Client> {
        let client = self.all.remove(&id)?;
        // Removed explicitly: another process may have a duplicate of an adopted control socket.
        // Then closing the monitor's copy would leave the socket in the epoll instance.
        let _ = epoll::delete(&*self.epoll, client.fd.as_fd());
        if let Some(owners) = self.by_key.get_mut(&(client.nonce & !KEY_WAKER)) {
            owners.retain(|o| *o != id);
            if owners.is_empty() {
                self.by_key.remove(&(client.nonce & !KEY_WAKER));
            }
        }
        Some(client)
    }

    pub fn doom(&mut self, id: ConnId, why: &str) {
        if let Some(client) = self.all.get(&id) {
            tracing::debug!(process = %Name(Some(client)), why, "dropping");
            self.doomed.push(id);
        }
    }

    /// Sends an answer, or another message that the process itself has caused: now, or as soon as
    /// the process reads.
    pub fn send(&mut self, id: ConnId, out: Outgoing) {
        if self.all.get(&id).is_some_and(|client| client.out.is_too_long()) {
            return self.doom(id, "it does not read");
        }
        self.queue(id, out, Cause::Own);
    }

    /// Sends a message about the state of something. The queue has each such message at most once,
    /// even if several processes change the thing several times.
    pub fn notify(&mut self, id: ConnId, notice: impl Payload) {
        self.queue(id, Outgoing::of(notice), Cause::State);
    }

    /// Sends a message that another process `by` causes. False: too many messages of `by` are
    /// unread here, and this one is refused.
    pub fn send_for(&mut self, by: ConnId, id: ConnId, out: Outgoing) -> bool {
        let has_room = self.has_room(by, id, 1);
        if let Some(cause) = self.by(by).filter(|_| has_room) {
            self.queue(id, out, Cause::Other(cause));
        }
        has_room
    }

    /// Whether process `by` may cause this many more messages to process `id`.
    pub fn has_room(&self, by: ConnId, id: ConnId, more: u32) -> bool {
        self.all.get(&id).zip(self.by(by)).is_some_and(|(client, by)| client.out.has_room(by, more))
    }

    fn by(&self, process: ConnId) -> Option<By> {
        self.all.get(&process).map(|c| By { process, uid: c.uid })
    }

    fn queue(&mut self, id: ConnId, out: Outgoing, cause: Cause) {
        let Some(client) = self.all.get_mut(&id) else { return };
        if out.unasked && out.fd.is_none() && client.out.is_needless(&out.msg) {
            return;
        }
        client.out.push(out, cause);
        self.flush(id);
    }

    /// Sends again what the kernel had no room for.
    pub fn send_again_if_due(&mut self) {
        if self.send_again.is_some_and(|at| at <= Instant::now()) {
            self.send_again = None;
            for id in std::mem::take(&mut self.unsent) {
                self.flush(id);
            }
        }
    }

    /// Sends as many waiting messages as the socket takes.
    pub fn flush(&mut self, id: ConnId) {
        let Some(client) = self.all.get_mut(&id) else { return };
        let mut unasked = false;
        let mut failed = false;
        let mut no_room = false;
        while let Some(has_fd) = client.out.first().map(|next| next.fd.is_some()) {
            if has_fd && !client.may_have_descriptor() {
                break;
            }
            let Some(next) = client.out.first() else { break };
            match wire::send(client.fd.as_fd(), &next.msg, next.fd.as_ref().map(|fd| fd.as_fd())) {
                Ok(()) => {
                    unasked |= next.unasked;
                    client.in_flight += u64::from(has_fd);
                    if let Ok(woken) = next.msg.read::<notice::Woken>() {
                        client.woken.remove(&(woken.waker, woken.channel));
                    }
                    client.out.pop();
                }
                Err(Errno::AGAIN) => break,
                // The kernel lacks memory or another resource. This is no fault of the process, so
                // it is not dropped (which would reset its connections). The socket stays
                // writable, so only a timer can say when to send again.
                Err(Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS) => {
                    no_room = true;
                    self.unsent.insert(id);
                    self.send_again.get_or_insert_with(|| Instant::now() + SEND_AGAIN);
                    break;
                }
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN | Errno::CONNREFUSED) => {
                    // The process has closed its end. Requests that it sent before (ADOPT, for
                    // example) are still to be read. The client is removed after that.
                    client.out.clear();
                }
                Err(_) => {
                    failed = true;
                    break;
                }
            }
        }
        match &client.arena {
            Some(mem) => mem.tell_pending(unasked, !client.out.is_empty()),
            None => client.missed_pending |= unasked,
        }
        let mut interest = EventFlags::ET;
        interest.set(EventFlags::IN, client.wants_input());
        interest.set(EventFlags::OUT, !client.out.is_empty() && !no_room);
        if interest != client.interest {
            client.interest = interest;
            failed |= epoll::modify(&*self.epoll, client.fd.as_fd(), EventData::new_u64(id), interest).is_err();
        }
        if failed {
            self.doom(id, "sending failed");
        }
    }

    /// Notes the nonce of a process, which the process itself or its parent has told.
    pub fn named(&mut self, id: ConnId, nonce: u64) {
        let owners = self.by_key.entry(nonce & !KEY_WAKER).or_default();
        if nonce != 0 && !owners.contains(&id) {
            owners.push(id);
        }
    }

    /// The process that a [`waker_key`](fsocket_abi::channel::waker_key) names and whose family
    /// `fits`. Clients choose their nonces, so an unrelated process may have the same nonce.
    /// `fits` excludes it.
    pub fn by_key(&self, key: u64, fits: impl Fn(FamilyId) -> bool) -> Option<ConnId> {
        let owners = self.by_key.get(&(key & !KEY_WAKER))?;
        owners.iter().copied().find(|id| self.all.get(id).is_some_and(|c| fits(c.family)))
    }

    /// Notes that the thread with this key is to be woken, if its process's family `fits`.
    pub fn wake(&self, key: u64, fits: impl Fn(FamilyId) -> bool, channel: ChannelId, how: (Waiter, Option<ConnId>)) {
        let waker = ((key & KEY_WAKER) as u8).checked_sub(1);
        if let (Some(waker), Some(id)) = (waker, self.by_key(key, fits)) {
            self.wakes.borrow_mut().entry((id, waker, channel)).or_insert(how);
        }
    }

    /// Tells the processes that `fit` that something has changed for threads that sleep on a
    /// connection ([`fsocket_abi::arena::news_of`]). This works even if a malicious peer has
    /// removed those threads from the shared words that it can write.
    pub fn tell_news(&self, processes: &BTreeSet<ConnId>, fits: impl Fn(FamilyId) -> bool, index: usize) {
        let of = |id| self.all.get(id).filter(|c| fits(c.family)).and_then(|c| c.arena.as_ref());
        processes.iter().filter_map(of).for_each(|arena| arena.tell_news(index));
    }

    /// Sends [`notice::Woken`] for each wake-up that [`Self::wake`] has noted: one message for
    /// each waker and channel. If many wake-ups of a process are unread, later ones do not name
    /// the channel. So their number stays bounded while the process does not read.
    pub fn send_wakes(&mut self) {
        const NAMED: usize = 16;
        const NAMED_IN_ALL: usize = 128;
        for ((id, waker, channel), (waiter, ringer)) in std::mem::take(self.wakes.get_mut()) {
            let Some(client) = self.all.get_mut(&id) else { continue };
            let waits = client.woken.range((waker, None)..=(waker, Some(ChannelId::MAX))).count();
            let named = notice::Woken { waker, channel: Some(channel), waiter, ringer };
            let woken = match waits < NAMED && client.woken.len() < NAMED_IN_ALL {
                true => named,
                false => notice::Woken { channel: None, waiter: Waiter::default(), ringer: None, ..named },
            };
            if client.woken.insert((waker, woken.channel)) {
                self.notify(id, woken);
            }
        }
    }
}

mod client;
mod queue;
