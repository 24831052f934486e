//! `libfsocket.so`: the hooks. Each is a few lines; what to do is decided in
//! `fsocket-lifecycle`, which answers "done" or "let libc do it".
//!
//! There are no thread-local variables, no allocation, and what runs when
//! the program exits is short.

// The contract of a hook is that of the libc function whose name it has.
#![allow(clippy::missing_safety_doc)]

#[macro_use]
mod real;
mod deep;
mod home;
mod hook;
mod hooks;
mod init;
mod lacking;
mod memory;
mod musl;
mod old_glibc;
mod summary;
mod table;
