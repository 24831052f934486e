//! Control messages (TCP_INQ) of a receive from a connection over shared memory.

use fsocket_runtime::options::TCP_INQ;
use fsocket_runtime::user;
use libc::*;

/// The control messages that were written for a receive, and flags for the header of the message.
#[derive(Default)]
pub struct Beside {
    pub flags: c_int,
    /// Length of the control messages in bytes.
    pub len: size_t,
}

impl Beside {
    /// Writes TCP_INQ as the kernel's `put_cmsg` does. `left`: the number of unread bytes.
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
        // SAFETY: the guarded copy reports a bad address; otherwise the control buffer belongs to
        // the program.
        match unsafe { user::write(bytes.as_ptr(), m.msg_control.cast(), len) } {
            // The next message would begin at a multiple of the machine word.
            Ok(()) => Beside { flags, len: m.msg_controllen.min(WHOLE.next_multiple_of(size_of::<size_t>())) },
            Err(_) => Beside { flags, len: 0 },
        }
    }
}
