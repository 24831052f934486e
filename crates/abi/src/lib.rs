//! Everything in shared memory: layouts, sizes and their version; and the protocol of the path
//! switch, because only that protocol may read the words that it uses.
//!
//! There are two kinds of shared memory. A **channel** is shared by one client process and one
//! listener group, which distrust each other: each reads a value once, and checks it before use.
//! An **arena** is shared by a process, its forked children, and the monitor (which checks what it
//! reads, too).
//!
//! No structure here has a pointer, because processes map the same bytes at different addresses.
#![cfg_attr(not(loom), no_std)]

pub mod arena;
pub mod balance;
pub mod channel;
pub mod flags;
pub mod half;
pub mod path_switch;
pub mod sock;

/// The version of all layouts in this crate. The monitor refuses a library with another version.
pub const VERSION: u32 = match option_env!("FASTSOCKET_TEST_ABI") {
    None => 16,
    Some(text) => number(text),
};

/// Parses a decimal number, for a build with another version (`make test-upgrade`).
const fn number(text: &str) -> u32 {
    let (digits, mut at, mut sum) = (text.as_bytes(), 0, 0);
    while at < digits.len() {
        assert!(digits[at].is_ascii_digit());
        sum = sum * 10 + (digits[at] - b'0') as u32;
        at += 1;
    }
    sum
}
