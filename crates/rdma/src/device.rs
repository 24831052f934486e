//! The device that has an address of this host, and its completion queue.

use crate::flow::{DEPTH, MAX_LINKS, QUEUE};
use crate::Error;
use rdma_mummy_sys as verbs;
use rustix::fd::BorrowedFd;
use rustix::fs::{fcntl_getfl, fcntl_setfl, OFlags};
use std::io;
use std::net::IpAddr;
use std::ptr::{self, NonNull};
use std::rc::Rc;

fn failed(what: &'static str) -> Error {
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Error::NotSupported,
        e => Error::Verbs(what, e),
    }
}

/// From a call of the verbs that returns null for an error.
pub(crate) fn some<T>(what: &'static str, pointer: *mut T) -> Result<NonNull<T>, Error> {
    NonNull::new(pointer).ok_or_else(|| failed(what))
}

/// From one that returns an errno.
pub(crate) fn done(what: &'static str, errno: i32) -> Result<(), Error> {
    match errno {
        0 => Ok(()),
        e => Err(Error::Verbs(what, io::Error::from_raw_os_error(e.abs()))),
    }
}

struct Context(NonNull<verbs::ibv_context>);
impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened in `find`; everything made from it holds the device, and is gone.
        unsafe { verbs::ibv_close_device(self.0.as_ptr()) };
    }
}
struct Channel(NonNull<verbs::ibv_comp_channel>);
impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made in `open`; the queue that uses it is a field before this one.
        unsafe { verbs::ibv_destroy_comp_channel(self.0.as_ptr()) };
    }
}
struct Queue(NonNull<verbs::ibv_cq>);
impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: made in `open`; queue pairs that use it hold the device, and are gone.
        unsafe { verbs::ibv_destroy_cq(self.0.as_ptr()) };
    }
}

/// An open device. Fields are dropped in their order.
pub(crate) struct Device {
    queue: Queue,
    channel: Channel,
    context: Context,
    pub port: u8,
    pub gid: [u8; 16],
    pub gid_index: u8,
    pub mtu: u32,
}

impl Device {
    /// The device one of whose RoCE v2 addresses is `addr`.
    pub fn open(addr: IpAddr) -> Result<Rc<Device>, Error> {
        let gid = match addr {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let mut count = 0;
        // SAFETY: an out parameter; the list is freed below.
        let list = some("ibv_get_device_list", unsafe { verbs::ibv_get_device_list(&mut count) })?;
        let found = (0..count.max(0) as usize).find_map(|i| {
            // SAFETY: the list has `count` entries, which live until it is freed.
            find(unsafe { *list.as_ptr().add(i) }, &gid)
        });
        // SAFETY: from above; a context that was opened does not need the list.
        unsafe { verbs::ibv_free_device_list(list.as_ptr()) };
        let (context, port, gid_index) = found.ok_or(Error::NoDevice(addr))?;
        let raw = context.0.as_ptr();
        // SAFETY: plain data, for which zero is valid.
        let mut attr: verbs::ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context and an out parameter.
        done("ibv_query_port", unsafe { verbs::ibv_query_port(raw, port, &mut attr) })?;
        // SAFETY: a live context.
        let channel = Channel(some("ibv_create_comp_channel", unsafe { verbs::ibv_create_comp_channel(raw) })?);
        // Room for everything that all queue pairs can have under way: a queue that overflows breaks them all.
        let entries = MAX_LINKS * (QUEUE + DEPTH);
        // SAFETY: a live context and channel.
        let queue = unsafe { verbs::ibv_create_cq(raw, entries as i32, ptr::null_mut(), channel.0.as_ptr(), 0) };
        let queue = Queue(some("ibv_create_cq", queue)?);
        let device = Device { queue, channel, context, port, gid, gid_index, mtu: attr.active_mtu };
        for fd in [device.completions(), device.asynchronous()] {
            let flags = fcntl_getfl(fd).map_err(|e| Error::Verbs("fcntl", e.into()))?;
            fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(|e| Error::Verbs("fcntl", e.into()))?;
        }
        device.arm()?;
        Ok(Rc::new(device))
    }

    pub fn queue(&self) -> *mut verbs::ibv_cq {
        self.queue.0.as_ptr()
    }

    pub fn context(&self) -> *mut verbs::ibv_context {
        self.context.0.as_ptr()
    }

    /// Readable: there was a completion since [`Device::arm`].
    pub fn completions(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's, open while `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.channel.0.as_ref().fd) }
    }

    /// Readable: [`Device::port_failed`] has something to say.
    pub fn asynchronous(&self) -> BorrowedFd<'_> {
        // SAFETY: the context's, open while `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.context.0.as_ref().async_fd) }
    }

    /// From now on a completion makes the descriptor readable. Look for completions after this, not before.
    pub fn arm(&self) -> Result<(), Error> {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        let mut events = 0;
        // SAFETY: a live channel, out parameters; the descriptor does not block.
        while unsafe { verbs::ibv_get_cq_event(self.channel.0.as_ptr(), &mut queue, &mut context) } == 0 {
            events += 1;
        }
        // SAFETY: the only queue of this channel.
        unsafe { verbs::ibv_ack_cq_events(self.queue(), events) };
        // SAFETY: a live queue.
        done("ibv_req_notify_cq", unsafe { verbs::ibv_req_notify_cq(self.queue(), 0) })
    }

    /// Completions, as many as fit.
    pub fn poll<'a>(&self, to: &'a mut [verbs::ibv_wc]) -> Result<&'a [verbs::ibv_wc], Error> {
        // SAFETY: a live queue, and room for as many as is said.
        let n = unsafe { verbs::ibv_poll_cq(self.queue(), to.len() as i32, to.as_mut_ptr()) };
        if n < 0 {
            return Err(Error::Verbs("ibv_poll_cq", io::Error::from_raw_os_error(libc::EIO)));
        }
        Ok(&to[..n as usize])
    }

    /// Has the port gone down, or the device away, since the last call?
    pub fn port_failed(&self) -> bool {
        let mut failed = false;
        loop {
            let mut event = std::mem::MaybeUninit::<verbs::ibv_async_event>::zeroed();
            // SAFETY: a live context and an out parameter; the descriptor does not block.
            if unsafe { verbs::ibv_get_async_event(self.context(), event.as_mut_ptr()) } != 0 {
                return failed;
            }
            // Read as a number: the kernel may know events that the enumeration does not.
            // SAFETY: in the event, which the call has filled in.
            let kind = unsafe { ptr::addr_of!((*event.as_ptr()).event_type).cast::<u32>().read() };
            failed |= kind == verbs::ibv_event_type::IBV_EVENT_PORT_ERR as u32
                || kind == verbs::ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32
                || kind == verbs::ibv_event_type::IBV_EVENT_CQ_ERR as u32;
            // SAFETY: from the call above, once.
            unsafe { verbs::ibv_ack_async_event(event.as_mut_ptr()) };
        }
    }
}

/// Opens `device` if it has the address: context, port, index.
fn find(device: *mut verbs::ibv_device, gid: &[u8; 16]) -> Option<(Context, u8, u8)> {
    const ROCE_V2: u32 = 2;
    // SAFETY: an entry of the list of devices.
    let context = Context(NonNull::new(unsafe { verbs::ibv_open_device(device) })?);
    // SAFETY: plain data, for which zero is valid.
    let mut entries: [verbs::ibv_gid_entry; 128] = unsafe { std::mem::zeroed() };
    // SAFETY: a live context, and room for as many as is said.
    let n = unsafe { verbs::ibv_query_gid_table(context.0.as_ptr(), entries.as_mut_ptr(), entries.len(), 0) };
    let entry = entries.iter().take(n.max(0) as usize).find(|entry| {
        // SAFETY: 16 bytes either way.
        entry.gid_type == ROCE_V2 && unsafe { entry.gid.raw } == *gid
    })?;
    Some((context, entry.port_num.try_into().ok()?, entry.gid_index.try_into().ok()?))
}

/// What one link's keys are for.
pub(crate) struct Domain {
    pd: NonNull<verbs::ibv_pd>,
    pub device: Rc<Device>,
}

impl Domain {
    pub fn new(device: &Rc<Device>) -> Result<Rc<Domain>, Error> {
        // SAFETY: a live context.
        let pd = some("ibv_alloc_pd", unsafe { verbs::ibv_alloc_pd(device.context()) })?;
        Ok(Rc::new(Domain { pd, device: device.clone() }))
    }

    pub fn pd(&self) -> *mut verbs::ibv_pd {
        self.pd.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made in `new`; regions and queue pairs hold it, and are gone.
        unsafe { verbs::ibv_dealloc_pd(self.pd.as_ptr()) };
    }
}
