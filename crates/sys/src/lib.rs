//! A thin layer above the kernel: raw system calls, which neither change `errno` nor use libc
//! symbols. (The library itself replaces some of these symbols.)
#![no_std]

mod arch;
pub mod beside;
pub mod calls;
pub mod cpu;
pub mod errno;
mod vdso;

pub use calls::*;
pub use errno::{Errno, Result};
pub use vdso::auxiliary;
