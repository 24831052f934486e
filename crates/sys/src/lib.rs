//! The kernel, thinly: raw system calls that neither touch `errno` nor go
//! through libc symbols (which this project itself interposes).
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
