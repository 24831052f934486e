//! Tests that need the machine for themselves. They run at the end, one by one.
//!
//! `cpus` and `steering_changes` take a CPU away, which every other test would lose, too. In `migration` flow groups
//! move by how much time each CPU has to spare, and in the tests of balance workers are busy or asleep; other tests would
//! change both.

mod balance;
mod balance_queues;
mod balance_unsubscribed;
mod cpus;
mod migration;
mod steering_changes;
