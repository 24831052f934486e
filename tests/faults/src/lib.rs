//! Faults on purpose: every system call that the library makes in a real program, or the monitor
//! makes, fails once, with an error that the kernel may really return.
//!
//! | module | concern |
//! | --- | --- |
//! | [`trap`] | stops a program at the library's calls, and lets one fail |
//! | [`errors`] | the errors of each call |
//! | [`plan`] | which faults to run |
//! | [`pairs`], [`campaign`] | ten programs, and what must hold for them |
//! | [`daemon`] | the monitor, and what must hold for its clients |
//! | [`places`] | a place in the code, for people |

pub mod campaign;
pub mod daemon;
pub mod errors;
pub mod pairs;
pub mod places;
pub mod plan;
pub mod trap;
