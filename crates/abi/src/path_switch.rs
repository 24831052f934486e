//! The path switch: a connection leaves its rings for a kernel socket, and no byte is lost or reordered.
//!
//! This module makes no system call. It owns the words in which the two sides agree on a switch, and their protocol:
//!
//! - [`PathState`] says where a connection is; [`PathState::of`] is the only code that computes it.
//! - [`PathState::next`] takes an [`Event`] and returns what this process does next.
//! - [`Follower::next`] does the same for the steps of a process that goes after a connection that has moved.
//! - [`Stopped`], [`Announced`] and [`Looked`] are the steps of a side that moves, in the only order that compiles.
//! - [`PeerStatus`] is what the peer has published.
//!
//! The crate `migrate` executes the steps. The models in `crates/ring/src/model/switch.rs` run the same code.
//!
//! # Protocol
//!
//! One side *moves*. It stops using the rings, gets both ends of a kernel connection from the monitor, puts the bytes that
//! neither side has read into the kernel connection, and publishes MIGRATED. The other side *follows* when it next looks: it
//! sends again, in the kernel connection, what it published too late for the mover, skips what it has read of the
//! mover's ring meanwhile, and goes on in the kernel. So each direction changes its path at one offset of its stream.
//!
//! The race is between a sender that has just published a record and a mover that takes its last look at that ring:
//!
//! ```text
//!     mover                                sender
//!     publish MIGRATING                    publish a record
//!     arm the want word                    light fence
//!     heavy fence                          take the want word
//!     look at the ring                     armed: look at the mover's status
//!     publish base and limit, MIGRATED
//!     heavy fence
//!     look at the ring
//! ```
//!
//! Either the mover sees the record, or the sender finds the want word armed and then sees the mover's status. If that is
//! MIGRATING, the mover's last look finds the record; if it is MIGRATED, the sender follows. So no record waits for another call
//! of the sender, and neither does an end ([`Finished`]).
//!
//! The other race is between a mover and a peer that closes its end: the mover publishes MIGRATING, fences, and looks for
//! CLOSED. The peer publishes CLOSED, fences, and looks for MIGRATING ([`closes_beside_mover`]). At least one sees the other.
//!
//! # States
//!
//! ```text
//!                  stop                    finish
//!        .------------------> Moving(Group) -------.
//!        |                                          v      ring not empty
//!     [Rings]                                 Moved(Group) ---------------> Draining(fd)
//!        |  MIGRATING             MIGRATED        ^   |                          |
//!        '-----------> Moving(Peer) ---> Moved(Peer)  | ring empty               | ring empty
//!                          |        follow            v                          v
//!                          | CLOSED or RST         Kernel(fd) <------------------'
//!                          v
//!                        Failed -- follow --> Reset
//!
//!     poison: every state of the rings -> Reset          close: every state -> Closed
//! ```
//!
//! | state | this process | word of the fork group | peer's status |
//! | --- | --- | --- | --- |
//! | `Rings` | no kernel socket | rings | neither MIGRATING nor MIGRATED |
//! | `Moving(Peer)` | no kernel socket | rings | MIGRATING |
//! | `Failed` | no kernel socket | rings | MIGRATING with CLOSED or RST |
//! | `Moved(Peer)` | no kernel socket | rings | MIGRATED |
//! | `Moving(Group)` | no kernel socket | switching | any |
//! | `Moved(Group)` | no kernel socket | moved | any |
//! | `Reset(before)` | any | poisoned | any |
//! | `Draining(fd)` | has one, and reads the ring first | not poisoned | any |
//! | `Kernel(fd)` | its descriptors are kernel sockets | any | any |
//! | `Closed` | not a connection, or not any more | any | any |
//!
//! # Events
//!
//! *Wait*: the call may wait for the peer. *Call*: it may not. A cell is a [`Next`]; `Stay` is an empty cell.
//!
//! | state | Wait | Call | Sent | Look | Shutdown | Close | Leave |
//! | --- | --- | --- | --- | --- | --- | --- | --- |
//! | `Rings` | | | | | | | Move |
//! | `Moving(Peer)` | Follow | Later | Later | Later | | Follow | Move |
//! | `Failed` | Follow | Follow | Follow | Follow | Follow | Follow | Move |
//! | `Moved(Peer)` | Follow | Follow | Follow | Follow | Follow | Follow | Follow |
//! | `Moving(Group)` | Follow | Follow | | Follow | Follow | Follow | Follow |
//! | `Moved(Group)` | Follow | Follow | | Follow | Follow | Follow | Follow |
//! | `Reset(None)` | | | | | | | Move |
//! | `Reset(Some(_))` | | | | | | | |
//! | `Draining(fd)` | Follow | Follow | | Both | Both | | Follow |
//! | `Kernel(fd)` | Kernel | Kernel | | Kernel | Kernel | | |
//! | `Closed` | | | | | | | |
//!
//! - `Moving(Peer)` on Shutdown: the program's wish is noted in the rings, and the follower repeats it in the kernel.
//! - `Moving(Peer)` on Leave: the claim of the slot decides which side moves ([`claim`]).
//! - `Moving(Group)` and `Moved(Group)` on Sent: the mover itself may be in the middle of its steps, further down the stack.

mod follower;
mod mover;
mod state;
mod status;
#[cfg(all(test, not(loom)))]
mod tests;
#[cfg(all(test, not(loom)))]
mod walk;

pub use follower::{followed, group_moves, resume_at, Follower, Skip, Step};
pub use mover::{
    announce, claim, closes_beside_mover, leave, leave_at, unclaim, Announced, Fenced, Finished, Looked, Own, Remains,
    Stopped,
};
pub use state::{in_rings, Event, Next, Party, PathState};
pub use status::PeerStatus;
