//! Classifies the program that is about to start. In doubt the program counts as one that does not
//! load the library.

use core::ffi::{c_char, CStr};
use fsocket_sys::{self as sys, Errno, Result};

/// A program that is about to start, as described by the arguments of an `exec` function.
pub struct Start<'a> {
    /// The directory from which relative names begin, or AT_FDCWD.
    pub dir: i32,
    /// Empty: `dir` is a descriptor of the program itself.
    pub file: &'a CStr,
    /// Directories to search for a name without a slash (`execvp`).
    pub path: Option<&'a [u8]>,
    pub env: *const *const c_char,
}

const NAME: usize = 4096;
/// The kernel reads only this much of a script's first line (BINPRM_BUF_SIZE).
const LINE: usize = 256;
/// The most interpreters of interpreters.
const DEPTH: usize = 4;
/// The directories that libc searches if PATH is not set.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

/// The effect of an attempt to start the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The start fails.
    Fails,
    /// The program will load the libraries in LD_PRELOAD.
    Loads,
    /// The program will not load the libraries, or nothing is known.
    Unknown,
}

/// An open file, closed when dropped.
struct File(i32);
impl Drop for File {
    fn drop(&mut self) {
        let _ = sys::close(self.0);
    }
}

impl Start<'_> {
    /// Is the name relative, so that it can mean another file in another directory?
    pub fn is_relative(&self) -> bool {
        !self.file.is_empty() && !self.file.to_bytes().starts_with(b"/")
    }

    fn open(&self) -> Result<File> {
        if self.file.is_empty() {
            return sys::fcntl(self.dir, libc::F_DUPFD_CLOEXEC, 0).map(File);
        }
        let name = self.file.to_bytes();
        let Some(list) = self.path.filter(|_| !name.contains(&b'/')) else {
            return open(self.dir, self.file);
        };
        let list = if list.is_empty() { DEFAULT_PATH } else { list };
        let found = list.split(|c| *c == b':').find_map(|dir| {
            let dir = if dir.is_empty() { b".".as_slice() } else { dir };
            let mut buf = [0u8; NAME];
            let end = dir.len() + 1 + name.len();
            if end >= NAME {
                return None;
            }
            buf[..dir.len()].copy_from_slice(dir);
            buf[dir.len()] = b'/';
            buf[dir.len() + 1..end].copy_from_slice(name);
            let file = open(libc::AT_FDCWD, CStr::from_bytes_until_nul(&buf).ok()?);
            // Like execvp, skips a file that is not executable.
            match file.as_ref().map(executable).map_err(|e| *e) {
                Ok(false) | Err(Errno::ENOENT | Errno::ENOTDIR) => None,
                _ => Some(file),
            }
        });
        found.unwrap_or(Err(Errno::ENOENT))
    }
}

fn open(dir: i32, name: &CStr) -> Result<File> {
    let args = [dir as usize, name.as_ptr() as usize, (libc::O_RDONLY | libc::O_CLOEXEC) as usize, 0, 0, 0];
    // SAFETY: the name is a NUL-terminated string.
    unsafe { sys::raw(libc::SYS_openat, args) }.map(|fd| File(fd as i32))
}

/// Is this a regular file with any execute permission?
fn executable(f: &File) -> bool {
    status(f).is_ok_and(|s| s.st_mode & libc::S_IFMT == libc::S_IFREG && s.st_mode & 0o111 != 0)
}

fn status(f: &File) -> Result<libc::stat> {
    // SAFETY: zero bytes are a valid `stat`.
    let mut s: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: on x86-64 the kernel's structure is that of libc.
    unsafe { sys::raw(libc::SYS_fstat, [f.0 as usize, &raw mut s as usize, 0, 0, 0, 0]) }?;
    Ok(s)
}

/// Does the loader of glibc or musl start the program, so that LD_PRELOAD has an effect?
pub fn fate(start: &Start) -> Fate {
    match start.open() {
        Err(Errno::ENOENT | Errno::ENOTDIR) => Fate::Fails,
        Ok(file) if !executable(&file) => Fate::Fails,
        Ok(file) => match loads_libraries(file) {
            true => Fate::Loads,
            false => Fate::Unknown,
        },
        Err(_) => Fate::Unknown,
    }
}

fn loads_libraries(mut file: File) -> bool {
    for _ in 0..DEPTH {
        let mut head = [0u8; NAME];
        // SAFETY: `head` has room for NAME bytes.
        let Ok(n) = (unsafe { sys::pread(file.0, head.as_mut_ptr(), NAME - 1, 0) }) else { return false };
        if !plain(&file) {
            return false;
        }
        let Some(line) = head[..n].strip_prefix(b"#!") else {
            return dynamic(&head[..n]);
        };
        let line = line.split(|c| *c == b'\n').next().unwrap_or_default();
        let line = &line[..line.len().min(LINE - 1)];
        let blank = |c: &u8| matches!(c, b' ' | b'\t');
        let first = line.iter().position(|c| !blank(c)).unwrap_or(line.len());
        let name = line[first..].split(blank).next().unwrap_or_default();
        let mut buf = [0u8; LINE];
        buf[..name.len()].copy_from_slice(name);
        let next = CStr::from_bytes_until_nul(&buf).ok().filter(|n| !n.is_empty());
        let Some(interpreter) = next.and_then(|n| open(libc::AT_FDCWD, n).ok()) else { return false };
        file = interpreter;
    }
    false
}

/// Is this a regular file without set-user-ID and without capabilities? (For the others the loader
/// ignores LD_PRELOAD.)
fn plain(f: &File) -> bool {
    let Ok(s) = status(f) else { return false };
    let args = [f.0 as usize, c"security.capability".as_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the name is NUL-terminated, and with length 0 the kernel writes nothing.
    let capable = unsafe { sys::raw(libc::SYS_fgetxattr, args) }.is_ok();
    s.st_mode & libc::S_IFMT == libc::S_IFREG && s.st_mode & (libc::S_ISUID | libc::S_ISGID) == 0 && !capable
}

/// Is this an ELF file for this machine whose interpreter is the loader of glibc or musl?
fn dynamic(head: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    const MACHINE: u16 = 62;
    let u16_at = |at: usize| head.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    let word = |at: usize| head.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    if !head.starts_with(b"\x7fELF\x02\x01") || u16_at(18) != Some(MACHINE) {
        return false;
    }
    let (Some(first), Some(size), Some(count)) = (word(32), u16_at(54), u16_at(56)) else { return false };
    (0..count as usize).any(|i| {
        let at = (first as usize).saturating_add(i * size as usize);
        let kind = head.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        if kind != Some(PT_INTERP) {
            return false;
        }
        let (Some(from), Some(len)) = (word(at + 8), word(at + 32)) else { return false };
        let name = (from as usize).checked_add(len as usize).and_then(|to| head.get(from as usize..to));
        name.is_some_and(|n| n.windows(8).any(|w| matches!(w, b"ld-linux" | b"ld-musl-")))
    })
}

/// Is this the running binary, or a new version in its place?
pub fn is_this_one(start: &Start) -> bool {
    let Ok(file) = start.open() else { return false };
    let (Ok(next), Ok(Ok(this))) = (status(&file), open(libc::AT_FDCWD, c"/proc/self/exe").map(|f| status(&f))) else {
        return false;
    };
    if (next.st_dev, next.st_ino) == (this.st_dev, this.st_ino) {
        return true;
    }
    let mut link = [0u8; NAME];
    let args =
        [libc::AT_FDCWD as usize, c"/proc/self/exe".as_ptr() as usize, link.as_mut_ptr() as usize, NAME - 1, 0, 0];
    // SAFETY: `link` has room for that many bytes.
    let Ok(n) = (unsafe { sys::raw(libc::SYS_readlinkat, args) }) else { return false };
    link[..n].strip_suffix(b" (deleted)").is_some_and(|was| was == start.file.to_bytes())
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::ffi::CString;
    use std::os::unix::fs::PermissionsExt;

    fn fate_of(path: &std::path::Path) -> Fate {
        let file = CString::new(path.to_str().unwrap()).unwrap();
        fate(&Start { dir: libc::AT_FDCWD, file: &file, path: None, env: core::ptr::null() })
    }

    #[test]
    fn programs_are_told_apart() {
        let dir = std::env::temp_dir().join(std::format!("fsocket-program-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let put = |name: &str, content: &[u8], mode: u32| {
            let p = dir.join(name);
            std::fs::write(&p, content).unwrap();
            std::fs::set_permissions(&p, std::fs::Permissions::from_mode(mode)).unwrap();
            p
        };
        let me = std::fs::read("/bin/cat").unwrap();
        let loads = |path: &std::path::Path| fate_of(path) == Fate::Loads;
        assert!(loads(std::path::Path::new("/bin/cat")));
        assert!(loads(&put("script", b"#! /bin/sh -e\nexit\n", 0o755)));
        assert!(loads(&put("again", std::format!("#!{}\n", dir.join("script").display()).as_bytes(), 0o755)));
        assert!(!loads(&put("suid", &me, 0o4755)), "set-user-ID");
        assert!(!loads(&put("text", b"exit\n", 0o755)), "no interpreter");
        assert!(!loads(&put("loop", std::format!("#!{}\n", dir.join("loop").display()).as_bytes(), 0o755)));
        assert!(!loads(&put("short", &me[..40], 0o755)), "cut off");
        let mut foreign = me.clone();
        foreign[18] = 3;
        assert!(!loads(&put("foreign", &foreign, 0o755)), "another machine");
        assert_eq!(fate_of(&dir.join("missing")), Fate::Fails);
        assert_eq!(fate_of(&put("data", &me, 0o644)), Fate::Fails);
        assert_eq!(fate_of(&dir.join("text")), Fate::Unknown);
        let found = |name: &CStr, path: &str| {
            Start { dir: libc::AT_FDCWD, file: name, path: Some(path.as_bytes()), env: core::ptr::null() }
                .open()
                .is_ok()
        };
        put("cat", b"not executable", 0o644);
        let path = std::format!("{}:/nowhere:/bin", dir.display());
        assert!(found(c"cat", &path) && !found(c"no-such-program", &path));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
