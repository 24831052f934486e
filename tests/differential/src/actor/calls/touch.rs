//! Attributes that stay with a socket and must not be seen in the next one; and sockets that the
//! kernel takes by their number.

use super::errno;
use crate::shared::Slot;
use libc::{c_int, c_void, sockaddr, socklen_t};
use std::mem::{size_of, zeroed};

const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
const FIOASYNC: libc::Ioctl = 0x5452;
const SIOCSPGRP: libc::Ioctl = 0x8902;
const BPF_MAP_TYPE_SOCKMAP: u32 = 15;

/// A new listener on loopback, and its address.
unsafe fn listener() -> (c_int, libc::sockaddr_in) {
    // SAFETY: all-zero bytes are a valid address, and the calls use local variables.
    unsafe {
        let mut name: libc::sockaddr_in = zeroed();
        name.sin_family = libc::AF_INET as u16;
        name.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
        let mut len = size_of::<libc::sockaddr_in>() as socklen_t;
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        libc::bind(fd, (&raw const name).cast(), len);
        libc::listen(fd, 4);
        libc::getsockname(fd, (&raw mut name).cast(), &mut len);
        (fd, name)
    }
}

/// Connects the socket by a send (TCP Fast Open) to a listener that is closed afterwards.
unsafe fn fast_open(fd: c_int) -> i64 {
    // SAFETY: the address is local, and the calls get its size.
    unsafe {
        let (listener, name) = listener();
        let to = (&raw const name).cast::<sockaddr>();
        let sent =
            libc::sendto(fd, b"hello".as_ptr().cast(), 5, libc::MSG_FASTOPEN, to, size_of_val(&name) as socklen_t);
        let saved = errno();
        if sent >= 0 {
            libc::close(libc::accept(listener, std::ptr::null_mut(), std::ptr::null_mut()));
        }
        libc::close(listener);
        *libc::__errno_location() = saved;
        sent as i64
    }
}

/// Changes attribute `what`, numbered as in [`crate::symbols::TOUCH`].
pub(super) unsafe fn touch(fd: c_int, what: i64) -> i64 {
    // SAFETY: all pointers lead to local variables of the types that the manual pages ask for.
    unsafe {
        let me = libc::getpid();
        match what {
            0 => libc::ioctl(fd, FIOASYNC, &1 as *const c_int).into(),
            1 => libc::fcntl(fd, libc::F_SETOWN, me).into(),
            2 => libc::fcntl(fd, F_SETSIG, libc::SIGURG).into(),
            3 => libc::fchmod(fd, 0o600).into(),
            4 => {
                let mut name: libc::sockaddr_in = zeroed();
                name.sin_family = libc::AF_INET as u16;
                name.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
                libc::bind(fd, (&raw const name).cast(), size_of_val(&name) as socklen_t).into()
            }
            5 => libc::shutdown(fd, libc::SHUT_RDWR).into(),
            6 => fast_open(fd),
            7 => libc::fcntl(fd, libc::F_SETFL, libc::O_APPEND).into(),
            8 => {
                let mark: c_int = 7;
                libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_MARK, (&raw const mark).cast(), 4).into()
            }
            _ => libc::ioctl(fd, SIOCSPGRP, &me as *const c_int).into(),
        }
    }
}

/// Reports flags, owner (set or not), signal, mode, port (set or not), error of `getpeername`,
/// mark.
pub(super) unsafe fn attributes(s: &Slot, fd: c_int) -> i64 {
    // SAFETY: the calls write to local buffers.
    unsafe {
        let mut st: libc::stat = zeroed();
        if libc::fstat(fd, &mut st) < 0 {
            return -1;
        }
        let mut name: libc::sockaddr_in6 = zeroed();
        let mut len = size_of_val(&name) as socklen_t;
        libc::getsockname(fd, (&raw mut name).cast(), &mut len);
        let port = name.sin6_port != 0;
        len = size_of_val(&name) as socklen_t;
        let peer = if libc::getpeername(fd, (&raw mut name).cast(), &mut len) == 0 { 0 } else { errno() };
        let mut mark: c_int = -1;
        len = 4;
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_MARK, (&raw mut mark).cast(), &mut len);
        s.put_aux(libc::fcntl(fd, libc::F_GETFL).into());
        s.put_aux((libc::fcntl(fd, libc::F_GETOWN) != 0).into());
        s.put_aux(libc::fcntl(fd, F_GETSIG).into());
        s.put_aux(st.st_mode.into());
        s.put_aux(port.into());
        s.put_aux(peer.into());
        s.put_aux(mark.into());
        0
    }
}

/// Puts the socket into a new BPF map of sockets, by `bpf(BPF_MAP_UPDATE_ELEM)`.
pub(super) unsafe fn put_into_map(fd: c_int) -> i64 {
    // SAFETY: `union bpf_attr` begins with these members, and all pointers lead to local variables.
    unsafe {
        let create = [BPF_MAP_TYPE_SOCKMAP, 4, 4, 4, 0, 0, 0, 0];
        let map = libc::syscall(libc::SYS_bpf, 0, create.as_ptr(), size_of_val(&create));
        if map < 0 {
            return map;
        }
        let (key, value) = (0u32, fd);
        let update = [map as u64, &raw const key as u64, &raw const value as u64, 0];
        let r = libc::syscall(libc::SYS_bpf, 2, update.as_ptr() as *const c_void, size_of_val(&update));
        let saved = errno();
        libc::close(map as c_int);
        *libc::__errno_location() = saved;
        r
    }
}
