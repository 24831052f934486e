//! Entries of an io_uring submission queue, and the descriptors that they name.

/// Bytes of a `struct io_uring_sqe`. A large entry is twice as long.
pub const SIZE: usize = 64;

/// IOSQE_FIXED_FILE: the number is an index in the ring's own table of files.
const FIXED_FILE: u8 = 1;
/// IOSQE_IO_DRAIN, IOSQE_IO_LINK, IOSQE_IO_HARDLINK: the entry's order among other entries matters.
const IN_ORDER: u8 = 2 | LINKS;
/// Flags that make the next entry wait for this one.
const LINKS: u8 = 4 | 8;
/// SPLICE_F_FD_IN_FIXED: the input's number is an index in that table.
const SPLICE_FD_IN_FIXED: u32 = 1 << 31;
/// Maximum number of descriptors that one call can name (IORING_MAX_FIXED_FILES).
const MOST: usize = 1 << 20;

/// Numbers of operations (enum io_uring_op). Unknown operations are taken to have a descriptor in `fd`, as most
/// operations do.
mod op {
    pub const NOP: u8 = 0;
    pub const POLL_REMOVE: u8 = 7;
    pub const SENDMSG: u8 = 9;
    pub const TIMEOUT: u8 = 11;
    pub const TIMEOUT_REMOVE: u8 = 12;
    pub const ASYNC_CANCEL: u8 = 14;
    pub const LINK_TIMEOUT: u8 = 15;
    pub const CLOSE: u8 = 19;
    pub const FILES_UPDATE: u8 = 20;
    pub const MADVISE: u8 = 25;
    pub const EPOLL_CTL: u8 = 29;
    pub const SPLICE: u8 = 30;
    pub const PROVIDE_BUFFERS: u8 = 31;
    pub const REMOVE_BUFFERS: u8 = 32;
    pub const TEE: u8 = 33;
    pub const SOCKET: u8 = 45;
    pub const SENDMSG_ZC: u8 = 48;
    pub const WAITID: u8 = 50;
    pub const FUTEX_WAIT: u8 = 51;
    pub const FUTEX_WAITV: u8 = 53;
}

/// Operations of io_uring_register(2).
mod register {
    pub const FILES: u32 = 2;
    pub const FILES_UPDATE: u32 = 6;
    pub const FILES2: u32 = 13;
    pub const FILES_UPDATE2: u32 = 14;
}

/// A copy of an entry. The program may change the entry meanwhile, as it may while the kernel reads it.
pub struct Entry {
    at: *const u8,
    op: u8,
    flags: u8,
    fd: i32,
    off: u64,
    addr: u64,
    len: u32,
    rw_flags: u32,
    splice_in: i32,
}

impl Entry {
    /// # Safety
    /// `at` points to an entry of a ring that is mapped.
    pub unsafe fn read(at: *const u8) -> Entry {
        // SAFETY: `at` points to an entry of a mapped ring; the offsets are those of include/uapi/linux/io_uring.h.
        unsafe {
            Entry {
                at,
                op: at.read_volatile(),
                flags: at.add(1).read_volatile(),
                fd: (at.add(4) as *const i32).read_volatile(),
                off: (at.add(8) as *const u64).read_volatile(),
                addr: (at.add(16) as *const u64).read_volatile(),
                len: (at.add(24) as *const u32).read_volatile(),
                rw_flags: (at.add(28) as *const u32).read_volatile(),
                splice_in: (at.add(44) as *const i32).read_volatile(),
            }
        }
    }

    /// Descriptors that the entry itself contains; -1: none.
    pub fn descriptors(&self) -> [i32; 2] {
        let first = match self.op {
            op::NOP
            | op::POLL_REMOVE
            | op::TIMEOUT..=op::TIMEOUT_REMOVE
            | op::ASYNC_CANCEL..=op::LINK_TIMEOUT
            | op::FILES_UPDATE
            | op::MADVISE
            | op::PROVIDE_BUFFERS..=op::REMOVE_BUFFERS
            | op::SOCKET
            | op::WAITID
            | op::FUTEX_WAIT..=op::FUTEX_WAITV => -1,
            // The call changes only the instance's registrations; see [`Entry::instance`].
            op::EPOLL_CTL => -1,
            // With `splice_in`, the entry closes a file in the ring's table, and no descriptor.
            op::CLOSE if self.splice_in != 0 => -1,
            _ if self.flags & FIXED_FILE != 0 => -1,
            _ => self.fd,
        };
        let second = match self.op {
            op::EPOLL_CTL => self.off as i32,
            op::SPLICE | op::TEE if self.rw_flags & SPLICE_FD_IN_FIXED == 0 => self.splice_in,
            _ => -1,
        };
        [first, second]
    }

    /// The epoll instance whose registrations the entry changes.
    pub fn instance(&self) -> Option<i32> {
        (self.op == op::EPOLL_CTL).then_some(self.fd)
    }

    /// The arguments of an `epoll_ctl` entry, unless the order among other entries matters.
    pub fn epoll_ctl(&self) -> Option<(i32, i32, i32, *const libc::epoll_event)> {
        let plain = self.op == op::EPOLL_CTL && self.flags & IN_ORDER == 0;
        plain.then_some((self.fd, self.len as i32, self.off as i32, self.addr as *const libc::epoll_event))
    }

    /// Does the next entry wait for this one?
    pub fn links(&self) -> bool {
        self.flags & LINKS != 0
    }

    /// Called when the library has carried out this entry. Turns it into an operation for which the kernel only
    /// reports success.
    ///
    /// # Safety
    /// The entry is not submitted yet, and its mapping is writable.
    pub unsafe fn is_done(&self) {
        let at = self.at as *mut u8;
        // SAFETY: `at` is an entry that is mapped and writable until it is submitted; the offsets are those of
        // include/uapi/linux/io_uring.h.
        unsafe {
            at.write_volatile(op::NOP);
            (at.add(28) as *mut u32).write_volatile(0);
        }
    }

    /// Makes the entry name another pair of instance and descriptor, for which the kernel gives the right answer.
    ///
    /// # Safety
    /// As [`Entry::is_done`].
    pub unsafe fn names(&self, instance: i32, member: i32) {
        let at = self.at as *mut u8;
        // SAFETY: `at` is an entry that is mapped and writable until it is submitted; the offsets are those of
        // include/uapi/linux/io_uring.h.
        unsafe {
            (at.add(4) as *mut i32).write_volatile(instance);
            (at.add(8) as *mut u64).write_volatile(member as u64);
        }
    }

    /// The descriptor that the entry closes.
    pub fn closes(&self) -> Option<i32> {
        (self.op == op::CLOSE && self.splice_in == 0).then_some(self.fd)
    }

    /// The message of a send entry.
    pub fn message(&self) -> Option<*const libc::msghdr> {
        matches!(self.op, op::SENDMSG | op::SENDMSG_ZC).then_some(self.addr as *const libc::msghdr)
    }

    /// Calls `used` for each descriptor in memory to which the entry points.
    ///
    /// # Safety
    /// The entry's pointers are valid for the kernel.
    pub unsafe fn further(&self, used: impl FnMut(i32)) {
        if self.op == op::FILES_UPDATE {
            // SAFETY: the program passes `len` descriptors at `addr`, which the kernel will read, too.
            unsafe { fds_of(self.addr as *const i32, self.len as usize, used) }
        }
    }
}

/// # Safety
/// `fds` is null or points to `n` numbers.
pub unsafe fn fds_of(fds: *const i32, n: usize, mut used: impl FnMut(i32)) {
    if fds.is_null() {
        return;
    }
    for i in 0..n.min(MOST) {
        // SAFETY: `fds` has `n` numbers, and `i` is below `n`.
        used(unsafe { fds.add(i).read_unaligned() });
    }
}

/// Calls `used` for each descriptor that io_uring_register(2) is given.
///
/// # Safety
/// `arg` and `n` are valid for the operation.
pub unsafe fn registered(op: u32, arg: *const u8, n: u32, used: impl FnMut(i32)) {
    // SAFETY: `arg` and `n` are the operation's arguments, as the program passed them; the layouts are those of
    // include/uapi/linux/io_uring.h.
    unsafe {
        let list = |at: usize| (arg.add(at) as *const u64).read_unaligned() as *const i32;
        let count = |at: usize| (arg.add(at) as *const u32).read_unaligned() as usize;
        match op {
            register::FILES => fds_of(arg as *const i32, n as usize, used),
            register::FILES_UPDATE => fds_of(list(8), n as usize, used),
            register::FILES2 => fds_of(list(16), count(0), used),
            register::FILES_UPDATE2 => fds_of(list(8), count(24), used),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(op: u8, flags: u8, fd: i32) -> Entry {
        let mut b = [0u64; SIZE / 8];
        let p = b.as_mut_ptr() as *mut u8;
        // SAFETY: all offsets are within the array.
        unsafe {
            *p = op;
            *p.add(1) = flags;
            *(p.add(4) as *mut i32) = fd;
            Entry::read(p)
        }
    }

    #[test]
    fn numbers_that_are_no_descriptors() {
        const RECV: u8 = 27;
        assert_eq!(entry(RECV, 0, 10).descriptors(), [10, -1]);
        assert_eq!(entry(RECV, FIXED_FILE, 10).descriptors(), [-1, -1]);
        // In a SOCKET entry the field is the address family (10 is AF_INET6).
        assert_eq!(entry(op::SOCKET, 0, 10).descriptors(), [-1, -1]);
        assert_eq!(entry(op::PROVIDE_BUFFERS, 0, 10).descriptors(), [-1, -1]);
    }

    #[test]
    fn a_place_that_is_closed_is_no_number() {
        assert_eq!(entry(op::CLOSE, 0, 10).closes(), Some(10));
        let mut e = entry(op::CLOSE, 0, 0);
        e.splice_in = 3;
        assert_eq!((e.closes(), e.descriptors()), (None, [-1, -1]));
    }

    #[test]
    fn lists_of_numbers() {
        let fds = [5, 6, -1];
        let mut update = [0u64; 4];
        update[1] = fds.as_ptr() as u64;
        update[3] = 3;
        let mut got = [0; 8];
        let mut n = 0;
        let mut used = |fd| {
            got[n] = fd;
            n += 1;
        };
        let p = update.as_ptr() as *const u8;
        // SAFETY: the arrays are laid out as the operations expect.
        unsafe {
            registered(register::FILES, fds.as_ptr() as *const u8, 2, &mut used);
            registered(register::FILES_UPDATE, p, 1, &mut used);
            registered(register::FILES_UPDATE2, p, 0, &mut used);
        }
        assert_eq!(&got[..n], [5, 6, 5, 5, 6, -1]);
    }
}
