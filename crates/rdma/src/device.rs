//! The RDMA device with an address of this host, and the device's completion queue.

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

/// The result of a verbs call that returns null for an error.
pub(crate) fn some<T>(what: &'static str, pointer: *mut T) -> Result<NonNull<T>, Error> {
    NonNull::new(pointer).ok_or_else(|| failed(what))
}

/// The result of a verbs call that returns an errno.
pub(crate) fn done(what: &'static str, errno: i32) -> Result<(), Error> {
    match errno {
        0 => Ok(()),
        e => Err(Error::Verbs(what, io::Error::from_raw_os_error(e.abs()))),
    }
}

struct Context(NonNull<verbs::ibv_context>);
impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: `find` opened the context. Objects made from the context hold the device, so
        // none is left now.
        unsafe { verbs::ibv_close_device(self.0.as_ptr()) };
    }
}
struct Channel(NonNull<verbs::ibv_comp_channel>);
impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: `open` made the channel. The queue that uses it is an earlier field of `Device`,
        // so it is destroyed already.
        unsafe { verbs::ibv_destroy_comp_channel(self.0.as_ptr()) };
    }
}
struct Queue(NonNull<verbs::ibv_cq>);
impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: `open` made the queue. Queue pairs that use it hold the device, so none is left.
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
    /// Opens the device that has the RoCE v2 address `addr`.
    pub fn open(addr: IpAddr) -> Result<Rc<Device>, Error> {
        let gid = match addr {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let mut count = 0;
        // SAFETY: `count` is a live out parameter. The list is freed below.
        let list = some("ibv_get_device_list", unsafe { verbs::ibv_get_device_list(&mut count) })?;
        let found = (0..count.max(0) as usize).find_map(|i| {
            // SAFETY: the list has `count` entries, which are valid until it is freed, and `i` is
            // below `count`.
            find(unsafe { *list.as_ptr().add(i) }, &gid)
        });
        // SAFETY: the list comes from `ibv_get_device_list`, and is freed once. An opened context
        // does not need it.
        unsafe { verbs::ibv_free_device_list(list.as_ptr()) };
        let (context, port, gid_index) = found.ok_or(Error::NoDevice(addr))?;
        let raw = context.0.as_ptr();
        // SAFETY: ibv_port_attr is plain data, for which zero is valid.
        let mut attr: verbs::ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: `raw` is an open context, and `attr` is a live out parameter.
        done("ibv_query_port", unsafe { verbs::ibv_query_port(raw, port, &mut attr) })?;
        // SAFETY: `raw` is an open context.
        let channel = Channel(some("ibv_create_comp_channel", unsafe { verbs::ibv_create_comp_channel(raw) })?);
        // Room for all requests that all queue pairs can have in flight, because an overflow would
        // break all of them.
        let entries = MAX_LINKS * (QUEUE + DEPTH);
        // SAFETY: `raw` is an open context, and `channel` belongs to it.
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

    /// Becomes readable when a completion arrives after [`Device::arm`].
    pub fn completions(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the channel, which is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.channel.0.as_ref().fd) }
    }

    /// Becomes readable when [`Device::port_failed`] has an event to handle.
    pub fn asynchronous(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context, which is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.context.0.as_ref().async_fd) }
    }

    /// Makes the next completion signal the descriptor. Poll for completions after this call,
    /// because earlier ones do not signal.
    pub fn arm(&self) -> Result<(), Error> {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        let mut events = 0;
        // SAFETY: the channel is open, and the out parameters are live. The descriptor is
        // non-blocking, so the call returns.
        while unsafe { verbs::ibv_get_cq_event(self.channel.0.as_ptr(), &mut queue, &mut context) } == 0 {
            events += 1;
        }
        // SAFETY: all counted events are of this queue, because the channel has no other.
        unsafe { verbs::ibv_ack_cq_events(self.queue(), events) };
        // SAFETY: the queue lives as long as `self`.
        done("ibv_req_notify_cq", unsafe { verbs::ibv_req_notify_cq(self.queue(), 0) })
    }

    /// Returns as many completions as there are and as fit into `to`.
    pub fn poll<'a>(&self, to: &'a mut [verbs::ibv_wc]) -> Result<&'a [verbs::ibv_wc], Error> {
        // SAFETY: the queue lives as long as `self`, and `to` has room for `to.len()` completions.
        let n = unsafe { verbs::ibv_poll_cq(self.queue(), to.len() as i32, to.as_mut_ptr()) };
        if n < 0 {
            return Err(Error::Verbs("ibv_poll_cq", io::Error::from_raw_os_error(libc::EIO)));
        }
        Ok(&to[..n as usize])
    }

    /// Whether the port went down or the device disappeared since the last call.
    pub fn port_failed(&self) -> bool {
        let mut failed = false;
        loop {
            let mut event = std::mem::MaybeUninit::<verbs::ibv_async_event>::zeroed();
            // SAFETY: the context is open, and `event` is a live out parameter. The descriptor is
            // non-blocking, so the call returns.
            if unsafe { verbs::ibv_get_async_event(self.context(), event.as_mut_ptr()) } != 0 {
                return failed;
            }
            // The kind is read as a number, because the kernel may have events that the
            // enumeration lacks.
            // SAFETY: the call has filled the event, and the field is a 32-bit number.
            let kind = unsafe { ptr::addr_of!((*event.as_ptr()).event_type).cast::<u32>().read() };
            failed |= kind == verbs::ibv_event_type::IBV_EVENT_PORT_ERR as u32
                || kind == verbs::ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32
                || kind == verbs::ibv_event_type::IBV_EVENT_CQ_ERR as u32;
            // SAFETY: the call has returned this event, which is acknowledged once.
            unsafe { verbs::ibv_ack_async_event(event.as_mut_ptr()) };
        }
    }
}

/// Opens `device` if it has the address. Returns context, port, and index of the address.
fn find(device: *mut verbs::ibv_device, gid: &[u8; 16]) -> Option<(Context, u8, u8)> {
    const ROCE_V2: u32 = 2;
    // SAFETY: `device` is an entry of the list of devices, which is not freed yet.
    let context = Context(NonNull::new(unsafe { verbs::ibv_open_device(device) })?);
    // SAFETY: ibv_gid_entry is plain data, for which zero is valid.
    let mut entries: [verbs::ibv_gid_entry; 128] = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open, and `entries` has room for the passed number of entries.
    let n = unsafe { verbs::ibv_query_gid_table(context.0.as_ptr(), entries.as_mut_ptr(), entries.len(), 0) };
    let entry = entries.iter().take(n.max(0) as usize).find(|entry| {
        // SAFETY: both members of the union are 16 bytes of plain data.
        entry.gid_type == ROCE_V2 && unsafe { entry.gid.raw } == *gid
    })?;
    Some((context, entry.port_num.try_into().ok()?, entry.gid_index.try_into().ok()?))
}

/// A protection domain: the memory keys of a link are valid in this domain only.
pub(crate) struct Domain {
    pd: NonNull<verbs::ibv_pd>,
    pub device: Rc<Device>,
}

impl Domain {
    pub fn new(device: &Rc<Device>) -> Result<Rc<Domain>, Error> {
        // SAFETY: the context is open as long as `device` lives.
        let pd = some("ibv_alloc_pd", unsafe { verbs::ibv_alloc_pd(device.context()) })?;
        Ok(Rc::new(Domain { pd, device: device.clone() }))
    }

    pub fn pd(&self) -> *mut verbs::ibv_pd {
        self.pd.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: `new` made the domain. Regions and queue pairs hold the domain, so none is left.
        unsafe { verbs::ibv_dealloc_pd(self.pd.as_ptr()) };
    }
}
