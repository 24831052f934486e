//! The entry of `LD_PRELOAD` that is this library, where the next program could not open it: in another root, under
//! another mount, or as another user. The loader would complain on standard error, so the entry is left out.

use core::ffi::CStr;
use fsocket_sys as sys;

/// The name of this library's file.
const NAME: &[u8] = b"libfsocket.so";
/// Bytes of a path that is looked at.
const PATH: usize = 1024;

/// Is a word of `LD_PRELOAD` this library?
fn is_ours(word: &[u8]) -> bool {
    word.rsplit(|c| *c == b'/').next() == Some(NAME)
}

/// May this process open the file now, with its root, its mounts and its rights? A name without a slash is the loader's
/// to look for.
fn is_there(word: &[u8]) -> bool {
    let mut path = [0u8; PATH];
    let Some(to) = path.get_mut(..word.len()).filter(|_| word.contains(&b'/') && word.len() < PATH) else {
        return true;
    };
    to.copy_from_slice(word);
    let Ok(path) = CStr::from_bytes_until_nul(&path) else { return true };
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, libc::R_OK as usize, libc::AT_EACCESS as usize, 0, 0];
    // SAFETY: a C string.
    let answer = unsafe { sys::raw(libc::SYS_faccessat2, args) };
    // (A kernel or a filter without the call knows nothing of the file.)
    !matches!(answer, Err(sys::Errno::ENOENT | sys::Errno::ENOTDIR | sys::Errno::EACCES))
}

/// The words of `LD_PRELOAD`.
pub fn words(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|c| matches!(c, b':' | b' ')).filter(|w| !w.is_empty())
}

/// Can the library that this list names not be opened? One system call, and none where the list does not name it.
#[link_section = ".text.fsocket_start"]
pub fn hides(list: &[u8]) -> bool {
    words(list).any(|w| is_ours(w) && !is_there(w))
}

/// Writes the words of `list` that can be loaded to `to`, which has room for all. Returns their length.
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
