//! Asks the kernel about a socket: its address, numeric options, and TCP state.

use crate::name;
use fsocket_proto::Addr;
use fsocket_sys as sys;

/// The address to which the kernel has bound the socket.
pub fn bound_address(fd: i32) -> Option<Addr> {
    let mut b = [0u8; 28];
    let mut len = b.len() as u32;
    // SAFETY: the kernel writes only to the buffer and its length, which are local variables.
    unsafe {
        sys::raw(libc::SYS_getsockname, [fd as usize, b.as_mut_ptr() as usize, &mut len as *mut u32 as usize, 0, 0, 0])
            .ok()?;
        name::parse(b.as_ptr() as *const libc::sockaddr, len)
    }
}

/// The value of a numeric option.
pub fn int_option(fd: i32, name: i32) -> Option<i32> {
    let mut v = [0u8; 4];
    sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).ok().map(|_| i32::from_ne_bytes(v))
}

/// Is the socket connected in the kernel? A placeholder is not.
pub fn is_connected(fd: i32) -> bool {
    // `tcpi_state` is the first byte of the answer to TCP_INFO.
    const TCP_CLOSE: u8 = 7;
    let mut info = [0u8; 8];
    sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).is_ok() && info[0] != TCP_CLOSE
}
