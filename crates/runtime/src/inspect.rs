//! What the kernel says of a socket.

use crate::name;
use fsocket_proto::Addr;
use fsocket_sys as sys;

/// What the kernel has bound the socket to.
pub fn bound_address(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let mut len = b.len() as u32;
    // SAFETY: buffer and length are ours.
    unsafe {
        sys::raw(libc::SYS_getsockname, [fd as usize, b.as_mut_ptr() as usize, &mut len as *mut u32 as usize, 0, 0, 0])
            .ok()?;
        name::parse(b.as_ptr() as *const libc::sockaddr, len)
    }
}

/// An option that is a number.
pub fn int_option(fd: i32, name: i32) -> Option<i32> {
    let mut v = [0u8; 4];
    sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).ok().map(|_| i32::from_ne_bytes(v))
}

/// A placeholder is not. Nor are others, and then the holder says that it has looked.
pub fn is_connected(fd: i32) -> bool {
    // tcpi_state, the first byte of what TCP_INFO answers.
    const TCP_CLOSE: u8 = 7;
    let mut info = [0u8; 8];
    sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).is_ok() && info[0] != TCP_CLOSE
}
