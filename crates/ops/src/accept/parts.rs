//! The parts of a connection, which are allocated before it is accepted.

use crate::table::{self, Desc, Kind};
use crate::{chan, pool, socks};
use fsocket_abi::sock::Sock;
use fsocket_sys::{self as sys, Errno, Result};

/// A descriptor, a description and a shared state for a connection that is about to be accepted.
pub(super) struct Parts {
    pub(super) fd: i32,
    pub(super) desc: &'static Desc,
    pub(super) sock: &'static Sock,
}

impl Parts {
    pub(super) fn get(family: u32, flags: i32) -> Result<Parts> {
        let placeholder = || pool::placeholder(family, flags & libc::SOCK_CLOEXEC != 0);
        let (fd, recycled) = placeholder().or_else(|e| match e == Errno::EMFILE && chan::spare_descriptors() {
            true => placeholder(),
            false => Err(e),
        })?;
        // If the kernel returns a number that the table has as open, the program closed it
        // without the hooks.
        crate::close::overwritten(fd);
        match (table::alloc(Kind::Fresh), socks::alloc_sock()) {
            (Some(desc), Some(sock)) => {
                desc.placeholder().set_family(family);
                desc.placeholder().set_recycled(recycled);
                desc.placeholder().set_close_on_exec(Some(flags & libc::SOCK_CLOEXEC != 0));
                Ok(Parts { fd, desc, sock })
            }
            (desc, sock) => {
                if let Some(d) = desc {
                    table::release(d);
                }
                if let Some(s) = sock {
                    socks::free_sock(s);
                }
                let _ = sys::close(fd);
                Err(Errno::ENOMEM)
            }
        }
    }
    pub(super) fn give_back(self) {
        let _ = pool::recycle(self.fd, self.desc);
        table::release(self.desc);
        socks::free_sock(self.sock);
    }
}
