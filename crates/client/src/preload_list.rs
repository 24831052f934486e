//! The list of libraries in `LD_PRELOAD`.

use crate::locate;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// Returns the value of `LD_PRELOAD` that has the library first (after the runtimes of sanitizers), and only once.
/// Other entries stay.
pub fn preload_list(now: Option<OsString>, library: &Path) -> OsString {
    let now = now.unwrap_or_default();
    let entries: Vec<&[u8]> = entries(&now).collect();
    let same = |e: &[u8]| Path::new(OsStr::from_bytes(e)).canonicalize().is_ok_and(|p| p == library);
    if entries.iter().any(|e| same(e)) {
        return now;
    }
    let (before, after): (Vec<&[u8]>, Vec<&[u8]>) = entries.into_iter().partition(|e| is_sanitizer(e));
    // Other builds of the library are removed: two builds would hook each other.
    let stranger = |e: &&[u8]| !is_library(e);
    let ours = library.as_os_str().as_bytes();
    let list: Vec<&[u8]> = before.into_iter().chain([ours]).chain(after.into_iter().filter(stranger)).collect();
    OsString::from_vec(list.join(&b':'))
}

/// Is this the runtime of a sanitizer? A preloaded sanitizer watches the program from before the library.
fn is_sanitizer(entry: &[u8]) -> bool {
    let name = Path::new(OsStr::from_bytes(entry)).file_name().unwrap_or_default().as_bytes();
    [&b"libasan."[..], b"libtsan.", b"liblsan.", b"libubsan.", b"libclang_rt."].iter().any(|p| name.starts_with(p))
}

/// Entries of a list of libraries.
fn entries(list: &OsStr) -> impl Iterator<Item = &[u8]> {
    list.as_bytes().split(|b| matches!(b, b':' | b' ')).filter(|e| !e.is_empty())
}

/// Is this our library, of any build?
fn is_library(entry: &[u8]) -> bool {
    Path::new(OsStr::from_bytes(entry)).file_name() == Some(OsStr::new(locate::LIBRARY))
}

/// `LD_PRELOAD` for a program that cannot load the library.
pub fn without_library(list: &OsStr) -> OsString {
    OsString::from_vec(entries(list).filter(|e| !is_library(e)).collect::<Vec<_>>().join(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preload(now: &str) -> String {
        preload_list(Some(now.into()), Path::new("/opt/fs/libfsocket.so")).into_string().unwrap()
    }

    #[test]
    fn library_goes_first_and_others_stay() {
        assert_eq!(preload(""), "/opt/fs/libfsocket.so");
        assert_eq!(preload("/a.so:/b.so c.so"), "/opt/fs/libfsocket.so:/a.so:/b.so:c.so");
    }

    #[test]
    fn another_build_is_replaced() {
        assert_eq!(preload("/x/libfsocket.so:/b.so"), "/opt/fs/libfsocket.so:/b.so");
    }

    #[test]
    fn same_file_is_not_added_twice() {
        let exe = std::env::current_exe().unwrap().canonicalize().unwrap();
        let now = OsString::from(format!("/b.so:{}", exe.display()));
        assert_eq!(preload_list(Some(now.clone()), &exe), now);
    }

    #[test]
    fn another_loader_gets_no_library() {
        assert_eq!(without_library(OsStr::new("/b.so:/x/libfsocket.so c.so")), "/b.so:c.so");
        assert_eq!(without_library(OsStr::new("/x/libfsocket.so")), "");
    }

    #[test]
    fn sanitizers_stay_in_front() {
        let list = preload("/b.so:/usr/lib/libtsan.so.2:libclang_rt.asan-x86_64.so");
        assert_eq!(list, "/usr/lib/libtsan.so.2:libclang_rt.asan-x86_64.so:/opt/fs/libfsocket.so:/b.so");
    }
}
