//! Reasons why the figures of a run mean little.

use fsocket_measure::Machine;

/// Share of the CPUs that other programs may use before a run.
const IDLE: f64 = 0.3;

/// Returns the reasons as sentences. `machine`: its state before the run.
pub fn of(machine: &Machine) -> Vec<String> {
    let mut notes = Vec::new();
    if cfg!(debug_assertions) {
        notes.push("This build has assertions: its figures are too low for a report.".to_owned());
    }
    notes.extend(busy(&machine.load, machine.cpus));
    notes
}

/// A sentence if other programs keep the CPUs busy; `load`: the line of /proc/loadavg.
fn busy(load: &str, cpus: usize) -> Option<String> {
    let minute: f64 = load.split(' ').next()?.parse().ok()?;
    (minute > IDLE * cpus as f64).then(|| {
        format!(
            "The machine was busy before the run: load {minute} on {cpus} CPUs. Figures beside other work mean little."
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_said() {
        assert_eq!(busy("0.40 1.00 2.00 1/200 77", 2), None);
        assert!(busy("1.50 1.00 2.00 1/200 77", 2).is_some_and(|note| note.contains("load 1.5 on 2 CPUs")));
        assert_eq!(busy("", 2), None);
    }
}
