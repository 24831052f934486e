//! Effects of a hostile user on others. A peer speaks the protocol and breaks it in every way, next
//! to servers and honest clients of other users, which measure what they notice. Other runs kill
//! processes at random moments, and look at the other side.
//!
//! Hostile processes do not use the library. They send messages and write into shared memory by
//! themselves. A seed determines everything except the times at which things happen.

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
