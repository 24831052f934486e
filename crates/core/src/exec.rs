//! Connections that leave this program: through `exec`, or into code of libc
//! that makes its own system calls.

use crate::table::{self, Desc, DESCS};
use crate::{path, stats};
use fsocket_abi::arena::Counter;
use fsocket_sys as sys;

/// The program is about to be replaced, or a child of it is: what it inherits
/// becomes a kernel connection, because the new program may not have the
/// library (static, set-user-ID), and because the state that we keep of a
/// connection does not survive `exec`.
pub fn before_exec() {
    let mut at = 0;
    loop {
        let mut batch = [None; path::BATCH];
        let mut n = 0;
        while at < DESCS.len() && n < path::BATCH {
            if let Some(d) = DESCS.get(at).filter(|d| d.is_conn() && inheritable(d)) {
                batch[n] = Some(d);
                n += 1;
            }
            at += 1;
        }
        if n == 0 {
            return;
        }
        path::materialize(&batch);
    }
}

fn inheritable(d: &Desc) -> bool {
    let mut any = false;
    table::each_number(d, |fd| any |= sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0));
    any
}

/// Code that we do not see is about to use `fd`.
pub fn hand_over(fd: i32) {
    if let Some(d) = table::lookup(fd).filter(|d| d.is_conn()) {
        stats::count(Counter::FbOption);
        path::materialize_one(d);
    }
}
