//! Tests that need the machine for themselves. They run at the end, one by one.
//!
//! `cpus` and `steering_changes` take a CPU away, which every other test would lose, too. In `migration` flow groups
//! move by how much time each CPU has to spare, which other tests would take.

mod cpus;
mod migration;
mod steering_changes;
