//! Tests of the monitor as its clients see it. The event loop runs on a thread, and the tests play
//! clients that send single messages. A client whose control socket is closed counts as dead.

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
