//! `fastsocket enable` and `disable`: drop-ins of systemd units, which are the only record of enabled units (ADR 44).

mod clusters;

use crate::cmdline::{Disable, Enable};
use anyhow::{anyhow, bail, ensure, Context, Result};
use fsocket_client::locate;
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where units are, below the root.
const PLACES: [&str; 5] = [
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];
/// Where drop-ins go.
const DROP_INS: &str = PLACES[0];
const DROP_IN: &str = "fastsocket.conf";
/// The monitor reads this file; see its `settings.rs`.
const POLICY: &str = "etc/fastsocket/fastsocketd.d/enabled-units.toml";
const HEADER: &str = "# Written by 'fastsocket enable', removed by 'fastsocket disable'.\n";

/// `fastsocket enable`. All units are enabled or none: nothing is written unless every unit is found, and a failure
/// removes what was written.
pub fn enable(args: &Enable) -> Result<i32> {
    let library = locate::library(args.library.as_deref()).map_err(|e| anyhow!(e))?;
    let names = with_templates(&args.root, &args.units)?;
    names.iter().try_for_each(|name| check(&args.root, name))?;
    let before = enabled(&args.root)?;
    let put = |name: &String| {
        write(&drop_in(&args.root, name), &conf(&library))?;
        clusters::set(&args.root, name, Some(&library))
    };
    let all = || names.iter().try_for_each(put);
    if let Err(e) = all().and_then(|()| policy(&args.root)) {
        names.difference(&before).for_each(|name| drop(forget(&args.root, name)));
        return Err(e);
    }
    reload(&args.root);
    let names: Vec<String> = names.iter().map(|name| to_restart(name)).collect();
    anstream::println!("enabled; from the next start on: systemctl restart fastsocketd {}", names.join(" "));
    Ok(0)
}

/// `fastsocket disable`. A unit that is not enabled is no error.
pub fn disable(args: &Disable) -> Result<i32> {
    let names = match args.all {
        true => enabled(&args.root)?,
        false => with_templates(&args.root, &args.units)?,
    };
    names.iter().try_for_each(|name| forget(&args.root, name))?;
    policy(&args.root)?;
    reload(&args.root);
    Ok(0)
}

/// The full names of units, and of the templates whose instances are part of them (`PartOf`). Debian's `postgresql.service`
/// starts no server itself: its instances, as `postgresql@15-main.service`, do.
fn with_templates(root: &Path, units: &[String]) -> Result<BTreeSet<String>> {
    let mut names = units.iter().map(|unit| full_name(unit)).collect::<Result<BTreeSet<_>>>()?;
    let template = |name: &String| {
        let template = format!("{}@.service", name.strip_suffix(".service")?);
        let part_of = format!("PartOf={name}");
        let texts = PLACES.iter().filter_map(|place| fs::read_to_string(root.join(place).join(&template)).ok());
        let is_part = |text: String| text.lines().any(|l| l.trim() == part_of);
        texts.map(is_part).next().unwrap_or(false).then_some(template)
    };
    let templates: Vec<String> = names.iter().filter_map(template).collect();
    names.extend(templates);
    Ok(names)
}

/// The argument of `systemctl restart` in a shell. A template has no process, but its instances match the pattern.
fn to_restart(name: &str) -> String {
    match name.strip_suffix("@.service") {
        Some(before) => format!("'{before}@*.service'"),
        None => name.to_owned(),
    }
}

/// With its suffix; only services have programs.
pub fn full_name(unit: &str) -> Result<String> {
    let is_name = |b: u8| b.is_ascii_alphanumeric() || b":-_.\\@".contains(&b);
    ensure!(
        !unit.is_empty() && !unit.starts_with('.') && unit.bytes().all(is_name),
        "{unit:?} is not the name of a unit"
    );
    const OTHERS: [&str; 9] =
        [".socket", ".target", ".timer", ".mount", ".slice", ".scope", ".path", ".device", ".swap"];
    ensure!(!OTHERS.iter().any(|suffix| unit.ends_with(suffix)), "{unit}: only services can be enabled");
    Ok(if unit.ends_with(".service") { unit.to_owned() } else { format!("{unit}.service") })
}

fn drop_in(root: &Path, name: &str) -> PathBuf {
    root.join(DROP_INS).join(format!("{name}.d")).join(DROP_IN)
}

/// Removes Fastsocket's drop-in. Drop-ins of others stay.
fn forget(root: &Path, name: &str) -> Result<()> {
    let file = drop_in(root, name);
    remove(&file)?;
    let _ = file.parent().map(fs::remove_dir);
    clusters::set(root, name, None)
}

/// The unit exists and preloads no library, whose setting the drop-in would replace.
fn check(root: &Path, name: &str) -> Result<()> {
    // `user@1000.service` is made from `user@.service`.
    let template = name.split_once('@').map(|(before, _)| format!("{before}@.service"));
    let names: Vec<&str> = [name].into_iter().chain(template.as_deref()).collect();
    let mut exists = false;
    for place in PLACES.iter().map(|place| root.join(place)) {
        for name in &names {
            let main = place.join(name);
            exists |= main.exists();
            let more = fs::read_dir(place.join(format!("{name}.d"))).into_iter().flatten().flatten().map(|e| e.path());
            let files = more.filter(|p| p.file_name().is_some_and(|n| n != DROP_IN)).chain([main]);
            for file in files {
                let text = fs::read_to_string(&file).unwrap_or_default();
                let is_preload = |l: &str| !l.trim_start().starts_with(['#', ';']) && l.contains("LD_PRELOAD=");
                if text.lines().any(is_preload) {
                    bail!("{}: sets LD_PRELOAD itself; add the library there", file.display());
                }
            }
        }
    }
    ensure!(exists, "there is no unit {name}");
    Ok(())
}

fn conf(library: &Path) -> String {
    // (Of libuv: a ring that the kernel polls would take all sockets of the process to the kernel.)
    format!(
        "{HEADER}[Unit]\nWants=fastsocketd.service\nAfter=fastsocketd.service\n\n\
         [Service]\nEnvironment=LD_PRELOAD={}\nEnvironment=UV_USE_IO_URING=0\n",
        library.display()
    )
}

/// Units that have Fastsocket's drop-in.
fn enabled(root: &Path) -> Result<BTreeSet<String>> {
    let directory = root.join(DROP_INS);
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(e) => return Err(e).with_context(|| directory.display().to_string()),
    };
    let with_ours = entries.flatten().filter(|e| e.path().join(DROP_IN).exists());
    let names = with_ours.filter_map(|e| Some(e.file_name().to_str()?.strip_suffix(".d")?.to_owned()));
    Ok(names.collect())
}

/// Tells the monitor which units may share memory.
fn policy(root: &Path) -> Result<()> {
    let units: Vec<String> =
        enabled(root)?.iter().map(|name| format!("\"unit:{}\"", name.replace('\\', "\\\\"))).collect();
    let file = root.join(POLICY);
    // A unit shares with itself in any case.
    if units.len() < 2 {
        remove(&file)?;
        let _ = file.parent().map(fs::remove_dir);
        return Ok(());
    }
    write(&file, &format!("{HEADER}share = [[{}]]\n", units.join(", ")))
}

/// Writes a file so that readers find the old or the new one.
fn write(file: &Path, text: &str) -> Result<()> {
    let failed = || file.display().to_string();
    let directory = file.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory).with_context(failed)?;
    let mut new = tempfile::NamedTempFile::new_in(directory).with_context(failed)?;
    std::io::Write::write_all(&mut new, text.as_bytes()).with_context(failed)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    new.as_file().set_permissions(mode).with_context(failed)?;
    new.persist(file).with_context(failed)?;
    Ok(())
}

fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Err(e).with_context(|| file.display().to_string())
        }
        _ => Ok(()),
    }
}

/// Makes systemd read its units again, if it runs.
fn reload(root: &Path) {
    if root != Path::new("/") || !Path::new("/run/systemd/system").exists() {
        return;
    }
    if !Command::new("systemctl").arg("daemon-reload").status().is_ok_and(|s| s.success()) {
        eprintln!("fastsocket: warning: systemctl daemon-reload failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root with three units, and a library.
    fn root() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let units = dir.path().join("lib/systemd/system");
        fs::create_dir_all(&units).unwrap();
        fs::write(units.join("nginx.service"), "[Service]\nExecStart=/usr/sbin/nginx\n# LD_PRELOAD=no\n").unwrap();
        fs::write(units.join("redis@.service"), "[Service]\nExecStart=/usr/bin/redis-server\n").unwrap();
        fs::write(units.join("db.service"), "[Service]\nExecStart=/bin/true\n").unwrap();
        fs::write(units.join("db@.service"), "[Unit]\nPartOf=db.service\n").unwrap();
        fs::write(units.join("redis.service"), "[Service]\nExecStart=/usr/bin/redis-server\n").unwrap();
        fs::write(units.join("own.service"), "[Service]\nEnvironment=LD_PRELOAD=/x.so\n").unwrap();
        let library = dir.path().join("libfsocket.so");
        let mut header = fs::read("/proc/self/exe").unwrap();
        header.truncate(64);
        header[16] = 3;
        fs::write(&library, header).unwrap();
        (dir, library)
    }

    fn enable_at(root: &Path, library: &Path, units: &[&str]) -> Result<i32> {
        let units = units.iter().map(|u| (*u).to_owned()).collect();
        enable(&Enable { units, root: root.to_owned(), library: Some(library.to_owned()) })
    }

    fn disable_at(root: &Path, units: &[&str], all: bool) {
        let units = units.iter().map(|u| (*u).to_owned()).collect();
        disable(&Disable { units, all, root: root.to_owned() }).unwrap();
    }

    #[test]
    fn units_are_enabled_and_disabled() {
        let (dir, library) = root();
        let root = dir.path();
        enable_at(root, &library, &["nginx"]).unwrap();
        let text = fs::read_to_string(drop_in(root, "nginx.service")).unwrap();
        assert!(text.contains(&format!("Environment=LD_PRELOAD={}\n", library.display())), "{text}");
        assert!(!root.join(POLICY).exists(), "one unit shares with nobody");
        enable_at(root, &library, &["redis@a.service", "nginx.service"]).unwrap();
        let text = fs::read_to_string(root.join(POLICY)).unwrap();
        assert_eq!(text.lines().last(), Some("share = [[\"unit:nginx.service\", \"unit:redis@a.service\"]]"));
        fs::write(drop_in(root, "nginx.service").with_file_name("other.conf"), "").unwrap();
        disable_at(root, &["nginx", "never-enabled"], false);
        assert!(!root.join(POLICY).exists());
        assert!(drop_in(root, "nginx.service").with_file_name("other.conf").exists());
        disable_at(root, &[], true);
        assert!(enabled(root).unwrap().is_empty() && !root.join("etc/fastsocket/fastsocketd.d").exists());
        assert!(!drop_in(root, "redis@a.service").parent().unwrap().exists());
        disable_at(root, &[], true);
    }

    #[test]
    fn a_unit_that_stands_for_instances_enables_them() {
        let (dir, library) = root();
        let root = dir.path();
        enable_at(root, &library, &["db", "redis"]).unwrap();
        let names = enabled(root).unwrap().into_iter().collect::<Vec<_>>();
        // The template `redis@.service` is no part of the unit `redis.service`.
        assert_eq!(names, ["db.service", "db@.service", "redis.service"]);
        assert_eq!([to_restart("db.service"), to_restart("db@.service")], ["db.service", "'db@*.service'"]);
        disable_at(root, &["db"], false);
        assert_eq!(enabled(root).unwrap().into_iter().collect::<Vec<_>>(), ["redis.service"]);
    }

    #[test]
    fn nothing_is_written_for_a_unit_that_is_not_there() {
        let (dir, library) = root();
        for (units, why) in [
            (&["nginx", "nowhere"][..], "no unit nowhere.service"),
            (&["nginx", "own"], "LD_PRELOAD itself"),
            (&["nginx.socket"], "only services"),
            (&["../nginx"], "not the name"),
            (&[""], "not the name"),
        ] {
            let e = enable_at(dir.path(), &library, units).unwrap_err().to_string();
            assert!(e.contains(why), "{e}");
        }
        assert!(enable_at(dir.path(), Path::new("/nowhere.so"), &["nginx"]).is_err());
        assert!(!dir.path().join("etc").exists());
    }

    /// A file lies where the directory of the second one would be; then where the monitor's would.
    #[test]
    fn nothing_is_left_if_not_all_can_be_written() {
        let (dir, library) = root();
        let root = dir.path();
        enable_at(root, &library, &["redis@a"]).unwrap();
        for taken in ["etc/systemd/system/redis@b.service.d", "etc/fastsocket"] {
            fs::write(root.join(taken), "").unwrap();
            let e = enable_at(root, &library, &["nginx", "redis@a", "redis@b"]).unwrap_err();
            assert!(format!("{e:#}").contains(taken), "{e:#}");
            assert_eq!(enabled(root).unwrap().into_iter().collect::<Vec<_>>(), ["redis@a.service"]);
            assert!(!drop_in(root, "nginx.service").parent().unwrap().exists());
            fs::remove_file(root.join(taken)).unwrap();
        }
    }
}
