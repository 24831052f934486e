//! Kernel connections that go over to shared memory while they are in use.
//!
//! A connection between two programs with the library can start in the kernel: one of them
//! had no monitor yet, the client was bound, the queue was full. After some calls each side
//! tells the monitor of its end; the one that has opened it asks for a slot to be
//! connected with the other end. Both go over at one moment at which the
//! stream is at rest in both directions: nothing is on its way, nothing waits to be
//! read, no thread is inside a call on it. So there is nothing to be put in order,
//! and no byte that could be lost. The slot's state decides:
//!
//! OFFERED (opener: its end is at rest, and these bytes have passed) -> TAKEN (accepter: mine, too,
//! and the same; from here on it sends nothing) -> ESTABLISHED (opener) or REFUSED, by either.
//!
//! ([`fsocket_sync::handover`], model-checked.) The kernel connection stays behind the descriptors as
//! their placeholder. Calls on such a connection are counted in `Desc::using` until it is decided;
//! whoever comes while it is decided waits for that.

use crate::establish::{establish, prepare_slot, End};
use crate::mailbox::Mailbox;
use crate::signals::Held;
use crate::table::{self, kind, Desc, DESCS};
use crate::values;
use crate::wait::{self, Sleeper};
use crate::{chan, ctl, epoll, heartbeat, name, process, registry, route, socks, stats, strangers, waker};
use core::sync::atomic::{fence, AtomicU32, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{slot_state, CLIENT, SERVER, SLOTS};
use fsocket_proto::{kind as msg, Addr, Msg};
use fsocket_sync::handover::{self, Entry, Steps};
use fsocket_sys::{self as sys, Errno, Result};

/// Calls before the first try; each further one waits four times as long.
const CALLS: u32 = 32;
const TRIES: u32 = 6;
#[link_section = ".data.fsocket_start"]
static FIRST: AtomicU32 = AtomicU32::new(CALLS);

/// How long the opener waits for the other side, nanoseconds: one that sleeps in us, or is in
/// the middle of its calls, is there sooner.
const OFFER_NS: u64 = 2_000_000;
/// The same between network namespaces: what is gained is more.
const ACROSS_NS: u64 = 10_000_000;
/// How long the accepter waits for the opener, which waits for it.
const ANSWER_NS: u64 = 20_000_000;

/// Bumped when a connection went over: who has looked at kinds must look again.
static EPOCH: AtomicU32 = AtomicU32::new(0);

/// FASTSOCKET_UPGRADE: calls before the first try, 0: never.
pub fn init(calls: Option<u32>) {
    FIRST.store(calls.unwrap_or(CALLS), Ordering::Relaxed);
}

pub fn epoch() -> u32 {
    EPOCH.load(Ordering::Acquire)
}

fn wanted() -> bool {
    FIRST.load(Ordering::Relaxed) != 0 && process::enabled()
}

fn is_here(ip: &[u8; 16]) -> bool {
    let local = |r: &fsocket_proto::registry::Registry| {
        r.local.iter().take((r.locals as usize).min(r.local.len())).any(|l| l == ip)
    };
    name::is_loopback(ip) || registry::mapped().is_some_and(local)
}

fn begin(d: &Desc, side: usize) {
    d.side.store(side as u32, Ordering::Relaxed);
    d.using.reset();
    d.calls.store(0, Ordering::Relaxed);
    d.tries.store(0, Ordering::Relaxed);
    d.next_try.store(FIRST.load(Ordering::Relaxed), Ordering::Relaxed);
    d.across.store(false, Ordering::Relaxed);
    d.heard.store(false, Ordering::Relaxed);
    d.dirty.store(true, Ordering::Relaxed);
    d.kind.store(kind::KERNEL, Ordering::Release);
}

/// May connections to other network namespaces of this host go over?
fn reaches_across(ip: &[u8; 16], port: u16) -> bool {
    let recorded = registry::mapped().is_some_and(|r| route::volatile(&r.pairs) != 0);
    recorded && !name::is_loopback(ip) && !strangers::is_one(ip, port)
}

/// A socket connects to `dst` over the kernel. False: nobody there can ever share
/// memory with us, forget it.
pub fn connecting(d: &'static Desc, dst: &Addr) -> bool {
    let across = reaches_across(&dst.ip, dst.port);
    if !wanted() || !(across || is_here(&dst.ip)) {
        return false;
    }
    begin(d, CLIENT);
    d.across.store(across, Ordering::Relaxed);
    true
}

/// The kernel's `connect` of `d`, which was nothing yet, has failed with `error`. If the socket is
/// unconnected again, it is as it was before, and the next one is over shared memory if it can be:
/// a client that waits until its server is there.
#[cold]
pub fn failed(fd: i32, d: &Desc, error: &sys::errno::Saved) {
    // What an epoll instance watches it watches in the kernel.
    let ours = d.kind() == kind::KERNEL && !d.watched.load(Ordering::Relaxed);
    // Then the kernel has something to say yet.
    let says_more = [Errno::EINPROGRESS, Errno::EALREADY, Errno::EINTR, Errno::EISCONN];
    let pending = says_more.into_iter().any(|e| error.is(e));
    if ours && !pending && !crate::inspect::is_connected(fd) {
        d.kind.store(kind::FRESH, Ordering::Release);
    }
}

/// The kernel has accepted a connection; `addr` and `len` are what the caller of `accept`
/// was told, or null.
///
/// # Safety
/// `addr` is null or readable for what `len` says.
pub unsafe fn accepted(fd: i32, addr: *const libc::sockaddr, len: *const u32) {
    if !wanted() || fd <= table::STDIO {
        return;
    }
    let peer = if addr.is_null() || len.is_null() {
        peer_of(fd)
    } else {
        // SAFETY: the caller's; an address that did not fit is no address.
        unsafe { name::parse(addr, *len) }
    };
    let Some(peer) = peer else { return };
    let across = reaches_across(&peer.ip, 0);
    if !across && !is_here(&peer.ip) {
        return;
    }
    let Some(d) = table::alloc(kind::FRESH) else { return };
    d.family.store(peer.family as u32, Ordering::Relaxed);
    d.kernel_family.store(peer.family as u32, Ordering::Relaxed);
    begin(d, SERVER);
    d.across.store(across, Ordering::Relaxed);
    if !table::install(fd, d) {
        table::release(d);
    }
}

fn own_of(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let n = sys::getsockname(fd, &mut b).ok()?;
    // SAFETY: the buffer is as long as said.
    unsafe { name::parse(b.as_ptr() as *const libc::sockaddr, n as u32) }
}

fn peer_of(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let n = sys::getpeername(fd, &mut b).ok()?;
    // SAFETY: as above.
    unsafe { name::parse(b.as_ptr() as *const libc::sockaddr, n as u32) }
}

/// What a call wants.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Send,
    /// To receive without waiting.
    Look,
    /// To receive; it waits unless the socket is non-blocking.
    Receive,
}

/// How a call on a descriptor that was no connection of ours goes on.
pub enum Entered {
    /// It is one now.
    Ours,
    /// In the kernel; keep the value for as long.
    Kernel(Option<Using>),
    /// A signal has ended its wait.
    Interrupted,
}

/// A call of the kernel's on a connection that may go over.
pub struct Using(&'static Desc);

impl Drop for Using {
    fn drop(&mut self) {
        self.0.using.leave();
    }
}

/// Is it a kernel connection that may go over? If not, [`enter`] changes nothing.
#[inline(always)]
pub fn is_candidate(fd: i32) -> bool {
    table::lookup(fd).is_some_and(|d| d.kind() == kind::KERNEL)
}

/// Before a call on a descriptor.
#[inline(always)]
pub fn enter(fd: i32, call: Call) -> Entered {
    match table::lookup(fd) {
        Some(d) if d.kind() == kind::KERNEL => enter_counted(fd, d, call),
        _ => Entered::Kernel(None),
    }
}

#[cold]
fn enter_counted(fd: i32, d: &'static Desc, call: Call) -> Entered {
    if d.using.never() {
        return Entered::Kernel(None);
    }
    let weight = weight(d, call);
    let calls = d.calls.fetch_add(weight, Ordering::Relaxed) + weight;
    if calls >= d.next_try.load(Ordering::Relaxed) {
        consider(fd, d, call, calls);
    }
    let offered = d.side.load(Ordering::Relaxed) as usize == SERVER && d.tries.load(Ordering::Relaxed) > 0;
    if offered {
        ctl::poll();
        if call == Call::Receive && wait(fd, d) {
            return Entered::Interrupted;
        }
    }
    loop {
        if d.is_conn() {
            return Entered::Ours;
        }
        if d.kind() != kind::KERNEL {
            return if d.is_conn() { Entered::Ours } else { Entered::Kernel(None) };
        }
        match d.using.enter() {
            Entry::Never => return Entered::Kernel(None),
            Entry::Wait => sys::nanosleep(20_000),
            Entry::Counted => {
                let using = Using(d);
                // It may have gone over before we counted.
                return if d.is_conn() { Entered::Ours } else { Entered::Kernel(Some(using)) };
            }
        }
    }
}

/// As how many calls one counts. Between network namespaces each byte in the kernel is dear, so a
/// connection that is asked something again goes over soon: the third request, or the second answer, is
/// the first try. A connection for one request pays nothing.
fn weight(d: &Desc, call: Call) -> u32 {
    const TURN: u32 = CALLS / 2;
    if !d.across.load(Ordering::Relaxed) {
        return 1;
    }
    let receives = call != Call::Send;
    if d.heard.load(Ordering::Relaxed) == receives {
        return 1;
    }
    d.heard.store(receives, Ordering::Relaxed);
    if receives {
        1
    } else {
        TURN
    }
}

/// It is used in a way that the kernel alone can do, or by somebody else as well.
pub fn give_up(d: &Desc) {
    while d.kind() == kind::KERNEL && !d.using.forbid() {
        sys::nanosleep(20_000);
    }
}

/// The same for a number.
pub fn give_up_fd(fd: i32) {
    if let Some(d) = table::lookup(fd) {
        give_up(d);
    }
}

/// Others will have our descriptors.
pub fn give_up_all() {
    let ours = |d: &&Desc| d.kind() == kind::KERNEL && d.refs.load(Ordering::Relaxed) > 0;
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(ours).for_each(give_up);
}

/// Before a receive of the accepting side sleeps: in a way in which the other side can have it
/// over. True: a signal has ended the wait.
fn wait(fd: i32, d: &Desc) -> bool {
    let blocking = sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK == 0);
    let mut t = [0u8; 16];
    let limited = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &mut t).is_err() || t != [0; 16];
    let limited = limited || d.rcvtimeo.load(Ordering::Relaxed) != 0;
    if !blocking || limited {
        return false;
    }
    loop {
        let Some(mut sleeper) = Sleeper::new() else { return false };
        // The waker before the look; `went_over` does the reverse.
        fence(Ordering::SeqCst);
        let ours = d.kind() != kind::KERNEL || d.using.never();
        let mut p = [fd, -1, -1].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        let r = match ours {
            true => Ok(0),
            // SAFETY: no mask.
            false => unsafe { wait::sleep(&mut p, Some(&mut sleeper), None, core::ptr::null()) },
        };
        sleeper.end(|_| ());
        wait::heed(&p);
        if ours || p[0].revents != 0 || d.kind() != kind::KERNEL {
            return false;
        }
        if r == Err(Errno::EINTR) && !wait::restarts(false) {
            return true;
        }
    }
}

/// Enough calls have gone by for a try.
fn consider(fd: i32, d: &'static Desc, call: Call, calls: u32) {
    /// Who never sends is tried while it receives.
    const QUIET: u32 = 16;
    /// A look costs some system calls: so many calls of a stream that does not rest look.
    const LOOKS: u32 = 32;
    let opener = d.side.load(Ordering::Relaxed) as usize != SERVER;
    // Another thread may have tried meanwhile.
    let late = calls.saturating_sub(d.next_try.load(Ordering::Relaxed));
    // Before a request most connections are at rest; behind it the answer may be on its way.
    if opener && (call != Call::Send && late < QUIET || late < LOOKS && at_rest(fd).is_none()) {
        return;
    }
    let longer = if d.across.load(Ordering::Relaxed) { 2 } else { 4 };
    d.next_try.store(calls.saturating_mul(longer), Ordering::Relaxed);
    ctl::wanted();
    if ctl::dead() {
        return; // it may come
    }
    if d.tries.fetch_add(1, Ordering::Relaxed) >= TRIES || !process::enabled() {
        return give_up(d);
    }
    if lingers(fd) {
        return;
    }
    if !opener {
        let mut m = Msg::new(msg::OFFER);
        m.id = key(d);
        m.arg0 = d.across.load(Ordering::Relaxed).into();
        // With an answer: until the monitor has read it the message holds the socket, and a close
        // of the program's would not end the connection.
        if ctl::request(m, Some(fd)).err() == Some(Errno::EXDEV) {
            stranger(fd, d);
        }
        return;
    }
    // A handler that comes in between would wait for us.
    let _held = Held::all();
    if d.using.decide() {
        let r = open(fd, d);
        d.using.decided(r == Err(Errno::EXDEV));
    }
}

/// The other end of a connection that was accepted is on another host.
fn stranger(fd: i32, d: &Desc) {
    let (Some(me), Some(peer)) = (own_of(fd), peer_of(fd)) else { return };
    d.across.store(false, Ordering::Relaxed);
    if !usual(&peer, &me) {
        strangers::note(&peer.ip, 0);
        give_up(d);
    }
}

fn key(d: &Desc) -> u64 {
    (d.generation.load(Ordering::Relaxed) as u64) << 32 | d.index() as u64
}

fn unread(fd: i32) -> Option<i32> {
    let mut n = -1i32;
    let args = [fd as usize, libc::FIONREAD as usize, &mut n as *mut i32 as usize, 0, 0, 0];
    // SAFETY: the kernel writes an int.
    unsafe { sys::raw(libc::SYS_ioctl, args) }.ok()?;
    Some(n)
}

/// Would a close of it wait? The monitor then takes its time with the copy that it is shown,
/// and for so long a close by the program is not the last one.
fn lingers(fd: i32) -> bool {
    let mut v = [0u8; 8];
    let known = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut v).is_ok();
    known && v[..4] != [0; 4] && v[4..] != [0; 4]
}

/// Bytes of each direction, from the beginning of the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Counts {
    sent: u64,
    received: u64,
}

/// Connected, with nothing to read and nothing kept back, and nothing on it that changes
/// what bytes mean: what has passed. If the other side says the same, nothing is on its way. (What
/// is not acknowledged yet says little: the kernel waits with that for a chance to send.)
fn at_rest(fd: i32) -> Option<Counts> {
    const ESTABLISHED: u8 = 1;
    const TCP_ULP: i32 = 31;
    /// Offsets into `struct tcp_info` (linux/tcp.h), complete since 4.19.
    const BYTES_RECEIVED: usize = 128;
    const NOTSENT_BYTES: usize = 144;
    const BYTES_SENT: usize = 200;
    const BYTES_RETRANS: usize = 208;
    let mut info = [0u8; 224];
    if sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()? < info.len() {
        return None;
    }
    let int = |at: usize| info[at..].first_chunk().map_or(0, |b| u32::from_ne_bytes(*b));
    let long = |at: usize| info[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
    let mut ulp = [0u8; 16];
    let plain = sys::getsockopt(fd, libc::IPPROTO_TCP, TCP_ULP, &mut ulp).is_ok_and(|_| ulp[0] == 0);
    let zero = |name| {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).is_ok() && v == [0; 4]
    };
    let rest =
        info[0] == ESTABLISHED && int(NOTSENT_BYTES) == 0 && unread(fd) == Some(0) && plain && zero(libc::SO_ZEROCOPY);
    // What was sent twice is counted twice, and then once for that. (Too much of the first never makes two
    // counts equal while something is on its way; the connection stays where it is.)
    let sent = long(BYTES_SENT).wrapping_sub(long(BYTES_RETRANS));
    rest.then(|| Counts { sent, received: long(BYTES_RECEIVED) })
}

/// The addresses are those that a connection of ours would have.
fn usual(client: &Addr, server: &Addr) -> bool {
    client.port >= 1024 && name::source_for(&server.ip) == client.ip
}

/// The opening side. Calls are kept out.
fn open(fd: i32, d: &'static Desc) -> Result<()> {
    const NOT_NOW: Result<()> = Err(Errno::EAGAIN);
    let (Some(me), Some(dst)) = (own_of(fd), peer_of(fd)) else { return NOT_NOW };
    let Some(counts) = at_rest(fd) else { return NOT_NOW };
    let (chan, across) = whereto(fd, d, &me, &dst)?;
    let Some(sock) = socks::alloc_sock() else { return NOT_NOW };
    let slot = chan.client().and_then(|mut c| chan.take_slot(&mut c)).map(|(slot, _)| slot);
    let Some(slot) = slot else {
        socks::free_sock(sock);
        return NOT_NOW;
    };
    let s = chan.slot(slot);
    prepare_slot(chan, slot, &dst, me.port);
    // It has a new generation.
    let steps = steps(s.generation.load(Ordering::Relaxed));
    // Not used for anything else as long as the slot is not switched back.
    s.migrated[0].base.store(counts.sent, Ordering::Relaxed);
    s.migrated[0].limit.store(counts.received, Ordering::Relaxed);
    let mut m = Msg::new(msg::UPGRADE);
    m.id = chan.id.load(Ordering::Relaxed) as u64;
    m.arg0 = slot as u64;
    m.arg1 = s.generation.load(Ordering::Relaxed) as u64;
    m.arg2 = across.into();
    let mut asked = Ok(());
    let tell = || {
        asked = ctl::request(m, Some(fd)).map(drop);
        asked.is_ok()
    };
    let patience = if across { ACROSS_NS } else { OFFER_NS };
    let done = handover::open(&s.state, steps, &Patience(patience), tell, || at_rest(fd) == Some(counts));
    if !done {
        socks::free_sock(sock);
        if let Some(mut c) = chan.client() {
            chan.give_back(&mut c, slot);
        }
        return asked.and(NOT_NOW);
    }
    learn(fd, d);
    let family = d.family.load(Ordering::Relaxed) as u16;
    let (src, dst, client_port, server_port) = (me.ip, dst.ip, me.port, dst.port);
    establish(d, sock, &End { chan, slot, side: CLIENT, family, src, dst, client_port, server_port, across });
    if across {
        heartbeat::begin(fd);
    }
    went_over(d);
    Ok(())
}

/// The channel to the other side, and whether that may be in another network namespace. EXDEV: there is
/// and will be none.
fn whereto(fd: i32, d: &Desc, me: &Addr, dst: &Addr) -> Result<(&'static chan::Chan, bool)> {
    let usual = usual(me, dst);
    if let Some(c) = usual.then(|| route::find(dst, fd).ok()).flatten() {
        return Ok((c, false));
    }
    if !d.across.load(Ordering::Relaxed) {
        return Err(if usual { Errno::EAGAIN } else { Errno::EXDEV });
    }
    match route::meet(fd, 0) {
        Ok(c) => Ok((c, true)),
        Err(Errno::EXDEV) => {
            strangers::note(&dst.ip, dst.port);
            d.across.store(false, Ordering::Relaxed);
            Err(if usual { Errno::EAGAIN } else { Errno::EXDEV })
        }
        Err(Errno::EPERM) => {
            stats::count(Counter::FbOtherUser);
            Err(Errno::EXDEV)
        }
        Err(Errno::EACCES) => {
            stats::count(Counter::FbPolicy);
            Err(Errno::EXDEV)
        }
        Err(_) => Err(Errno::EAGAIN),
    }
}

/// Options and mode, which the program has set on the kernel's socket.
fn learn(fd: i32, d: &Desc) {
    values::adopt(fd, d);
    let nonblock = sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK != 0);
    d.nonblock.store(nonblock, Ordering::Relaxed);
    d.kernel_nonblock.store(nonblock, Ordering::Relaxed);
}

fn went_over(d: &'static Desc) {
    stats::count(Counter::PathUpgrade);
    epoll::became_conn(d);
    EPOCH.fetch_add(1, Ordering::AcqRel);
    fence(Ordering::SeqCst);
    waker::ring_sleepers();
}

/// The slot's states for this, with its generation.
fn steps(generation: u32) -> Steps {
    let of = |state| slot_state::of(state, generation);
    Steps {
        offered: of(slot_state::OFFERED),
        taken: of(slot_state::TAKEN),
        over: slot_state::ESTABLISHED,
        refused: of(slot_state::REFUSED),
    }
}

/// Sleeps for the other side, nanoseconds at most.
struct Patience(u64);

impl handover::Env for Patience {
    fn wait_while(&self, word: &AtomicU32, value: u32) {
        let until = sys::now_ns() + self.0;
        while word.load(Ordering::Acquire) == value {
            let left = until.saturating_sub(sys::now_ns());
            if left == 0 {
                return;
            }
            let _ = sys::futex_wait(word, value, Some(left));
        }
    }
    fn wake(&self, word: &AtomicU32) {
        sys::futex_wake(word, 1);
    }
}

/// Somebody has opened a connection that we have accepted, and wants it in shared memory.
#[derive(Clone, Copy)]
struct Asked {
    channel: u32,
    listener: u64,
    slot: usize,
    generation: u32,
    key: u64,
    /// The other end may be in another network namespace.
    across: bool,
    /// Memory of the channel.
    fd: i32,
}
static ASKED: Mailbox<Asked, 32> = Mailbox::new();

/// From the monitor. It may come in the middle of anything, so it is only noted. False: the
/// descriptor was not taken.
pub fn asked(m: &Msg, fd: i32) -> bool {
    let (slot, generation) = (m.arg1 as u32 as usize, (m.arg1 >> 32) as u32);
    let across = m.addr.v6only != 0;
    let a = Asked { channel: m.id as u32, listener: m.arg0, slot, generation, key: m.arg2, across, fd };
    let noted = ASKED.note(a);
    ctl::defer();
    noted
}

/// Where nothing is locked.
#[inline]
pub fn answer() {
    ASKED.answer(|a| {
        let _held = Held::all();
        take(&a);
        let _ = sys::close(a.fd);
    });
}

/// In a forked child: the parent answers.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ASKED.become_child(|a| {
        let _ = sys::close(a.fd);
    });
}

fn take(a: &Asked) {
    if a.slot >= SLOTS {
        return;
    }
    let known = chan::by_id(a.channel, SERVER);
    let c = known.or_else(|| {
        let c = chan::map(a.channel, a.listener, SERVER, a.fd)?;
        // It goes with its last connection, unless we come to work for the listener.
        c.retired.store(true, Ordering::Relaxed);
        Some(c)
    });
    let Some(c) = c else { return };
    if !accept(c, a) {
        handover::refuse(&c.slot(a.slot).state, steps(a.generation), &Patience(0));
        c.unmap_if_unused();
    }
}

/// The accepting side.
fn accept(c: &'static chan::Chan, a: &Asked) -> bool {
    let mine = |d: &&Desc| d.kind() == kind::KERNEL && key(d) == a.key && d.refs.load(Ordering::Relaxed) > 0;
    let Some(d) = DESCS.get(a.key as u32).filter(mine) else { return false };
    let Some(fd) = table::fd_of(d) else { return false };
    if !d.using.decide() {
        return false;
    }
    let done = accept_at_rest(c, a, fd, d);
    d.using.decided(false);
    done
}

fn accept_at_rest(c: &'static chan::Chan, a: &Asked, fd: i32, d: &'static Desc) -> bool {
    let (Some(me), Some(peer)) = (own_of(fd), peer_of(fd)) else { return false };
    let said = &c.slot(a.slot).migrated[0];
    let theirs = || Counts { sent: said.limit.load(Ordering::Relaxed), received: said.base.load(Ordering::Relaxed) };
    let across = a.across;
    if !(across || usual(&peer, &me)) || c.desc(a.slot).is_some() || at_rest(fd) != Some(theirs()) {
        return false;
    }
    let Some(sock) = socks::alloc_sock() else { return false };
    if !handover::take(&c.slot(a.slot).state, steps(a.generation), &Patience(ANSWER_NS)) {
        socks::free_sock(sock);
        return false;
    }
    learn(fd, d);
    let family = d.family.load(Ordering::Relaxed) as u16;
    let (src, dst, client_port, server_port) = (peer.ip, me.ip, peer.port, me.port);
    let e = End { chan: c, slot: a.slot, side: SERVER, family, src, dst, client_port, server_port, across };
    establish(d, sock, &e);
    went_over(d);
    true
}
