//! Finds programs that will lose the library: they start another program without it, or they run
//! with more rights, so that the loader ignores LD_PRELOAD. `fastsocket run` warns about them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Commands that start a program with an environment of their own, without LD_PRELOAD.
const SWITCH_USER: [&str; 5] = ["sudo", "su", "doas", "pkexec", "runuser"];

/// The reason why `program` will lose the library, or `None`. `path`: the file of the program.
pub fn why(program: &[OsString], path: Option<&Path>) -> Option<String> {
    let name = Path::new(program.first()?).file_name()?;
    let advice = "put 'fastsocket run --' behind it";
    if SWITCH_USER.iter().any(|known| name == *known) {
        return Some(format!("{} starts its program in another environment: {advice}", name.to_string_lossy()));
    }
    if name == "env" && clears(&program[1..]) {
        return Some(format!("env -i starts its program in an empty environment: {advice}"));
    }
    let why = gains_rights(path?)?;
    Some(format!("{} {why}: the loader ignores LD_PRELOAD for it", name.to_string_lossy()))
}

/// Whether the arguments of `env` request an empty environment.
fn clears(args: &[OsString]) -> bool {
    let own = args.iter().map(|a| a.as_bytes()).take_while(|a| a.starts_with(b"-") || a.contains(&b'='));
    let short = |a: &[u8]| a.starts_with(b"-") && a.contains(&b'i') && a[1..].iter().all(|c| b"i0v".contains(c));
    own.into_iter().any(|a| a == b"-" || a == b"--ignore-environment" || short(a))
}

/// Whether the file runs as another user or group, or with capabilities; then the loader ignores
/// LD_PRELOAD. `None` also if the caller already has these rights, because the loader then accepts
/// LD_PRELOAD.
fn gains_rights(path: &Path) -> Option<&'static str> {
    let file = std::fs::metadata(path).ok()?;
    if file.mode() & libc::S_ISUID != 0 && file.uid() != rustix::process::geteuid().as_raw() {
        return Some("is set-user-ID");
    }
    if file.mode() & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID | libc::S_IXGRP
        && file.gid() != rustix::process::getegid().as_raw()
    {
        return Some("is set-group-ID");
    }
    let mut none: [u8; 0] = [];
    let has = rustix::fs::getxattr(path, OsStr::new("security.capability"), &mut none[..]).is_ok();
    (has && !rustix::process::geteuid().is_root()).then_some("has capabilities by its file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn of(line: &str) -> Option<String> {
        why(&line.split(' ').map(OsString::from).collect::<Vec<_>>(), None)
    }

    #[test]
    fn commands_that_drop_it() {
        for line in ["sudo -u nobody nginx", "/usr/bin/su - x", "runuser -u x y", "env -i PATH=/bin x", "env - x"] {
            assert!(of(line).is_some_and(|why| why.contains("fastsocket run")), "{line}");
        }
        for line in ["env A=b -u B x -i", "env x", "nginx -i", "sudoku", "env --chdir=/ x"] {
            assert_eq!(of(line), None, "{line}");
        }
        assert!(of("env A=b --ignore-environment x").is_some());
    }

    #[test]
    fn files_that_give_rights() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mode = |mode| std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        let said = |uid: u32| {
            std::os::unix::fs::chown(file.path(), Some(uid), None).ok()?;
            mode(0o4755);
            gains_rights(file.path())
        };
        mode(0o755);
        assert_eq!(gains_rights(file.path()), None);
        assert_eq!(said(rustix::process::geteuid().as_raw()), None, "its own");
        if rustix::process::geteuid().is_root() {
            assert_eq!(said(65534), Some("is set-user-ID"));
        }
    }
}
