//! Behaviour that the kernel leaves open: the same program, run twice on kernel TCP, may answer
//! differently. Each answer that is not compared is here with its reason, or is not generated (see
//! README.md).

use crate::call::Call;

/// Does the call return a descriptor number? The kernel gives the lowest free number. A closed
/// connection over shared memory keeps its placeholder for the next one, so a number may stay taken
/// for a while (ADR 2, docs/limits.md).
pub fn is_number(call: Call) -> bool {
    call.spec().outs > 0 || matches!(call, Call::Dup2 | Call::Dup3)
}

/// Options whose value depends on the kernel's autotuning. If a program sets them, the test
/// compares their effect on calls, not the value that `getsockopt` returns.
const TUNED: &[&str] = &["SNDBUF", "RCVBUF", "MAXSEG", "WINDOW_CLAMP", "QUICKACK"];

/// Value and length of an integer option.
pub fn option(which: i64, aux: &[i64]) -> String {
    let name = crate::symbols::OPTIONS.get(which as usize).map_or("?", |o| o.0);
    if TUNED.contains(&name) {
        return format!("(value not compared) [{}]", aux.get(1).unwrap_or(&-1));
    }
    format!("{aux:?}")
}

/// The name of a TCP state. States that differ only by an acknowledgement have one name: it may be
/// delayed by up to 40 ms, and nothing else of the socket shows which state it is in.
pub fn tcp_state(state: i64) -> &'static str {
    match state {
        1 => "ESTABLISHED",
        2 | 3 => "SYN",
        4 | 5 => "FIN_WAIT",
        // LAST_ACK and CLOSING end by the same acknowledgement. For the socket that is left,
        // TIME_WAIT is CLOSE.
        6 | 7 | 9 | 11 => "CLOSED",
        8 => "CLOSE_WAIT",
        10 => "LISTEN",
        _ => "?",
    }
}
