//! Tests that take a CPU of the machine away. They run at the end, one by one, because every other test would lose it, too.

mod cpus;
mod steering_changes;
