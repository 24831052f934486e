//! The configuration file of the monitor, in TOML. Every key is optional. The manual page
//! fastsocketd.toml(5) (`packaging/fastsocketd.toml.5`) describes the keys.

use crate::hosts::Announce;
use crate::knobs::Knobs;
use crate::links::Links;
use crate::policy::file::{self, RawProgram, RawRule, RawShare};
use crate::policy::programs::Program;
use crate::policy::rules::Rules;
use fsocket_bpf::announce::LAST;
use serde::Deserialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;

/// The file that is read if no other one is named.
pub const FILE: &str = "/etc/fastsocket/fastsocketd.toml";

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("{file}: {source}")]
    Read { file: String, source: std::io::Error },
    /// The source tells line and column.
    #[error("{file}: {source}")]
    Parse { file: String, source: toml::de::Error },
    #[error("balance: {0}")]
    Value(&'static str),
    #[error("hosts: {0}")]
    Hosts(&'static str),
    #[error("{file}:{line}: {what}")]
    Rule { file: String, line: usize, what: String },
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub balance: Balance,
    pub hosts: Hosts,
    share: Vec<Spanned<RawShare>>,
    rule: Vec<Spanned<RawRule>>,
    program: Vec<Spanned<RawProgram>>,
    /// The rules that the fields above describe.
    #[serde(skip)]
    pub rules: Rules,
    #[serde(skip)]
    pub programs: Vec<Program>,
}

/// A file of the `.d` directory beside the main file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct DropIn {
    share: Vec<Spanned<RawShare>>,
    rule: Vec<Spanned<RawRule>>,
    program: Vec<Spanned<RawProgram>>,
}

/// `[balance]`; see fastsocketd.toml(5).
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Balance {
    enabled: Option<bool>,
    busy: Option<u32>,
    idle: Option<u32>,
    ratio: Option<u32>,
    patience_us: Option<u64>,
    interval_ms: Option<u64>,
    migrate: Option<bool>,
    groups: Option<u32>,
}

/// `[hosts]`; see fastsocketd.toml(5).
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hosts {
    announce: bool,
    cgroup: Option<PathBuf>,
    number: Option<u32>,
    rdma: Option<Links>,
}

/// Reads the named file, or else [`FILE`] if it exists. Then reads the files of the `.d` directory
/// beside it.
///
/// # Errors
/// [`SettingsError`]. It is no error if [`FILE`] does not exist.
pub fn read(named: Option<&Path>) -> Result<Settings, SettingsError> {
    let path = named.unwrap_or(Path::new(FILE));
    let mut settings = match text(path) {
        Ok(text) => understand(&path.display().to_string(), &text)?,
        Err(SettingsError::Read { source, .. }) if named.is_none() && source.kind() == ErrorKind::NotFound => {
            Settings::default()
        }
        Err(e) => return Err(e),
    };
    for more in drop_ins(&path.with_extension("d"))? {
        let (file, text) = (more.display().to_string(), text(&more)?);
        let raw: DropIn = toml(&file, &text)?;
        let rules = rules(&file, &text, &raw.share, &raw.rule)?;
        settings.rules.share.extend(rules.share);
        settings.rules.rules.extend(rules.rules);
        settings.programs.extend(programs(&file, &text, &raw.program)?);
    }
    Ok(settings)
}

fn text(path: &Path) -> Result<String, SettingsError> {
    std::fs::read_to_string(path).map_err(|source| SettingsError::Read { file: path.display().to_string(), source })
}

/// The `.toml` files of a directory in the order of their names. The directory need not exist.
fn drop_ins(directory: &Path) -> Result<Vec<PathBuf>, SettingsError> {
    let bad = |source| SettingsError::Read { file: directory.display().to_string(), source };
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(e) => return Err(bad(e)),
    };
    let paths: Result<Vec<PathBuf>, _> = entries.map(|entry| entry.map(|e| e.path())).collect();
    let mut paths = paths.map_err(bad)?;
    paths.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    paths.sort();
    Ok(paths)
}

fn toml<T: serde::de::DeserializeOwned>(file: &str, text: &str) -> Result<T, SettingsError> {
    toml::from_str(text).map_err(|source| SettingsError::Parse { file: file.to_owned(), source })
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes().iter().take(at).filter(|b| **b == b'\n').count() + 1
}

fn told(file: &str, text: &str, w: file::Wrong) -> SettingsError {
    SettingsError::Rule { file: file.to_owned(), line: line_of(text, w.at), what: w.what }
}

fn programs(file: &str, text: &str, raw: &[Spanned<RawProgram>]) -> Result<Vec<Program>, SettingsError> {
    file::programs(raw, &|at| format!("{file}:{}", line_of(text, at))).map_err(|w| told(file, text, w))
}

fn rules(
    file: &str,
    text: &str,
    share: &[Spanned<RawShare>],
    rule: &[Spanned<RawRule>],
) -> Result<Rules, SettingsError> {
    file::rules(share, rule, &|at| line_of(text, at)).map_err(|w| told(file, text, w))
}

fn understand(file: &str, text: &str) -> Result<Settings, SettingsError> {
    let mut settings: Settings = toml(file, text)?;
    settings.hosts.check()?;
    settings.rules = rules(file, text, &settings.share, &settings.rule)?;
    settings.programs = programs(file, text, &settings.program)?;
    Ok(settings)
}

impl Hosts {
    fn check(&self) -> Result<(), SettingsError> {
        if self.number.is_some_and(|n| !(1..=LAST).contains(&n)) {
            return Err(SettingsError::Hosts("number is 1 to 16777215"));
        }
        if self.cgroup.as_ref().is_some_and(|c| !c.is_absolute()) {
            return Err(SettingsError::Hosts("cgroup begins with /"));
        }
        let own = |l: &Links| l.peers.iter().any(|p| p.ip() == l.address.ip());
        if self.rdma.as_ref().is_some_and(own) {
            return Err(SettingsError::Hosts("rdma: a peer has the address of this host"));
        }
        Ok(())
    }

    /// The hosts to which this host's agent should have links.
    pub fn linked(&self) -> Option<Links> {
        self.rdma.clone()
    }

    /// The announcement to other hosts. (A private monitor announces nothing: it acts for its own
    /// programs only.)
    pub fn announced(&self) -> Option<Announce> {
        let number = self.number.unwrap_or_else(Announce::any_number);
        self.announce.then(|| Announce { cgroup: self.cgroup.clone(), number })
    }
}

impl Balance {
    /// The settings. Values that are not given have the default, which is the paper's value.
    ///
    /// # Errors
    /// [`SettingsError::Value`].
    pub fn knobs(&self) -> Result<Knobs, SettingsError> {
        let usual = Knobs::default();
        let knobs = Knobs {
            off: !self.enabled.unwrap_or(true),
            busy: self.busy.unwrap_or(usual.busy),
            idle: self.idle.unwrap_or(usual.idle),
            ratio: self.ratio.unwrap_or(usual.ratio),
            patience: self.patience_us.map_or(usual.patience, Duration::from_micros),
            interval: self.interval_ms.map_or(usual.interval, Duration::from_millis),
            migrate: self.migrate.unwrap_or(usual.migrate),
            groups: self.groups.unwrap_or(usual.groups),
        };
        if knobs.busy > 100 || knobs.idle >= knobs.busy {
            return Err(SettingsError::Value("idle < busy <= 100 (percent)"));
        }
        if knobs.ratio == 0 || knobs.groups > 4096 {
            return Err(SettingsError::Value("ratio is 1 or more, groups at most 4096"));
        }
        if !(Duration::from_micros(10)..=Duration::from_secs(10)).contains(&knobs.patience) {
            return Err(SettingsError::Value("patience_us is 10 to 10000000"));
        }
        if !(Duration::from_millis(10)..=Duration::from_secs(60)).contains(&knobs.interval) {
            return Err(SettingsError::Value("interval_ms is 10 to 60000"));
        }
        Ok(knobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knobs(text: &str) -> Result<Knobs, String> {
        let s: Settings = toml::from_str(text).map_err(|e| e.to_string())?;
        s.balance.knobs().map_err(|e| e.to_string())
    }

    #[test]
    fn the_papers_values_are_the_usual_ones() {
        let k = knobs("").unwrap();
        assert_eq!((k.off, k.busy, k.idle, k.ratio, k.migrate), (false, 75, 10, 5, true));
        assert_eq!(k.interval, Duration::from_millis(100));
        assert_eq!(read(None).unwrap(), Settings::default());
    }

    #[test]
    fn what_is_given_counts() {
        let k = knobs("[balance]\nenabled = false\nbusy = 50\npatience_us = 20000\ngroups = 7").unwrap();
        assert_eq!((k.off, k.busy, k.idle, k.groups), (true, 50, 10, 7));
        assert_eq!(k.patience, Duration::from_millis(20));
    }

    #[test]
    fn bad_input_is_told() {
        for (text, why) in [
            ("[balance]\nbusy = 5", "idle < busy"),
            ("[balance]\nratio = 0", "ratio"),
            ("[balance]\npatience_us = 0", "patience_us"),
            ("[balance]\ninterval_ms = 1", "interval_ms"),
            ("[balance]\nbusi = 5", "busi"),
            ("[balance]\nbusy = \"x\"", "busy"),
        ] {
            let e = knobs(text).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
        let e = read(Some(Path::new("/nonexistent/file"))).unwrap_err().to_string();
        assert!(e.contains("/nonexistent/file"), "{e}");
    }

    #[test]
    fn nothing_is_announced_unless_wanted() {
        let hosts = |text: &str| {
            let s: Settings = toml::from_str(text).map_err(|e| e.to_string())?;
            s.hosts.check().map_err(|e| e.to_string())?;
            Ok::<_, String>(s.hosts.announced())
        };
        assert_eq!(hosts(""), Ok(None));
        assert_eq!(hosts("[hosts]\nnumber = 7"), Ok(None));
        let all = Announce { cgroup: None, number: 7 };
        assert_eq!(hosts("[hosts]\nannounce = true\nnumber = 7"), Ok(Some(all)));
        let some = Announce { cgroup: Some("/a".into()), number: LAST };
        assert_eq!(hosts("[hosts]\nannounce = true\nnumber = 16777215\ncgroup = \"/a\""), Ok(Some(some)));
        for (text, why) in [("number = 0", "number"), ("number = 16777216", "number"), ("cgroup = \"a\"", "cgroup")] {
            let e = hosts(&format!("[hosts]\n{text}")).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
    }

    fn rules(text: &str) -> Result<Rules, String> {
        understand("f", text).map(|s| s.rules).map_err(|e| e.to_string())
    }

    /// The manual page names each key, and its example is valid.
    #[test]
    fn the_manual_page_says_all() {
        let page = include_str!("../../../packaging/fastsocketd.toml.5");
        let said = |key: &str| page.lines().any(|l| l.starts_with(".B") && l.split_whitespace().any(|w| w == key));
        for table in ["", "[balance]\n", "[hosts]\n", "[[rule]]\naction = \"deny\"\n", "[[program]]\n"] {
            let e = toml::from_str::<Settings>(&format!("{table}nonsense = 1")).unwrap_err().to_string();
            let (_, keys) = e.split_once("expected one of ").expect("it lists the keys");
            for key in keys.split('`').skip(1).step_by(2) {
                assert!(said(key) || said(&format!("[{key}]")) || said(&format!("[[{key}]]")), "{key}: {e}");
            }
        }
        let example = page.split_once(".EX\n").and_then(|(_, rest)| rest.split_once(".EE")).unwrap().0;
        let settings = understand("example", example).unwrap();
        assert_eq!((settings.rules.share.len(), settings.rules.rules.len(), settings.programs.len()), (2, 2, 1));
    }

    #[test]
    fn rules_are_read_in_order() {
        use crate::policy::rules::{Action, Member};
        let r = rules(
            "share = [[\"root\", 33], [\"unit:nginx\", \"cgroup:/sys/fs/cgroup/a/\"]]\n\
             [[rule]]\naction = \"deny\"\nclient_user = \"root\"\nport = \"80-90\"\n\
             [[rule]]\naction = \"allow\"\naddress = \"127.0.0.0/8\"\nserver_exe = \"/bin/x\"\n",
        )
        .unwrap();
        let unit = Member::Unit("nginx.service".into());
        assert_eq!(r.share, [vec![Member::User(0), Member::User(33)], vec![unit, Member::Cgroup("/a".into())]]);
        assert_eq!(r.rules[0].action, Action::Deny);
        assert_eq!((r.rules[0].client.uid, r.rules[0].ports, r.rules[0].line), (Some(0), Some((80, 90)), 2));
        assert_eq!(r.rules[1].network.map(|n| n.bits), Some(104));
    }

    #[test]
    fn programs_are_read_in_order() {
        let text = "[[program]]\nexe = \"/bin/x\"\noff = true\n\n[[program]]\nunit = \"db\"\nzones = false\n\
                    spin = false\nstdio = false\nchannels = 3\n";
        let p = understand("f", text).unwrap().programs;
        assert_eq!((p[0].place.as_str(), p[0].off, p[0].no_zones, p[0].channels), ("f:1", true, false, None));
        assert_eq!((p[1].place.as_str(), p[1].unit.as_deref()), ("f:5", Some("db.service")));
        assert_eq!((p[1].off, p[1].no_zones, p[1].no_spin, p[1].channels), (false, true, true, Some(3)));
        assert_eq!((p[0].no_stdio, p[0].bits(), p[1].no_stdio, p[1].bits()), (false, 0, true, 7));
    }

    #[test]
    fn files_beside_are_read_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (main, beside) = (dir.path().join("f.toml"), dir.path().join("f.d"));
        std::fs::write(&main, "share = [[1, 2]]").unwrap();
        assert_eq!(read(Some(&main)).unwrap().rules.share.len(), 1);
        std::fs::create_dir(&beside).unwrap();
        std::fs::write(beside.join("b.toml"), "share = [[5, 6]]").unwrap();
        std::fs::write(beside.join("a.toml"), "share = [[3, 4]]\n[[rule]]\naction = \"deny\"").unwrap();
        std::fs::write(beside.join("c.toml~"), "nonsense").unwrap();
        use crate::policy::rules::Member::User;
        let r = read(Some(&main)).unwrap().rules;
        assert_eq!(r.share, [[User(1), User(2)], [User(3), User(4)], [User(5), User(6)]]);
        assert_eq!(r.rules.len(), 1);
        std::fs::write(beside.join("b.toml"), "\nshare = [[5]]").unwrap();
        let e = read(Some(&main)).unwrap_err().to_string();
        assert!(e.contains("b.toml:2: share"), "{e}");
        std::fs::write(beside.join("b.toml"), "[balance]\nbusy = 5").unwrap();
        let e = read(Some(&main)).unwrap_err().to_string();
        assert!(e.contains("b.toml") && e.contains("balance"), "{e}");
    }

    #[test]
    fn bad_rules_are_told_with_their_line() {
        let rule = |more: &str| format!("\n[[rule]]\naction = \"deny\"\n{more}\n");
        for (text, why) in [
            (rule("client_user = \"no-such-user\""), "f:4: unknown user 'no-such-user'"),
            (rule("server_group = \"no-such-group\""), "f:4: unknown group"),
            (rule("address = \"10.0.0.0/33\""), "f:4: address '10.0.0.0/33'"),
            (rule("address = \"10.0.0.1/8\""), "f:4: address '10.0.0.1/8': has bits"),
            (rule("address = \"localhost\""), "f:4: address 'localhost'"),
            (rule("port = 65536"), "f:4: a port"),
            (rule("port = \"9-8\""), "f:4: a port"),
            (rule("client_exe = \"nginx\""), "f:4: 'nginx' is not an absolute path"),
            (rule("prt = 1"), "prt"),
            ("[[rule]]\naction = \"drop\"".into(), "f:2: action 'drop'"),
            ("[[rule]]\nport = 1".into(), "action"),
            ("share = [[\"root\"]]".into(), "f:1: share: one line names at least two"),
            ("share = [\n[\"root\", 0]]".into(), "f:2: share: 0 is named twice"),
            ("share = [[\"root\", \"nosuch\"]]".into(), "unknown user 'nosuch'"),
            ("[[program]]\noff = true".into(), "f:1: a program is named by exe, unit or cgroup"),
            ("\n[[program]]\nexe = \"/bin/a\"".into(), "f:2: nothing is set: off, zones, spin, stdio or channels"),
            ("[[program]]\nexe = \"a\"\noff = true".into(), "f:2: 'a' is not an absolute path"),
            ("[[program]]\nunit = \"a/b\"\noff = true".into(), "f:2: 'a/b' names no unit"),
            ("[[program]]\ncgroup = \"a\"\noff = true".into(), "f:2: 'a' is not an absolute path"),
            ("[[program]]\nunit = \"a\"\nchannels = 0".into(), "f:3: channels 0: it is 1 or more"),
            ("[[program]]\nunit = \"a\"\nspin = 1".into(), "line 3, column 8"),
            ("[[program]]\nunit = \"a\"\nspn = true".into(), "unknown field `spn`, expected one of `exe`"),
            (
                "[[program]]\nunit = \"a\"\noff = true\n[[program]]\nunit = \"a.service\"\nspin = false".into(),
                "f:4: this program never matches: the one at f:1",
            ),
            (rule("") + &rule("port = 1"), "f:6: this rule never matches: the one in line 2"),
        ] {
            let e = rules(&text).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
    }
}
