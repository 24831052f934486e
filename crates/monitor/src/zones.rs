//! Listener groups with local listen sockets: who works where, and the BPF
//! program that selects among them.
//!
//! No descriptor of a listen socket is kept: it must die with its worker. The
//! program's map of sockets holds none either, and loses a socket by itself when
//! that is closed.

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
