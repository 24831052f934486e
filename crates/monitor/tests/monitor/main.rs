//! The monitor as its clients see it: its event loop on a thread, and clients
//! that speak the protocol by hand. A client that drops its control socket is a
//! process that died.

mod agents;
mod broker;
mod closing;
mod connecting;
mod daemon;
mod ending;
mod flood;
mod hostile;
mod leaving;
mod metrics;
mod passing;
mod policy;
mod queues;
mod reattach;
mod reporting;
mod rights;
mod shares;
mod steps;
mod support;
mod switching;
mod taken;
mod unix;
mod zones;
