//! Pins: what outlives the process that loaded it lies below [`ROOT`], one
//! folder a concern, and is removed folder by folder.

use crate::probe::Missing;
use crate::{Error, Result};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{fs, mem};

/// Where the BPF file system is, by convention.
pub const MOUNT: &str = "/sys/fs/bpf";
/// Where our pins are.
pub const ROOT: &str = "/sys/fs/bpf/fastsocket";

/// From linux/magic.h.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// The folder of a concern below [`ROOT`], mode 0700; the file system is mounted
/// and the folder made if need be.
///
/// # Errors
/// [`Missing::Bpffs`] where it cannot be mounted; [`Error::File`].
pub fn folder(concern: &str) -> Result<PathBuf> {
    mount()?;
    let folder = Path::new(ROOT).join(concern);
    fs::create_dir_all(&folder).map_err(|e| Error::file(&folder, e))?;
    for path in [Path::new(ROOT), &folder] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(path, mode).map_err(|e| Error::file(path, e))?;
    }
    Ok(folder)
}

/// Removes a concern's folder with all its pins; nothing there is no error.
/// Removes [`ROOT`] too once it is empty. Never unmounts: others may use it.
///
/// # Errors
/// [`Error::File`]: something could not be removed; the rest is.
pub fn remove(concern: &str) -> Result<()> {
    let folder = Path::new(ROOT).join(concern);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::file(&folder, e)),
    };
    let mut failed = None;
    for pin in entries.flatten() {
        if let Err(e) = fs::remove_file(pin.path()) {
            failed = Some(Error::file(pin.path(), e));
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    fs::remove_dir(&folder).map_err(|e| Error::file(&folder, e))?;
    // Not empty: another concern's.
    let _ = fs::remove_dir(ROOT);
    Ok(())
}

/// Mounts bpffs at [`MOUNT`] unless it is there.
fn mount() -> Result<()> {
    if is_bpffs(MOUNT) {
        return Ok(());
    }
    let failed = |e: io::Error| Error::Missing(Missing::Bpffs(MOUNT.to_owned(), e.to_string()));
    let place = CString::new(MOUNT).expect("no NUL in it");
    let bpf = c"bpf".as_ptr();
    // SAFETY: C strings throughout.
    let result = unsafe { libc::mount(bpf, place.as_ptr(), bpf, 0, c"mode=0700".as_ptr().cast()) };
    if result == 0 {
        Ok(())
    } else {
        Err(failed(io::Error::last_os_error()))
    }
}

fn is_bpffs(path: &str) -> bool {
    let Ok(path) = CString::new(Path::new(path).as_os_str().as_bytes()) else { return false };
    // SAFETY: statfs is plain data.
    let mut s: libc::statfs = unsafe { mem::zeroed() };
    // SAFETY: a C string and room for the answer.
    let result = unsafe { libc::statfs(path.as_ptr(), &mut s) };
    result == 0 && s.f_type as i64 == BPF_FS_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;

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
