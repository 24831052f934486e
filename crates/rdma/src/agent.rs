//! All links of a host, one descriptor for what happens to them.

use crate::agree::{Key, Role};
use crate::device::Device;
use crate::flow::MAX_LINKS;
use crate::link::{Down, Link, RECEIVE, SEND};
use crate::{Body, Error};
use rdma_mummy_sys as verbs;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::rc::Rc;

/// Completions that one call of [`Agent::poll`] looks at: a peer that is never silent does not keep it.
const BUDGET: usize = 1024;

/// What has happened to a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The peer says this, and what it announces has been written.
    Message(u32, Body),
    /// All that was posted has left: its memory may be used again.
    Idle(u32),
    /// A post that was refused for lack of room may be tried again.
    Room(u32),
    /// The link is no more, and already forgotten.
    Down(u32, Down),
}

pub struct Agent {
    links: BTreeMap<u32, Link>,
    device: Rc<Device>,
    epoll: OwnedFd,
    next: u32,
    /// There are completions left of the last poll.
    more: bool,
}

/// By libc: an agent has the library, which leaves programs to the kernel whose epoll instances it has not seen.
fn instance() -> Result<OwnedFd, Error> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if fd < 0 {
        return Err(Error::Verbs("epoll", io::Error::last_os_error()));
    }
    // SAFETY: just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, name: u64) -> Result<(), Error> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: name };
    // SAFETY: an event that lives during the call.
    match unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) } {
        0 => Ok(()),
        _ => Err(Error::Verbs("epoll", io::Error::last_os_error())),
    }
}

/// In the epoll instance, beside the numbers of links.
const DEVICE: u64 = 1 << 32;

impl Agent {
    /// On the device that has the address `addr`.
    pub fn new(addr: IpAddr) -> Result<Agent, Error> {
        let device = Device::open(addr)?;
        let epoll = instance()?;
        for fd in [device.completions(), device.asynchronous()] {
            watch(&epoll, fd.as_fd(), DEVICE)?;
        }
        Ok(Agent { links: BTreeMap::new(), device, epoll, next: 1, more: false })
    }

    /// Makes a link to the agent at the other end of `stream`, which stays open. Both agents must have `key`.
    pub fn link(&mut self, stream: TcpStream, role: Role, key: &Key) -> Result<u32, Error> {
        if self.links.len() >= MAX_LINKS as usize {
            return Err(Error::TooManyLinks);
        }
        let id = self.next;
        let link = Link::new(&self.device, id, stream, role, key)?;
        watch(&self.epoll, link.stream.as_fd(), id.into())?;
        self.next += 1;
        self.links.insert(id, link);
        Ok(id)
    }

    /// A link that has not been reported as down.
    pub fn get(&mut self, link: u32) -> Option<&mut Link> {
        self.links.get_mut(&link)
    }

    /// Ends a link. The peer sees [`Down::Gone`].
    pub fn drop_link(&mut self, link: u32) {
        self.links.remove(&link);
    }

    /// Appends what has happened since. True: that was not all, call again before sleeping.
    pub fn poll(&mut self, events: &mut Vec<Event>) -> Result<bool, Error> {
        if self.device.port_failed() {
            for id in std::mem::take(&mut self.links).into_keys() {
                events.push(Event::Down(id, Down::Cut));
            }
        }
        self.device.arm()?;
        // SAFETY: plain data, for which zero is valid.
        let mut room: [verbs::ibv_wc; 32] = unsafe { std::mem::zeroed() };
        let mut seen = 0;
        self.more = loop {
            let device = self.device.clone();
            let completions = device.poll(&mut room)?;
            for completion in completions {
                self.complete(completion, events);
            }
            seen += completions.len();
            if completions.is_empty() || seen >= BUDGET {
                break !completions.is_empty();
            }
        };
        // After the completions: what a peer has sent before it ended comes first.
        if !self.more {
            self.ended(events);
        }
        Ok(self.more)
    }

    fn complete(&mut self, completion: &verbs::ibv_wc, events: &mut Vec<Event>) {
        let id = (completion.wr_id >> 32) as u32;
        let Some(link) = self.links.get_mut(&id) else { return };
        let result = match completion.status {
            verbs::ibv_wc_status::IBV_WC_SUCCESS => Ok(()),
            verbs::ibv_wc_status::IBV_WC_RETRY_EXC_ERR => Err(Down::Cut),
            verbs::ibv_wc_status::IBV_WC_REM_ACCESS_ERR => Err(Down::Denied),
            // An earlier completion has the reason, unless the peer is the reason.
            other => Err(Down::Failed(other as i32)),
        };
        let result = result.and_then(|()| match completion.wr_id as u32 {
            SEND => {
                link.sent();
                if link.flow.outstanding() == 0 {
                    events.push(Event::Idle(id));
                }
                Ok(())
            }
            RECEIVE => {
                // SAFETY: 4 bytes either way.
                let immediate = unsafe { completion.imm_data_invalidated_rkey_union.imm_data };
                if let Some(body) = link.arrived(immediate)? {
                    events.push(Event::Message(id, body));
                }
                Ok(())
            }
            _ => Ok(()),
        });
        let result = result.and_then(|()| link.settle().map_err(|_| Down::Failed(-1)));
        match result {
            Ok(()) if link.waits && link.flow.may_send() => {
                link.waits = false;
                events.push(Event::Room(id));
            }
            Ok(()) => {}
            Err(down) => self.down(id, down, events),
        }
    }

    fn down(&mut self, id: u32, down: Down, events: &mut Vec<Event>) {
        if self.links.remove(&id).is_some() {
            events.push(Event::Down(id, down));
        }
    }

    /// Links whose TCP connection says that they are no more.
    fn ended(&mut self, events: &mut Vec<Event>) {
        let ended: Vec<_> = self
            .links
            .iter_mut()
            .filter_map(|(id, link)| match link.stream.read(&mut [0]) {
                Ok(0) => Some((*id, Down::Gone)),
                // Nothing is said there any more.
                Ok(_) => Some((*id, Down::Hostile)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock || e.kind() == io::ErrorKind::Interrupted => None,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Some((*id, Down::Gone)),
                Err(_) => Some((*id, Down::Cut)),
            })
            .collect();
        for (id, down) in ended {
            self.down(id, down, events);
        }
    }

    /// Sleeps until there is something to poll for. False: `timeout` (milliseconds) has passed.
    pub fn wait(&self, timeout: i32) -> io::Result<bool> {
        if self.more {
            return Ok(true);
        }
        let mut poll =
            libc::pollfd { fd: std::os::fd::AsRawFd::as_raw_fd(&self.epoll), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry.
        match unsafe { libc::poll(&mut poll, 1, timeout) } {
            n if n < 0 => Err(io::Error::last_os_error()),
            n => Ok(n > 0),
        }
    }
}

impl AsFd for Agent {
    /// Readable: there is something to poll for.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
