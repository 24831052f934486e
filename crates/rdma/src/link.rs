//! A reliable connection to one peer host.

use crate::agree::{self, Endpoint, Key, Role};
use crate::device::{done, some, Device, Domain};
use crate::flow::{Flow, DEPTH, QUEUE};
use crate::memory::{Access, Mapping, Region, Window};
use crate::{Body, Error};
use rdma_mummy_sys as verbs;
use std::collections::VecDeque;
use std::net::TcpStream;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use verbs::ibv_qp_attr_mask as mask;

/// Size of a message: one word for the link itself, and the body.
const MESSAGE: usize = 64;
const BOX: usize = MESSAGE * DEPTH as usize;
const WORDS: usize = MESSAGE / 8;

/// The low half of a work request's ID is its kind; the high half is the number of the link.
pub(crate) const WRITE: u32 = 1;
pub(crate) const SEND: u32 = 2;
pub(crate) const RECEIVE: u32 = 3;

/// Why a link has ended. Posts that are not complete may or may not have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Down {
    /// The peer's host does not answer, or a port has gone down.
    Cut,
    /// The peer agent has ended.
    Gone,
    /// The peer has refused a write, because it was outside of the memory that the peer had given.
    Denied,
    /// The peer broke the protocol.
    Hostile,
    /// Another error: a number of `enum ibv_wc_status`, or -1 if a call failed.
    Failed(i32),
}

/// Why a message was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// There is no room now, because the peer has not read earlier messages.
    /// [`crate::Event::Room`] follows.
    Full,
    /// The transfer is not within its region or the peer's window, or the body is all zeros.
    Range,
    /// The queue pair has failed; [`crate::Event::Down`] follows.
    Failed,
}

/// A write that a message announces.
pub struct Transfer<'a> {
    pub region: &'a Region,
    /// Range of bytes in the region.
    pub from: Range<usize>,
    pub to: Window,
    /// Offset in the window.
    pub at: usize,
}

struct QueuePair(NonNull<verbs::ibv_qp>);
impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: `Link::new` made the queue pair, and only this drop destroys it.
        unsafe { verbs::ibv_destroy_qp(self.0.as_ptr()) };
    }
}

/// The link to one peer. Fields are dropped in their order: the queue pair before the memory that
/// it uses.
pub struct Link {
    qp: QueuePair,
    inbox: Region,
    outbox: Region,
    /// For each message that has not left, oldest first: the region that its write reads from.
    under_way: VecDeque<Option<Region>>,
    domain: Rc<Domain>,
    id: u32,
    pub(crate) flow: Flow,
    /// A post was refused, and no room has been reported since.
    pub(crate) waits: bool,
    peer: Endpoint,
    /// The TCP connection to the peer agent. It ends when the agent ends. If the peer host is
    /// gone, keepalive probes get no answer.
    pub(crate) stream: TcpStream,
}

impl Link {
    /// Makes a link over `stream` to the agent at its other end. Blocks for seconds if that agent
    /// is slow.
    pub(crate) fn new(device: &Rc<Device>, id: u32, stream: TcpStream, role: Role, key: &Key) -> Result<Link, Error> {
        let domain = Domain::new(device)?;
        let memory = boxes()?;
        let inbox = Region::new(&domain, &memory, 0..BOX, Access::Write)?;
        let outbox = Region::new(&domain, &memory, BOX..2 * BOX, Access::None)?;
        // SAFETY: ibv_qp_init_attr is plain data, for which zero is valid.
        let mut init: verbs::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        init.send_cq = device.queue();
        init.recv_cq = device.queue();
        init.qp_type = verbs::ibv_qp_type::IBV_QPT_RC;
        init.cap.max_send_wr = QUEUE;
        init.cap.max_recv_wr = DEPTH;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        // SAFETY: domain and queues are live, and `init` is a live structure.
        let qp = QueuePair(some("ibv_create_qp", unsafe { verbs::ibv_create_qp(domain.pd(), &mut init) })?);
        let mut psn = [0; 4];
        agree::random(&mut psn).map_err(agree::Error::Io)?;
        let own = Endpoint {
            gid: device.gid,
            // SAFETY: the queue pair has just been made, and lives in `qp`.
            qpn: unsafe { qp.0.as_ref().qp_num },
            psn: u32::from_le_bytes(psn) & 0xff_ffff,
            inbox: inbox.window().addr,
            rkey: inbox.window().rkey,
            depth: DEPTH,
            mtu: device.mtu,
        };
        let peer = agree::exchange(&stream, role, key, &own)?;
        if peer.depth != DEPTH || !(1..=5).contains(&peer.mtu) {
            return Err(agree::Error::Version.into());
        }
        let under_way = VecDeque::with_capacity(DEPTH as usize);
        let flow = Flow::default();
        let link = Link { qp, inbox, outbox, under_way, domain, id, flow, waits: false, peer, stream };
        link.start(&own)?;
        for _ in 0..DEPTH {
            link.receive()?;
        }
        agree::ready(&link.stream)?;
        probe(&link.stream).map_err(agree::Error::Io)?;
        Ok(link)
    }

    /// Takes the queue pair through its states: reset, initialised, ready to receive, ready to
    /// send.
    fn start(&self, own: &Endpoint) -> Result<(), Error> {
        // A request that gets no answer for 0.27 s (4.096 us times 2^16) is sent again, four
        // times; then the link is cut. A peer that posts no receive request has broken the
        // protocol, so it gets no retries.
        const TIMEOUT: u8 = 16;
        const RETRIES: u8 = 4;
        let device = &self.domain.device;
        // SAFETY: ibv_qp_attr is plain data, for which zero is valid.
        let mut attr: verbs::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = verbs::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = device.port;
        attr.qp_access_flags = verbs::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        self.modify(&mut attr, &[mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS])?;

        attr.qp_state = verbs::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = self.peer.mtu.min(own.mtu);
        attr.dest_qp_num = self.peer.qpn;
        attr.rq_psn = self.peer.psn & 0xff_ffff;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = device.port;
        attr.ah_attr.grh.dgid.raw = self.peer.gid;
        attr.ah_attr.grh.sgid_index = device.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        let to_receive = [
            mask::IBV_QP_AV,
            mask::IBV_QP_PATH_MTU,
            mask::IBV_QP_DEST_QPN,
            mask::IBV_QP_RQ_PSN,
            mask::IBV_QP_MAX_DEST_RD_ATOMIC,
            mask::IBV_QP_MIN_RNR_TIMER,
        ];
        self.modify(&mut attr, &to_receive)?;

        attr.qp_state = verbs::ibv_qp_state::IBV_QPS_RTS;
        attr.timeout = TIMEOUT;
        attr.retry_cnt = RETRIES;
        attr.sq_psn = own.psn;
        let to_send = [
            mask::IBV_QP_TIMEOUT,
            mask::IBV_QP_RETRY_CNT,
            mask::IBV_QP_RNR_RETRY,
            mask::IBV_QP_SQ_PSN,
            mask::IBV_QP_MAX_QP_RD_ATOMIC,
        ];
        self.modify(&mut attr, &to_send)
    }

    fn modify(&self, attr: &mut verbs::ibv_qp_attr, what: &[mask]) -> Result<(), Error> {
        let what = what.iter().fold(mask::IBV_QP_STATE.0, |all, one| all | one.0);
        // SAFETY: the queue pair is live as long as `self`, and `attr` is a live structure.
        done("ibv_modify_qp", unsafe { verbs::ibv_modify_qp(self.qp.0.as_ptr(), attr, what as i32) })
    }

    /// Registers part of `mapping` for this peer alone.
    pub fn register(&self, mapping: &Rc<Mapping>, range: Range<usize>, access: Access) -> Result<Region, Error> {
        Region::new(&self.domain, mapping, range, access)
    }

    /// Posts a receive request: room for one more message.
    fn receive(&self) -> Result<(), Error> {
        // SAFETY: ibv_recv_wr is plain data, for which zero is valid. It needs no buffer, because
        // the peer's write names its own place.
        let mut request: verbs::ibv_recv_wr = unsafe { std::mem::zeroed() };
        request.wr_id = self.name(RECEIVE);
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live as long as `self`, and the call copies the request.
        done("ibv_post_recv", unsafe { verbs::ibv_post_recv(self.qp.0.as_ptr(), &mut request, &mut bad) })
    }

    fn name(&self, what: u32) -> u64 {
        u64::from(self.id) << 32 | u64::from(what)
    }

    /// Posts a write, if any, and a message that announces the write. The peer sees the message
    /// only after the whole write.
    pub fn post(&mut self, body: &Body, transfer: Option<Transfer>) -> Result<(), Refused> {
        if let Some(t) = &transfer {
            let (from, to) = (&t.from, t.at.checked_add(t.from.len()));
            if from.is_empty() || from.end > t.region.size() || to.is_none_or(|end| end > t.to.len as usize) {
                return Err(Refused::Range);
            }
        }
        // An all-zero body marks a message that only returns credits.
        if *body == [0; 7] {
            return Err(Refused::Range);
        }
        if !self.flow.may_send() {
            self.waits = true;
            return Err(Refused::Full);
        }
        self.submit(body, transfer)
    }

    /// Sends a message that returns credits, if the peer may be waiting for them.
    pub(crate) fn settle(&mut self) -> Result<(), Refused> {
        if self.flow.owes() {
            self.submit(&[0; 7], None)
        } else {
            Ok(())
        }
    }

    fn submit(&mut self, body: &Body, transfer: Option<Transfer>) -> Result<(), Refused> {
        let (number, returned) = self.flow.send();
        let place = (number % DEPTH) as usize * MESSAGE;
        // SAFETY: the place is within the outbox and aligned. The flow control says that no send
        // reads it now, and the peer cannot write there.
        unsafe {
            let to = self.outbox.start().add(place).cast::<u64>();
            to.write(u64::from(number) | u64::from(returned) << 32);
            to.add(1).cast::<Body>().write(*body);
        }
        let part = |region: &Region, from: Range<usize>| verbs::ibv_sge {
            addr: region.start() as u64 + from.start as u64,
            length: from.len() as u32,
            lkey: region.lkey(),
        };
        let mut of_message = part(&self.outbox, place..place + MESSAGE);
        let mut message = request(&mut of_message, self.peer.inbox + place as u64, self.peer.rkey);
        message.wr_id = self.name(SEND);
        message.opcode = verbs::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
        message.send_flags = verbs::ibv_send_flags::IBV_SEND_SIGNALED.0;
        message.imm_data_invalidated_rkey_union.imm_data = number.to_be();
        let mut first = &mut message as *mut verbs::ibv_send_wr;
        let (mut of_write, mut write);
        if let Some(t) = &transfer {
            of_write = part(t.region, t.from.clone());
            write = request(&mut of_write, t.to.addr.wrapping_add(t.at as u64), t.to.rkey);
            write.wr_id = self.name(WRITE);
            write.opcode = verbs::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            write.next = first;
            first = &mut write;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live, and by the flow control it has room for both requests.
        // The call copies the requests, and `under_way` holds the memory that they read from.
        let posted = unsafe { verbs::ibv_post_send(self.qp.0.as_ptr(), first, &mut bad) };
        self.under_way.push_back(transfer.map(|t| t.region.clone()));
        if posted == 0 {
            Ok(())
        } else {
            Err(Refused::Failed)
        }
    }

    /// The oldest message has left.
    pub(crate) fn sent(&mut self) {
        self.flow.complete();
        self.under_way.pop_front();
    }

    /// Handles a message that has arrived with this immediate value. `None`: it only returned
    /// credits.
    pub(crate) fn arrived(&mut self, immediate: u32) -> Result<Option<Body>, Down> {
        let place = (self.flow.expected() % DEPTH) as usize * WORDS;
        // The peer can write there at any time, so read each word once, and check it afterwards.
        let word = |i: usize| {
            // SAFETY: the word is within the inbox and aligned, and an AtomicU64 allows concurrent
            // writes.
            unsafe { &*self.inbox.start().cast::<AtomicU64>().add(place + i) }.load(Ordering::Acquire)
        };
        let first = word(0);
        let body: Body = std::array::from_fn(|i| word(1 + i));
        // A peer that sends more than it may overwrites unread messages. It harms only its own
        // messages.
        if u32::from_be(immediate) != first as u32 {
            return Err(Down::Hostile);
        }
        self.flow.receive(first as u32, (first >> 32) as u32).map_err(|_| Down::Hostile)?;
        // Post the receive request before the credit for it is returned.
        self.receive().map_err(|_| Down::Failed(-1))?;
        Ok((body != [0; 7]).then_some(body))
    }
}

fn request(part: &mut verbs::ibv_sge, addr: u64, rkey: u32) -> verbs::ibv_send_wr {
    // SAFETY: ibv_send_wr is plain data, for which zero is valid.
    let mut request: verbs::ibv_send_wr = unsafe { std::mem::zeroed() };
    request.sg_list = part;
    request.num_sge = 1;
    request.wr.rdma = verbs::rdma_t { remote_addr: addr, rkey };
    request
}

/// Allocates the memory for inbox and outbox.
fn boxes() -> Result<Rc<Mapping>, Error> {
    use rustix::fs::{fcntl_add_seals, ftruncate, memfd_create, MemfdFlags, SealFlags};
    let failed = |e: rustix::io::Errno| Error::Verbs("memfd_create", e.into());
    let fd = memfd_create("fastsocket-rdma", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
    ftruncate(&fd, 2 * BOX as u64).map_err(failed)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
    Mapping::new(fd, 2 * BOX)
}

/// Sets keepalive probes, so that an idle link learns within 4 s that the peer's host is gone.
fn probe(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    use std::time::Duration;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    stream.set_nonblocking(true)
}
