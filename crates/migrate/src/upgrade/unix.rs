//! Unix stream sockets that may go over.
//!
//! As between network namespaces: the kernel has connected them, its socket stays idle behind the descriptors, answers who
//! is at the other end, and is the way back. The monitor asks the kernel which two sockets are connected. Three things
//! differ from TCP. A send puts its bytes into the peer's queue before it returns, so nothing is ever on its way. Names say
//! nothing of the peer: most clients have none. The kernel keeps a socket that wants credentials with each message, or that
//! has passed descriptors.

use super::calls::{begin, with_unix};
use super::unix_rest::{int, peer_of};
use super::worth;
use crate::table::{self, Kind};
use crate::{lately, name};
use fsocket_abi::channel::{CLIENT, SERVER};

/// The kernel has connected `fd` to the address at `addr`. Nothing, if that is no Unix socket.
///
/// # Safety
/// `addr` is the program's for `len` bytes.
pub unsafe fn connected(fd: i32, addr: *const libc::sockaddr, len: u32) {
    // SAFETY: the program says that its address is there.
    if with_unix() && unsafe { name::is_unix(addr, len) } {
        follow(fd, CLIENT);
    }
}

/// The kernel has accepted `fd` from a listener that is not ours. Nothing, if that is no Unix socket.
pub fn accepted(fd: i32) {
    if with_unix() && int(fd, libc::SO_DOMAIN) == Some(libc::AF_UNIX) {
        follow(fd, SERVER);
    }
}

/// From here on the calls are counted.
fn follow(fd: i32, side: usize) {
    if fd <= table::STDIO {
        return;
    }
    let Some(d) = table::alloc(Kind::Fresh) else { return };
    d.set_families(libc::AF_UNIX as u32);
    begin(d, side);
    d.kernel().set_across(true);
    worth::begins(d);
    if !table::install(fd, d) {
        table::release(d);
    }
}

/// Before the first try, so that a connection for one request does not pay for it: is it one that never goes over?
pub(super) fn stays(fd: i32) -> bool {
    int(fd, libc::SO_TYPE) != Some(libc::SOCK_STREAM) || lately::STRANGERS.has(&peer_of(fd).ip, 0)
}
