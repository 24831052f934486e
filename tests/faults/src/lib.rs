//! Fault injection: every system call that the library makes in a real program, or that the monitor
//! makes, fails once, with an error that the kernel may really return.
//!
//! | module | concern |
//! | --- | --- |
//! | [`trap`] | stops a program at the library's calls, and makes one of them fail |
//! | [`errors`] | the errors of each call |
//! | [`plan`] | which faults to run |
//! | [`pairs`], [`campaign`] | ten pairs of programs, and the rules for their runs |
//! | [`daemon`] | the monitor, and the rules for its clients |
//! | [`places`] | readable names of places in the code |

pub mod campaign;
pub mod daemon;
pub mod errors;
pub mod pairs;
pub mod places;
pub mod plan;
pub mod trap;
