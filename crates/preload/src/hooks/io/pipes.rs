//! `splice` between a connection and a pipe (ADR 81). All other pairs go to libc.

use super::super::answer::{either, guarded};
use super::{conn, to_kernel};
use fsocket_fdtable::pool;
use fsocket_runtime::{Cause, Outcome};
use fsocket_streams::stream;
use libc::*;

pub unsafe fn splice(
    input: c_int,
    in_off: *mut loff_t,
    out: c_int,
    out_off: *mut loff_t,
    n: size_t,
    flags: c_uint,
) -> ssize_t {
    // Sockets and pipes have no offset. If one is given, the kernel reports the error.
    let whole = in_off.is_null() && out_off.is_null();
    let outcome = match (conn(input), conn(out)) {
        (Some(d), _) if whole => {
            pool::let_go(out);
            guarded(|| stream::splice_from(d, out, n, flags))
        }
        (None, Some(d)) if whole => {
            pool::let_go(input);
            guarded(|| stream::splice_to(d, input, n, flags))
        }
        (None, None) => {
            to_kernel(input);
            to_kernel(out);
            Outcome::Kernel(Cause::NotOurs)
        }
        _ => Outcome::Kernel(Cause::Invalid),
    };
    either(outcome, || real!(splice(input, in_off, out, out_off, n, flags)))
}
