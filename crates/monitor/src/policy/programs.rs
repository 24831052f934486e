//! `[[program]]` of the configuration file: programs for which something differs from the default.

use super::rules::{is_below, is_in_unit, Party};
use std::path::PathBuf;

/// Conditions, which must all hold, and the settings that follow. The first entry that fits a
/// process counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// FILE:LINE of the entry.
    pub place: String,
    pub exe: Option<PathBuf>,
    pub unit: Option<String>,
    pub cgroup: Option<String>,
    pub off: bool,
    pub no_zones: bool,
    pub no_spin: bool,
    pub no_stdio: bool,
    /// The most channels that a process may have.
    pub channels: Option<usize>,
}

/// The longest program name that the kernel stores.
const NAME: usize = 15;

impl Program {
    /// `name`: the program's name, as it tells itself. It is compared if the monitor cannot read
    /// the executable. A false name can only change the program's own speed.
    fn fits(&self, party: &Party, name: &str) -> bool {
        let within = |f: &dyn Fn(&str) -> bool| party.cgroup.as_deref().is_some_and(f);
        let exe = |wanted: &PathBuf| match &party.exe {
            Some(exe) => exe == wanted,
            None => wanted.file_name().is_some_and(|n| n.as_encoded_bytes().iter().take(NAME).eq(name.as_bytes())),
        };
        self.exe.as_ref().is_none_or(exe)
            && self.unit.as_ref().is_none_or(|unit| within(&|path| is_in_unit(path, unit)))
            && self.cgroup.as_ref().is_none_or(|top| within(&|path| is_below(path, top)))
    }

    /// Whether this entry matches everything that `later` matches.
    pub fn covers(&self, later: &Program) -> bool {
        fn wider<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> bool {
            a.is_none() || a == b
        }
        wider(&self.exe, &later.exe) && wider(&self.unit, &later.unit) && wider(&self.cgroup, &later.cgroup)
    }

    /// The settings as bits for the library ([`fsocket_proto::program`]).
    pub fn bits(&self) -> u64 {
        use fsocket_proto::program::{NO_SPIN, NO_STDIO, NO_ZONES};
        let bits = [(self.no_zones, NO_ZONES), (self.no_spin, NO_SPIN), (self.no_stdio, NO_STDIO)];
        bits.into_iter().fold(0, |all, (set, bit)| if set { all | bit } else { all })
    }
}

/// The index of the first entry that fits.
pub fn find(programs: &[Program], party: &Party, name: &str) -> Option<usize> {
    programs.iter().position(|p| p.fits(party, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_fits_counts() {
        let of = |exe: Option<&str>, unit: Option<&str>, cgroup: Option<&str>| Program {
            exe: exe.map(Into::into),
            unit: unit.map(Into::into),
            cgroup: cgroup.map(Into::into),
            ..Program::default()
        };
        let list = [
            of(Some("/usr/bin/a"), Some("x.service"), None),
            of(Some("/usr/bin/a"), None, None),
            of(Some("/usr/lib/a-very-long-program-name"), None, None),
            of(None, None, Some("/pods")),
        ];
        let party = |exe: Option<&str>, cgroup: &str| Party {
            exe: exe.map(Into::into),
            cgroup: Some(cgroup.into()),
            ..Party::default()
        };
        let found = |exe, cgroup, name| find(&list, &party(exe, cgroup), name);
        assert_eq!(found(Some("/usr/bin/a"), "/system.slice/x.service", "a"), Some(0));
        assert_eq!(found(Some("/usr/bin/a"), "/system.slice/y.service", "a"), Some(1));
        assert_eq!(found(Some("/opt/a"), "/system.slice/y.service", "a"), None);
        assert_eq!(found(None, "/", "a"), Some(1), "by its name where the executable cannot be read");
        assert_eq!(found(None, "/", "a-very-long-pro"), Some(2));
        assert_eq!(found(None, "/", "a-very-long-prog"), None);
        assert_eq!(found(None, "/pods/1", "b"), Some(3));
        assert_eq!(find(&list, &Party::default(), "b"), None);
        assert!(list[1].covers(&list[0]) && !list[0].covers(&list[1]));
    }
}
