//! irqbalance: a daemon that moves interrupts every ten seconds, and so may undo their placement.

use crate::cpus::CpuSet;
use crate::root::Root;
use serde::{Deserialize, Serialize};

/// A running irqbalance, and the interrupts and CPUs that its options exclude.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Balance {
    pub pid: u32,
    /// `--banirq`, `-i`.
    pub banned_irqs: Vec<u32>,
    /// `IRQBALANCE_BANNED_CPULIST`, `IRQBALANCE_BANNED_CPUS`.
    pub banned_cpus: CpuSet,
}

/// Configuration files in which distributions keep the daemon's environment and arguments.
const CONFIGS: &[&str] = &["etc/default/irqbalance", "etc/sysconfig/irqbalance"];

impl Balance {
    pub fn inspect(root: &Root) -> Option<Balance> {
        let named = |pid: &u32| root.get(format!("proc/{pid}/comm")).is_some_and(|c| c == "irqbalance");
        let pid = root.numbered("proc", "").into_iter().find(named)?;
        let mut balance = Balance { pid, ..Balance::default() };
        if let Some(line) = root.get(format!("proc/{pid}/cmdline")) {
            balance.arguments(line.split('\0'));
        }
        // Only root can read the environment of the process. Otherwise the configuration files
        // count.
        match root.get(format!("proc/{pid}/environ")) {
            Some(environment) if !environment.is_empty() => balance.environment(environment.split('\0')),
            _ => {
                for text in CONFIGS.iter().filter_map(|path| root.get(path)) {
                    balance.environment(text.lines());
                }
            }
        }
        Some(balance)
    }

    fn arguments<'a>(&mut self, arguments: impl Iterator<Item = &'a str>) {
        let mut arguments = arguments.peekable();
        while let Some(argument) = arguments.next() {
            let value = match argument {
                "-i" | "--banirq" => arguments.peek().copied(),
                _ => argument.strip_prefix("--banirq=").or_else(|| argument.strip_prefix("-i")),
            };
            self.banned_irqs.extend(value.and_then(|v| v.parse::<u32>().ok()));
        }
    }

    fn environment<'a>(&mut self, lines: impl Iterator<Item = &'a str>) {
        for line in lines {
            let Some((name, value)) = line.trim().split_once('=') else { continue };
            let value = value.trim_matches('"');
            match name {
                "IRQBALANCE_BANNED_CPULIST" => {
                    self.banned_cpus = self.banned_cpus.or(&CpuSet::parse_list(value).unwrap_or_default())
                }
                "IRQBALANCE_BANNED_CPUS" => {
                    self.banned_cpus = self.banned_cpus.or(&CpuSet::parse_mask(value).unwrap_or_default())
                }
                "IRQBALANCE_ARGS" | "OPTIONS" => self.arguments(value.split_whitespace()),
                _ => {}
            }
        }
    }

    /// Whether irqbalance is told to leave this interrupt alone.
    pub fn leaves(&self, irq: u32) -> bool {
        self.banned_irqs.contains(&irq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_and_environment() {
        let mut balance = Balance::default();
        balance.arguments("irqbalance --foreground --banirq=41 -i 42 -i43".split(' '));
        balance.environment(
            "#x\nIRQBALANCE_BANNED_CPULIST=\"2-3\"\nIRQBALANCE_BANNED_CPUS=00000001,00000000\nOPTIONS=-i 7".lines(),
        );
        assert_eq!(balance.banned_irqs, [41, 42, 43, 7]);
        assert_eq!(balance.banned_cpus.list(), "2-3,32");
        assert!(balance.leaves(42) && !balance.leaves(1));
    }
}
