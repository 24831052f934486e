//! Tests that need the machine for themselves. The runner starts them at the end, in sequence.
//!
//! - `cpus` and `steering_changes` take a CPU away, which all other tests would lose, too.
//! - In `migration`, flow groups move according to the idle time of each CPU.
//! - In the tests of balance, workers are busy or asleep. Other tests would disturb both.

mod balance;
mod balance_queues;
mod balance_unsubscribed;
mod cpus;
mod migration;
mod steering_changes;
