//! `libfsocket.so`: the hooks. Each is a few lines; what to do is decided in
//! `fsocket-core`, which answers "done" or "let libc do it".
//!
//! There are no thread-local variables, no allocation, and nothing runs when
//! the program exits.

#![allow(clippy::missing_safety_doc)] // every hook has the contract of the libc function it is called as

mod hooks;
mod init;
mod real;
