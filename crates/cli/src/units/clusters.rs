//! Servers of PostgreSQL on Debian. `pg_ctlcluster` clears the environment of the unit, and takes the variables from a file
//! of each cluster, so `enable` adds a line to that file.

use anyhow::{ensure, Context, Result};
use rustix::fs::{Mode, OFlags};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{fchown, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const CLUSTERS: &str = "etc/postgresql";
const FILE: &str = "environment";
const MARK: &str = "# written by 'fastsocket enable'";

/// Writes the line for the clusters that a unit starts (`postgresql@15-main.service`: one; the template: all), or removes it
/// (`library`: `None`).
pub fn set(root: &Path, unit: &str, library: Option<&Path>) -> Result<()> {
    let Some(instance) = unit.strip_prefix("postgresql@").and_then(|rest| rest.strip_suffix(".service")) else {
        return Ok(());
    };
    let top = root.join(CLUSTERS);
    for cluster in clusters(&top, instance) {
        let set = open(&top, &cluster).and_then(|directory| set_one(&directory, library));
        set.with_context(|| cluster.join(FILE).display().to_string())?;
    }
    Ok(())
}

/// The directories of clusters that have such a file.
fn clusters(top: &Path, instance: &str) -> Vec<PathBuf> {
    let below = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let wanted = |path: &PathBuf| {
        let mut names = path.iter().rev().filter_map(|name| name.to_str());
        let (cluster, version) = (names.next().unwrap_or_default(), names.next().unwrap_or_default());
        instance.is_empty() || instance == format!("{version}-{cluster}")
    };
    below(top.to_owned()).flat_map(below).filter(wanted).filter(|path| path.join(FILE).exists()).collect()
}

/// The directories belong to the user of the server, who must not lead root to another one, so no symbolic link is followed.
fn open(top: &Path, cluster: &Path) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut directory = rustix::fs::open(top, flags, Mode::empty())?;
    for name in cluster.strip_prefix(top)? {
        directory = rustix::fs::openat(&directory, name, flags, Mode::empty())?;
    }
    Ok(directory)
}

/// Works in the opened directory, whatever its path leads to meanwhile.
fn set_one(directory: &OwnedFd, library: Option<&Path>) -> Result<()> {
    let directory = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    let file = directory.join(FILE);
    let mut old = fs::File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&file)?;
    let (mut text, now) = (String::new(), old.metadata()?);
    ensure!(now.is_file(), "not a regular file");
    old.read_to_string(&mut text)?;
    let mut new: String = text.split_inclusive('\n').filter(|line| !line.trim_end().ends_with(MARK)).collect();
    if let Some(library) = library {
        let sets = |line: &str| line.trim_start().starts_with("LD_PRELOAD");
        ensure!(!new.lines().any(sets), "sets LD_PRELOAD itself; add the library there");
        let end = if new.is_empty() || new.ends_with('\n') { "" } else { "\n" };
        new = format!("{new}{end}LD_PRELOAD = '{}' {MARK}\n", library.display());
    }
    if new == text {
        return Ok(());
    }
    let mut written = tempfile::NamedTempFile::new_in(&directory)?;
    written.write_all(new.as_bytes())?;
    fchown(written.as_file(), Some(now.uid()), Some(now.gid()))?;
    written.as_file().set_permissions(fs::Permissions::from_mode(now.mode() & 0o777))?;
    written.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_environment_of_clusters() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = |name: &str| dir.path().join(CLUSTERS).join(name);
        for name in ["15/main", "15/other", "16/main"] {
            fs::create_dir_all(cluster(name)).unwrap();
            fs::write(cluster(name).join("environment"), "# variables\nLANG = 'C'\n").unwrap();
        }
        let text = |name: &str| fs::read_to_string(cluster(name).join("environment")).unwrap();
        let has = |name: &str| text(name).contains(&format!("\nLD_PRELOAD = '/l/libfsocket.so' {MARK}\n"));
        let mode = fs::Permissions::from_mode(0o640);
        fs::set_permissions(cluster("15/main").join("environment"), mode).unwrap();
        let library = Some(Path::new("/l/libfsocket.so"));
        let root = dir.path();

        set(root, "postgresql@15-main.service", library).unwrap();
        assert!(has("15/main") && !has("15/other") && !has("16/main"));
        assert_eq!(cluster("15/main").join("environment").metadata().unwrap().mode() & 0o777, 0o640);
        set(root, "postgresql@.service", library).unwrap();
        assert!(["15/main", "15/other", "16/main"].iter().all(|name| has(name)));
        assert_eq!(text("15/main").matches("LD_PRELOAD").count(), 1);
        set(root, "redis@.service", None).unwrap();
        assert!(has("15/main"));
        set(root, "postgresql@.service", None).unwrap();
        assert!(["15/main", "15/other", "16/main"].iter().all(|name| text(name) == "# variables\nLANG = 'C'\n"));

        fs::write(cluster("15/main").join("environment"), "LD_PRELOAD = '/x.so'\n").unwrap();
        assert!(set(root, "postgresql@15-main.service", library).is_err());
        // The user of the server leads elsewhere, by the file or by its directory.
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join(FILE), "x\n").unwrap();
        fs::remove_file(cluster("16/main").join(FILE)).unwrap();
        symlink(elsewhere.join(FILE), cluster("16/main").join(FILE)).unwrap();
        symlink(&elsewhere, cluster("16/other")).unwrap();
        for unit in ["postgresql@16-main.service", "postgresql@16-other.service"] {
            assert!(set(root, unit, library).is_err(), "{unit}");
        }
        assert_eq!(fs::read_to_string(elsewhere.join(FILE)).unwrap(), "x\n");
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 1);
    }
}
