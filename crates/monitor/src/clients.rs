//! Connected processes and what waits to be sent to them.

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

/// After which time messages are sent again for which the kernel had no room.
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

/// The waiter that is rung, and the process that rings; none: the monitor itself.
type How = (Waiter, Option<ConnId>);

/// All clients. A client that must go is only noted in `doomed`, because its
/// end touches everything else; the event loop does that in between.
pub struct Clients {
    all: HashMap<ConnId, Client>,
    epoll: Rc<OwnedFd>,
    last_id: ConnId,
    pub doomed: Vec<ConnId>,
    /// To whom the kernel had no room to send, and when to try again.
    unsent: BTreeSet<ConnId>,
    pub send_again: Option<Instant>,
    /// Processes by their part of a [`waker_key`](fsocket_abi::channel::waker_key).
    by_key: HashMap<u64, Vec<ConnId>>,
    /// To be woken: process, waker and channel, and what [`notice::Woken`] says besides. Noted while other things are
    /// borrowed, sent by [`Self::send_wakes`].
    wakes: RefCell<BTreeMap<(ConnId, u8, ChannelId), How>>,
}

impl Clients {
    /// `first_id`: numbers below are other things in the epoll instance.
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

    /// For messages: which process and program.
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
    /// Of `epoll_ctl`; the client is then not added.
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
        // Explicitly: somebody else may have a duplicate of an adopted socket,
        // and closing ours would leave it in the set.
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

    /// Sends an answer, or what the process itself has caused, now or as soon as it reads.
    pub fn send(&mut self, id: ConnId, out: Outgoing) {
        if self.all.get(&id).is_some_and(|client| client.out.is_too_long()) {
            return self.doom(id, "it does not read");
        }
        self.queue(id, out, Cause::Own);
    }

    /// Sends what says how things are: of each thing once, whoever has changed it, and however often.
    pub fn notify(&mut self, id: ConnId, notice: impl Payload) {
        self.queue(id, Outgoing::of(notice), Cause::State);
    }

    /// Sends what another process causes. False: that one has sent too much that this one has not read, and is refused.
    pub fn send_for(&mut self, by: ConnId, id: ConnId, out: Outgoing) -> bool {
        let has_room = self.has_room(by, id, 1);
        if let Some(cause) = self.by(by).filter(|_| has_room) {
            self.queue(id, out, Cause::Other(cause));
        }
        has_room
    }

    /// May process `by` cause so many messages to another one?
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

    /// Sends what the kernel had no room for.
    pub fn send_again_if_due(&mut self) {
        if self.send_again.is_some_and(|at| at <= Instant::now()) {
            self.send_again = None;
            for id in std::mem::take(&mut self.unsent) {
                self.flush(id);
            }
        }
    }

    /// Sends what can be sent.
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
                // The kernel lacks something; that is no fault of this process, whose connections
                // would be reset. The socket is writable, so nothing but time says when to try again.
                Err(Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS) => {
                    no_room = true;
                    self.unsent.insert(id);
                    self.send_again.get_or_insert_with(|| Instant::now() + SEND_AGAIN);
                    break;
                }
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN | Errno::CONNREFUSED) => {
                    // Gone; but what it sent before is still to be read (an
                    // ADOPT, say). The end comes when that is done.
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

    /// A process has said its nonce, or its parent has.
    pub fn named(&mut self, id: ConnId, nonce: u64) {
        let owners = self.by_key.entry(nonce & !KEY_WAKER).or_default();
        if nonce != 0 && !owners.contains(&id) {
            owners.push(id);
        }
    }

    /// The process with a [`waker_key`](fsocket_abi::channel::waker_key) whose family `fits`. Nonces
    /// are chosen by clients: a stranger with the same one is not it.
    pub fn by_key(&self, key: u64, fits: impl Fn(FamilyId) -> bool) -> Option<ConnId> {
        let owners = self.by_key.get(&(key & !KEY_WAKER))?;
        owners.iter().copied().find(|id| self.all.get(id).is_some_and(|c| fits(c.family)))
    }

    /// The thread with this key is to be woken, if its family `fits`.
    pub fn wake(&self, key: u64, fits: impl Fn(FamilyId) -> bool, channel: ChannelId, how: (Waiter, Option<ConnId>)) {
        let waker = ((key & KEY_WAKER) as u8).checked_sub(1);
        if let (Some(waker), Some(id)) = (waker, self.by_key(key, fits)) {
            self.wakes.borrow_mut().entry((id, waker, channel)).or_insert(how);
        }
    }

    /// Something has changed for those of these processes that sleep on a connection ([`fsocket_abi::arena::news_of`]) and `fit`:
    /// also if their peer has taken them from the words that it can write.
    pub fn tell_news(&self, processes: &BTreeSet<ConnId>, fits: impl Fn(FamilyId) -> bool, index: usize) {
        let of = |id| self.all.get(id).filter(|c| fits(c.family)).and_then(|c| c.arena.as_ref());
        processes.iter().filter_map(of).for_each(|arena| arena.tell_news(index));
    }

    /// Sends [`notice::Woken`] to those that [`Self::wake`] has named. One message for each waker and channel, and not many with
    /// the name of a channel, however often they are rung while their process does not read.
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
