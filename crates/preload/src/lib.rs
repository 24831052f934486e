//! `libfsocket.so`: the hooks. Each is a few lines; what to do is decided in
//! `fsocket-lifecycle`, which answers "done" or "let libc do it".
//!
//! There are no thread-local variables, no allocation, and what runs when
//! the program exits is short.

// Every hook has the contract of the libc function it is called as, and hands
// its arguments on, unchanged, to that function or to an operation with the
// same contract. That one argument covers each unsafe block in `hooks`.
#![allow(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

mod deep;
mod home;
mod hook;
mod hooks;
mod init;
mod memory;
mod musl;
mod old_glibc;
mod real;
mod summary;
mod table;
