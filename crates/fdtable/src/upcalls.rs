//! Functions of higher layers that lower layers call: one table, which is set at the start.
//!
//! A lower layer never names a higher one. If a lower layer must make a higher one act, it calls
//! a function of this table: for a message of the monitor, the last reference to a description,
//! or changed readiness. Before the start, and in unit tests, these functions do nothing.

use crate::table::Desc;
use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_proto::Message;

/// See the module's description.
pub struct Upcalls {
    /// Handles a message of the monitor that this process has not asked for. True: the function
    /// keeps the message's descriptor.
    pub message: fn(Message, Option<i32>) -> bool,
    /// Does the work that messages have left for later. The caller holds no lock.
    pub settle: fn(),
    /// Handles the death of the monitor. True: the process looks for another monitor.
    pub monitor_died: fn() -> bool,
    /// Another monitor has greeted: announces to it what this process shares. False: this is
    /// impossible.
    pub announce: fn() -> bool,
    /// The monitor that `announce` has served is this process's monitor now.
    pub monitor_found: fn(),
    /// Does this process share no memory with a peer?
    pub shares_nothing: fn() -> bool,
    /// The last reference to a description is gone: ends its object.
    pub last_reference: fn(&'static Desc),
    /// Moves all connections to the kernel, because the program does something without the hooks
    /// that the library cannot follow.
    pub leave_everything: fn(),
    /// The program is about to use the file behind this descriptor in a way that the library
    /// cannot follow.
    pub used_below: fn(i32, Reason),
    /// A connection has moved to the kernel and may come back. Returns the description that its
    /// descriptor has from then on, to which its watchers move. None: it does not come back. The
    /// second argument is the descriptor under which its kernel end was watched.
    pub kernel_for_now: fn(&'static Desc, Option<i32>) -> Option<&'static Desc>,
    /// Moves the connections to the kernel that these epoll instances watch. The library does not
    /// track the instances.
    pub leave_to_instances: fn(&[i32]),
    /// The kernel has accepted a connection. `addr` and `len`: the results of the caller's `accept`, or null.
    ///
    /// # Safety
    /// `addr` is null or readable for `*len` bytes.
    pub accepted: unsafe fn(fd: i32, addr: *const libc::sockaddr, len: *const u32),
    /// How long the calling thread may sleep while connections wait in the queues of other
    /// workers, nanoseconds. None: without limit.
    pub sleep_limit: fn() -> Option<u64>,
    pub watcher: Watcher,
}

/// Functions that tell epoll instances about changes of the descriptions that they watch.
pub struct Watcher {
    /// This side of the connection has changed.
    pub changed: fn(&Desc),
    /// The kernel end of a connection, with this descriptor, is watched beside its ring.
    pub also_kernel: fn(&Desc, i32),
    /// The connection has moved to the kernel. The second argument is the descriptor under which
    /// its kernel end was watched.
    pub migrated_to_kernel: fn(&Desc, Option<i32>),
    /// A descriptor stays with the kernel, whose epoll instances watch it already.
    pub leave_to_kernel: fn(&Desc),
    pub became_conn: fn(&Desc),
    pub became_listener: fn(&Desc),
    /// The listener with this number got another channel.
    pub listener_changed: fn(u64),
    /// Is this instance readable, as `poll` sees it?
    pub readable: fn(&Desc) -> bool,
    /// A thread that slept in the instance with this index will not return. Arguments: index,
    /// `plain`, `inside`.
    pub sleep_abandoned: fn(u32, bool, bool),
}

static NONE: Upcalls = Upcalls {
    message: |_, _| false,
    settle: || {},
    monitor_died: || false,
    announce: || false,
    monitor_found: || {},
    shares_nothing: || true,
    last_reference: |_| {},
    leave_everything: || {},
    used_below: |_, _| {},
    kernel_for_now: |_, _| None,
    leave_to_instances: |_| {},
    accepted: |_, _, _| {},
    sleep_limit: || None,
    watcher: Watcher {
        changed: |_| {},
        also_kernel: |_, _| {},
        migrated_to_kernel: |_, _| {},
        leave_to_kernel: |_| {},
        became_conn: |_| {},
        became_listener: |_| {},
        listener_changed: |_| {},
        readable: |_| false,
        sleep_abandoned: |_, _, _| {},
    },
};

#[link_section = ".data.fsocket_start"]
static NOW: AtomicPtr<Upcalls> = AtomicPtr::new((&raw const NONE).cast_mut());

/// Called once, at the start.
pub fn connect(table: &'static Upcalls) {
    NOW.store(core::ptr::from_ref(table).cast_mut(), Ordering::Release);
}

#[inline]
pub fn upcalls() -> &'static Upcalls {
    // SAFETY: only references to statics are stored.
    unsafe { &*NOW.load(Ordering::Acquire) }
}

#[inline]
pub fn watcher() -> &'static Watcher {
    &upcalls().watcher
}
