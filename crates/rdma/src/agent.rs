//! All links of a host to other agents, and one descriptor that becomes readable for events of any
//! link.

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

/// Most completions that one call of [`Agent::poll`] handles, so that a peer that sends all the
/// time cannot keep it busy.
const BUDGET: usize = 1024;

/// An event of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A message from the peer. The write that it announces is complete.
    Message(u32, Body),
    /// Everything that was posted has left, so its memory may be used again.
    Idle(u32),
    /// A post was refused for lack of room, and may now be tried again.
    Room(u32),
    /// The link has ended, and its state has been freed.
    Down(u32, Down),
}

pub struct Agent {
    links: BTreeMap<u32, Link>,
    device: Rc<Device>,
    epoll: OwnedFd,
    next: u32,
    /// The last poll left completions for the next call.
    more: bool,
}

/// Makes the epoll instance by libc's function. An agent runs with the library, and the library
/// leaves a program's sockets to the kernel if it has not seen the program's epoll instances.
fn instance() -> Result<OwnedFd, Error> {
    // SAFETY: `epoll_create1` takes no pointers.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if fd < 0 {
        return Err(Error::Verbs("epoll", io::Error::last_os_error()));
    }
    // SAFETY: the call has just made the descriptor, so it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, name: u64) -> Result<(), Error> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: name };
    // SAFETY: `event` is live during the call.
    match unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) } {
        0 => Ok(()),
        _ => Err(Error::Verbs("epoll", io::Error::last_os_error())),
    }
}

/// Mark of the device's events in the epoll instance. Events of links have the link's number,
/// which is smaller.
const DEVICE: u64 = 1 << 32;

impl Agent {
    /// Opens the device that has the address `addr`.
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

    /// A link, unless it has been reported as down.
    pub fn get(&mut self, link: u32) -> Option<&mut Link> {
        self.links.get_mut(&link)
    }

    /// Ends a link. The peer sees [`Down::Gone`].
    pub fn drop_link(&mut self, link: u32) {
        self.links.remove(&link);
    }

    /// Appends the events since the last call. Returns true if some are left: then call again
    /// before sleeping.
    pub fn poll(&mut self, events: &mut Vec<Event>) -> Result<bool, Error> {
        if self.device.port_failed() {
            for id in std::mem::take(&mut self.links).into_keys() {
                events.push(Event::Down(id, Down::Cut));
            }
        }
        self.device.arm()?;
        // SAFETY: ibv_wc is plain data, for which zero is valid.
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
        // Handle ended links after the completions, so that messages come first that the peer sent
        // before its end.
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
            // An earlier completion had the reason for this one's error, unless the peer is the
            // reason.
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
                // SAFETY: both members of the union are 4 bytes of plain data.
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

    /// Reports links whose TCP connection has ended.
    fn ended(&mut self, events: &mut Vec<Event>) {
        let ended: Vec<_> = self
            .links
            .iter_mut()
            .filter_map(|(id, link)| match link.stream.read(&mut [0]) {
                Ok(0) => Some((*id, Down::Gone)),
                // After the exchange, an honest peer sends nothing over this connection.
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

    /// Sleeps until [`Agent::poll`] has something to do. Returns false if `timeout` (milliseconds)
    /// has passed.
    pub fn wait(&self, timeout: i32) -> io::Result<bool> {
        if self.more {
            return Ok(true);
        }
        let mut poll =
            libc::pollfd { fd: std::os::fd::AsRawFd::as_raw_fd(&self.epoll), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one live pollfd, and the count is 1.
        match unsafe { libc::poll(&mut poll, 1, timeout) } {
            n if n < 0 => Err(io::Error::last_os_error()),
            n => Ok(n > 0),
        }
    }
}

impl AsFd for Agent {
    /// Becomes readable when [`Agent::poll`] has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
