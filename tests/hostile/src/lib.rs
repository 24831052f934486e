//! What a hostile user can do to others: a peer that speaks the protocol and breaks it in every way,
//! beside servers and honest clients of other users that measure what they notice; and processes that
//! are killed at random moments, with what the other side sees of it.
//!
//! Hostile processes have nothing of the library in them; they send messages and write into shared
//! memory by themselves. Everything follows from a seed but for the times at which things happen.

pub mod attack;
pub mod control;
pub mod descriptors;
pub mod honest;
pub mod kills;
pub mod lives;
pub mod party;
pub mod peer;
pub mod random;
pub mod rows;
pub mod run;
pub mod victims;
