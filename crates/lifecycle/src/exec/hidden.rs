//! Leaves this library out of `LD_PRELOAD` if the next program could not open its file: in another
//! root directory, under another mount, or as another user. Otherwise the loader would print an
//! error for it.

use core::ffi::CStr;
use fsocket_sys as sys;

/// The name of this library's file.
const NAME: &[u8] = b"libfsocket.so";
/// The longest path that is checked, in bytes.
const PATH: usize = 1024;

/// Does a word of `LD_PRELOAD` name this library?
fn is_ours(word: &[u8]) -> bool {
    word.rsplit(|c| *c == b'/').next() == Some(NAME)
}

/// Can this process open the file, with its present root, mounts and rights? True for a name
/// without a slash, which the loader searches itself.
fn is_there(word: &[u8]) -> bool {
    let mut path = [0u8; PATH];
    let Some(to) = path.get_mut(..word.len()).filter(|_| word.contains(&b'/') && word.len() < PATH) else {
        return true;
    };
    to.copy_from_slice(word);
    let Ok(path) = CStr::from_bytes_until_nul(&path) else { return true };
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, libc::R_OK as usize, libc::AT_EACCESS as usize, 0, 0];
    // SAFETY: the path is a NUL-terminated string.
    let answer = unsafe { sys::raw(libc::SYS_faccessat2, args) };
    // If a kernel lacks the call or a filter forbids it, the answer says nothing.
    !matches!(answer, Err(sys::Errno::ENOENT | sys::Errno::ENOTDIR | sys::Errno::EACCES))
}

/// The names in a list as in `LD_PRELOAD`.
pub fn words(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|c| matches!(c, b':' | b' ')).filter(|w| !w.is_empty())
}

/// Does this list name the library under a path that cannot be opened? Costs one system call, or
/// none if the list does not name the library.
#[link_section = ".text.fsocket_start"]
pub fn hides(list: &[u8]) -> bool {
    words(list).any(|w| is_ours(w) && !is_there(w))
}

/// Copies the words of `list` that can be loaded to `to`, which has room for all. Returns their
/// length.
pub fn rest(list: &[u8], to: &mut [u8]) -> usize {
    let mut len = 0;
    for word in words(list).filter(|w| !is_ours(w) || is_there(w)) {
        if len > 0 {
            to[len] = b':';
            len += 1;
        }
        to[len..len + word.len()].copy_from_slice(word);
        len += word.len();
    }
    len
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    #[test]
    fn only_what_cannot_be_opened_is_left_out() {
        let rest_of = |list: &str| {
            let mut to = [0u8; 200];
            let n = rest(list.as_bytes(), &mut to);
            std::string::String::from_utf8(to[..n].to_vec()).expect("text")
        };
        assert_eq!(rest_of("/nowhere/libfsocket.so"), "");
        assert_eq!(rest_of("/nowhere/libfsocket.so:/nowhere/b.so c.so"), "/nowhere/b.so:c.so");
        assert_eq!(rest_of("libfsocket.so:/b.so"), "libfsocket.so:/b.so", "the loader's to look for");
    }
}
