//! Control messages of connections over shared memory.

use fsocket_runtime::options::TCP_INQ;
use fsocket_runtime::user;
use libc::*;

/// Control messages that were written to a receiver, and flags for its header.
#[derive(Default)]
pub struct Beside {
    pub flags: c_int,
    /// Length of the control messages, bytes.
    pub len: size_t,
}

impl Beside {
    /// The kernel's `put_cmsg`, for TCP_INQ: `left` bytes are unread.
    ///
    /// # Safety
    /// `m` is a copy of the program's header.
    pub unsafe fn unread(m: &msghdr, left: c_int) -> Beside {
        const HEAD: size_t = size_of::<cmsghdr>();
        const WHOLE: size_t = HEAD + size_of::<c_int>();
        let len = WHOLE.min(m.msg_controllen);
        if m.msg_control.is_null() || len < HEAD {
            return Beside { flags: MSG_CTRUNC, len: 0 };
        }
        let mut bytes = [0u8; WHOLE];
        bytes[..size_of::<size_t>()].copy_from_slice(&len.to_ne_bytes());
        bytes[HEAD - 8..HEAD - 4].copy_from_slice(&IPPROTO_TCP.to_ne_bytes());
        bytes[HEAD - 4..HEAD].copy_from_slice(&TCP_INQ.to_ne_bytes());
        bytes[HEAD..].copy_from_slice(&left.to_ne_bytes());
        let flags = if len < WHOLE { MSG_CTRUNC } else { 0 };
        // SAFETY: the program says that its control buffer is there; the copy says if it is not.
        match unsafe { user::write(bytes.as_ptr(), m.msg_control.cast(), len) } {
            // (The next one begins where a number of machine words ends.)
            Ok(()) => Beside { flags, len: m.msg_controllen.min(WHOLE.next_multiple_of(size_of::<size_t>())) },
            Err(_) => Beside { flags, len: 0 },
        }
    }
}
