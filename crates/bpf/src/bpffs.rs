//! Pins of BPF objects that must outlive their loader's process. They are in folders below
//! [`ROOT`], one for each concern, and a folder is removed as a whole.

use crate::probe::Missing;
use crate::{Error, Result};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{fs, mem};

/// Where the BPF file system is, by convention.
pub const MOUNT: &str = "/sys/fs/bpf";
/// Name of the folder [`ROOT`] in that file system.
const NAME: &str = "fastsocket";
/// The folder for the pins of Fastsocket.
pub const ROOT: &str = "/sys/fs/bpf/fastsocket";

/// From linux/magic.h.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// The folder of a concern below [`ROOT`], with mode 0700. If necessary, this mounts the file
/// system and makes the folder.
///
/// # Errors
/// [`Missing::Bpffs`] if it cannot be mounted; [`Error::NotOurs`] if another user has made the
/// folder or could replace it; [`Error::File`].
pub fn folder(concern: &str) -> Result<PathBuf> {
    mount()?;
    folder_in(Path::new(MOUNT), concern)
}

fn folder_in(mount: &Path, concern: &str) -> Result<PathBuf> {
    let (path, root) = root(mount, true)?;
    let folder = path.join(concern);
    own(root.as_fd(), &folder, true)?;
    Ok(folder)
}

/// Opens the folder of all concerns. Only root can replace it or write to it, so paths below it
/// can be trusted.
fn root(mount: &Path, make: bool) -> Result<(PathBuf, OwnedFd)> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(mount, flags, Mode::empty()).map_err(|e| Error::file(mount, e))?;
    let st = rustix::fs::fstat(&fd).map_err(|e| Error::file(mount, e))?;
    let others_write = st.st_mode & 0o022 != 0 && st.st_mode & libc::S_ISVTX == 0;
    if st.st_uid != rustix::process::geteuid().as_raw() && st.st_uid != 0 || others_write {
        return Err(not_ours(mount, "others can replace what is there"));
    }
    let path = mount.join(NAME);
    let root = own(fd.as_fd(), &path, make)?;
    Ok((path, root))
}

/// Opens a folder that this user has made. `make`: makes it if it does not exist. `path`: its
/// path for messages; the last part is looked up in `parent`, and a link is not followed.
fn own(parent: BorrowedFd<'_>, path: &Path, make: bool) -> Result<OwnedFd> {
    let name = path.file_name().ok_or_else(|| not_ours(path, "it has no name"))?;
    if make {
        match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(Error::file(path, e)),
        }
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(Errno::LOOP | Errno::NOTDIR) => return Err(not_ours(path, "it is a link or a file, and no folder")),
        Err(e) => return Err(Error::file(path, e)),
    };
    let st = rustix::fs::fstat(&fd).map_err(|e| Error::file(path, e))?;
    if st.st_uid != rustix::process::geteuid().as_raw() {
        return Err(not_ours(path, &format!("user {} has made it", st.st_uid)));
    }
    if st.st_mode & 0o022 != 0 {
        return Err(not_ours(path, "others can write there"));
    }
    rustix::fs::fchmod(&fd, Mode::RWXU).map_err(|e| Error::file(path, e))?;
    Ok(fd)
}

fn not_ours(path: &Path, why: &str) -> Error {
    Error::NotOurs { path: path.to_owned(), why: why.to_owned() }
}

/// Removes a concern's folder with all its pins. It is no error if there is none. Removes
/// [`ROOT`] as well once it is empty. Never unmounts the file system, because others may use it.
///
/// # Errors
/// [`Error::NotOurs`]; [`Error::File`]: something could not be removed, but everything else was.
pub fn remove(concern: &str) -> Result<()> {
    remove_in(Path::new(MOUNT), concern)
}

fn remove_in(mount: &Path, concern: &str) -> Result<()> {
    let found = root(mount, false).and_then(|(path, root)| {
        let folder = path.join(concern);
        own(root.as_fd(), &folder, false).map(|_| (path, folder))
    });
    let (root, folder) = match found {
        Ok(found) => found,
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let mut failed = None;
    for pin in fs::read_dir(&folder).map_err(|e| Error::file(&folder, e))?.flatten() {
        if let Err(e) = fs::remove_file(pin.path()) {
            failed = Some(Error::file(pin.path(), e));
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    fs::remove_dir(&folder).map_err(|e| Error::file(&folder, e))?;
    // (This fails while another concern has a folder there.)
    let _ = fs::remove_dir(root);
    Ok(())
}

/// Mounts bpffs at [`MOUNT`], unless it is mounted already.
fn mount() -> Result<()> {
    if is_bpffs(MOUNT) {
        return Ok(());
    }
    let failed = |e: io::Error| Error::Missing(Missing::Bpffs(MOUNT.to_owned(), e.to_string()));
    let place = CString::new(MOUNT).expect("no NUL in it");
    let bpf = c"bpf".as_ptr();
    // SAFETY: all pointers are C strings that live during the call.
    let result = unsafe { libc::mount(bpf, place.as_ptr(), bpf, 0, c"mode=0700".as_ptr().cast()) };
    if result == 0 {
        Ok(())
    } else {
        Err(failed(io::Error::last_os_error()))
    }
}

fn is_bpffs(path: &str) -> bool {
    let Ok(path) = CString::new(Path::new(path).as_os_str().as_bytes()) else { return false };
    // SAFETY: statfs is plain data, for which zero is valid.
    let mut s: libc::statfs = unsafe { mem::zeroed() };
    // SAFETY: `path` is a C string, and `s` has room for the answer.
    let result = unsafe { libc::statfs(path.as_ptr(), &mut s) };
    result == 0 && s.f_type as i64 == BPF_FS_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink, MetadataExt, PermissionsExt};

    /// A directory like a bpffs to which any user may write.
    fn anybodys() -> Option<(PathBuf, PathBuf)> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: not root");
            return None;
        }
        let base = std::env::temp_dir().join(format!("bpffs-{}-{:?}", std::process::id(), std::thread::current().id()));
        let (mount, theirs) = (base.join("bpf"), base.join("theirs"));
        for (path, mode) in [(&mount, 0o1777), (&theirs, 0o755)] {
            fs::create_dir_all(path).unwrap();
            fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
        Some((mount, theirs))
    }

    /// Both functions refuse, and the target of the link stays unchanged.
    fn is_refused(mount: &Path, theirs: &Path) {
        for result in [folder_in(mount, "zone").map(drop), remove_in(mount, "zone")] {
            assert!(matches!(result, Err(Error::NotOurs { .. })), "{result:?}");
        }
        assert_eq!(fs::metadata(theirs).unwrap().mode() & 0o7777, 0o755);
        fs::remove_dir_all(mount.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_link_is_not_followed() {
        let Some((mount, theirs)) = anybodys() else { return };
        symlink(&theirs, mount.join(NAME)).unwrap();
        is_refused(&mount, &theirs);
    }

    #[test]
    fn nor_a_link_in_a_folder_of_somebody_else() {
        let Some((mount, theirs)) = anybodys() else { return };
        let root = mount.join(NAME);
        fs::create_dir(&root).unwrap();
        symlink(&theirs, root.join("zone")).unwrap();
        fs::write(theirs.join("file"), b"").unwrap();
        chown(&root, Some(65534), Some(65534)).unwrap();
        is_refused(&mount, &theirs);
    }

    #[test]
    fn nor_is_a_folder_used_that_others_can_replace_or_write_to() {
        let Some((mount, theirs)) = anybodys() else { return };
        fs::set_permissions(&mount, PermissionsExt::from_mode(0o777)).unwrap();
        is_refused(&mount, &theirs);
        let Some((mount, theirs)) = anybodys() else { return };
        fs::create_dir(mount.join(NAME)).unwrap();
        fs::set_permissions(mount.join(NAME), PermissionsExt::from_mode(0o777)).unwrap();
        is_refused(&mount, &theirs);
    }

    #[test]
    fn own_folders_are_made_and_removed() {
        let Some((mount, _)) = anybodys() else { return };
        let folder = folder_in(&mount, "zone").unwrap();
        fs::write(folder.join("pin"), b"").unwrap();
        assert_eq!(folder_in(&mount, "zone").unwrap(), folder);
        assert_eq!(fs::metadata(mount.join(NAME)).unwrap().mode() & 0o7777, 0o700);
        remove_in(&mount, "zone").unwrap();
        assert!(!mount.join(NAME).exists());
        remove_in(&mount, "zone").unwrap();
        fs::remove_dir_all(mount.parent().unwrap()).unwrap();
    }

    #[test]
    fn leaves_nothing() {
        if let Err(reason) = crate::probe::permitted() {
            println!("SKIPPED: leaves_nothing: {reason}");
            return;
        }
        let concern = format!("test-{}", std::process::id());
        let folder = folder(&concern).unwrap();
        assert!(is_bpffs(folder.to_str().unwrap()));
        let map = libbpf_rs::MapHandle::create(
            libbpf_rs::MapType::Array,
            Some("pinned"),
            4,
            8,
            1,
            &libbpf_rs::libbpf_sys::bpf_map_create_opts {
                sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as u64,
                ..Default::default()
            },
        );
        map.unwrap().pin(folder.join("map")).unwrap();
        remove(&concern).unwrap();
        assert!(!folder.exists());
        remove(&concern).unwrap();
    }
}
