//! `libfsocket.so`: the hooks, which are the boundary between a program and the library. Each hook
//! is a few lines. `fsocket-lifecycle` and the crates below it decide, and answer "done" or "let
//! libc do it".
//!
//! The hooks use no thread-local variables and no allocator, because programs call them in signal
//! handlers, between `fork` and `exec`, and inside allocators. No panic leaves a hook.

// The safety contract of a hook is that of the libc function with the same name.
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
