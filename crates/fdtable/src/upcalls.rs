//! What the lower layers need of the higher ones: one table of functions, set at the start.
//!
//! A lower layer never names a higher one. Where something below must make the layers above act (a
//! message of the monitor's, the last reference to a description, readiness that somebody watches), it
//! calls through this table. Before the start, and in unit tests, nothing happens.

use crate::table::Desc;
use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_proto::Message;

/// See the module's description.
pub struct Upcalls {
    /// A message of the monitor's that was not an answer. True: its descriptor was kept.
    pub message: fn(Message, Option<i32>) -> bool,
    /// Does what messages have left to do where nothing is locked.
    pub settle: fn(),
    /// The monitor has died. True: another one is to be looked for.
    pub monitor_died: fn() -> bool,
    /// Another monitor has greeted: what this process shares is announced to it. False: it cannot be.
    pub announce: fn() -> bool,
    /// It is this process's monitor now.
    pub monitor_found: fn(),
    /// Does this process share no memory with a peer?
    pub shares_nothing: fn() -> bool,
    /// The last reference to a description is gone: what it is ends.
    pub last_reference: fn(&'static Desc),
    /// Everything becomes the kernel's: nobody can tell what the program does below us.
    pub leave_everything: fn(),
    /// The kernel is about to use what is behind this number where we cannot follow.
    pub used_below: fn(i32, Reason),
    /// A connection that has become the kernel's may come back: what its number is from then on, and where its
    /// watchers go. None: it stays the kernel's.
    pub kernel_for_now: fn(&'static Desc) -> Option<&'static Desc>,
    /// So do the connections, which these epoll instances of the kernel's watch.
    pub leave_to_instances: fn(&[i32]),
    /// The kernel has accepted a connection. `addr` and `len`: what the caller of `accept` was told, or null.
    ///
    /// # Safety
    /// `addr` is null or readable for what `len` says.
    pub accepted: unsafe fn(fd: i32, addr: *const libc::sockaddr, len: *const u32),
    pub watcher: Watcher,
}

/// What epoll instances must hear of the descriptions that they watch.
pub struct Watcher {
    /// Something changed on our own side.
    pub changed: fn(&Desc),
    /// The kernel end of a connection, this descriptor, is watched beside its ring.
    pub also_kernel: fn(&Desc, i32),
    /// A connection is the kernel's. With the descriptor under which its kernel end was watched.
    pub migrated_to_kernel: fn(&Desc, Option<i32>),
    /// A descriptor turned out to be the kernel's, where it is registered already.
    pub leave_to_kernel: fn(&Desc),
    pub became_conn: fn(&Desc),
    pub became_listener: fn(&Desc),
    /// The listener with this number got another channel.
    pub listener_changed: fn(u64),
    /// Is this instance readable, as `poll` sees it?
    pub readable: fn(&Desc) -> bool,
    /// A thread that slept in the instance with this index will not come back: `plain`, `inside`.
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
    kernel_for_now: |_| None,
    leave_to_instances: |_| {},
    accepted: |_, _, _| {},
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

/// Once, at the start.
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
