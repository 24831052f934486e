//! Where the kernel itself is free: the same program, run twice on kernel TCP,
//! may answer differently. Everything that is not compared is here (or is not
//! generated, and then README.md says so), with its reason.

use crate::call::Call;

/// Does the call return a descriptor number? The kernel gives the lowest that is
/// free; a connection of ours that was closed keeps its placeholder for the next
/// one, so that a number may stay taken for a while (ADR 2, docs/limits.md).
pub fn is_number(call: Call) -> bool {
    call.spec().outs > 0 || matches!(call, Call::Dup2 | Call::Dup3)
}

/// Options whose value depends on what the kernel's autotuning has done so far.
/// Set values are compared by what they do to the calls, not by their echo.
const TUNED: &[&str] = &["SNDBUF", "RCVBUF", "MAXSEG", "WINDOW_CLAMP", "QUICKACK"];

/// Value and length of an integer option.
pub fn option(which: i64, aux: &[i64]) -> String {
    let name = crate::symbols::OPTIONS.get(which as usize).map_or("?", |o| o.0);
    if TUNED.contains(&name) {
        return format!("(value not compared) [{}]", aux.get(1).unwrap_or(&-1));
    }
    format!("{aux:?}")
}

/// States of TCP between which only an acknowledgement lies: it may be delayed
/// by up to 40 ms, and nothing else of the socket shows which of them it is in.
pub fn tcp_state(state: i64) -> &'static str {
    match state {
        1 => "ESTABLISHED",
        2 | 3 => "SYN",
        4 | 5 => "FIN_WAIT",
        // LAST_ACK and CLOSING end by the same acknowledgement; TIME_WAIT is
        // CLOSE to the socket that is left.
        6 | 7 | 9 | 11 => "CLOSED",
        8 => "CLOSE_WAIT",
        10 => "LISTEN",
        _ => "?",
    }
}
