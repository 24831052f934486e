//! Programs that start another one without the library, or are started without it themselves: `fastsocket run` says so.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Commands that start a program in an environment of their own choice.
const SWITCH_USER: [&str; 5] = ["sudo", "su", "doas", "pkexec", "runuser"];

/// Why the library is lost, if it is; `path`: the file of the program.
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

/// Do `env`'s own arguments say that it begins with an empty environment?
fn clears(args: &[OsString]) -> bool {
    let own = args.iter().map(|a| a.as_bytes()).take_while(|a| a.starts_with(b"-") || a.contains(&b'='));
    let short = |a: &[u8]| a.starts_with(b"-") && a.contains(&b'i') && a[1..].iter().all(|c| b"i0v".contains(c));
    own.into_iter().any(|a| a == b"-" || a == b"--ignore-environment" || short(a))
}

/// Is it another user's or group's by its file, or has it capabilities? (With the rights that one has already the loader
/// is not careful.)
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
