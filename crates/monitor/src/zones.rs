//! Listener groups with local listen sockets: which worker is where, and the BPF program that
//! selects among the sockets.
//!
//! The monitor keeps no descriptor of these listen sockets, because a socket must end with its
//! worker. The program's socket map does not keep sockets open either: a closed socket leaves the
//! map by itself.

mod balance;
mod flows;
mod group;
mod keep;
mod own;
mod queues;
mod report;
mod state;
mod workers;

pub use state::Zones;
