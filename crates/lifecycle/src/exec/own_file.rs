//! Checks whether the next program would load the same library. After an upgrade the file may have
//! another ABI, for which this process's shared memory is not valid.

use fsocket_sys as sys;

/// How much of /proc/self/maps is read at a time, in bytes. (A line may be longer. A hook must use
/// less than 16 KiB of stack.)
const CHUNK: usize = 1024;
/// The kernel appends this to the name of a file that was removed or replaced.
const DELETED: &[u8] = b" (deleted)";

/// Is the file of this library unchanged? False also if the kernel does not say.
pub fn is_current() -> bool {
    let args = [libc::AT_FDCWD as usize, c"/proc/self/maps".as_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: the path is a NUL-terminated string.
    let Ok(fd) = (unsafe { sys::raw(libc::SYS_openat, args) }) else { return false };
    let found = look(|to| {
        // SAFETY: `to` has room for that many bytes.
        unsafe { sys::read(fd as i32, to.as_mut_ptr(), to.len()) }.unwrap_or(0)
    });
    let _ = sys::close(fd as i32);
    found == Some(true)
}

/// The parts of a line that are needed: its beginning, with the addresses, and its end.
struct Line {
    head: [u8; 40],
    length: usize,
    tail: [u8; DELETED.len()],
}

impl Line {
    const EMPTY: Line = Line { head: [b' '; 40], length: 0, tail: [0; DELETED.len()] };

    fn push(&mut self, byte: u8) {
        if let Some(place) = self.head.get_mut(self.length) {
            *place = byte;
        }
        self.length += 1;
        self.tail.rotate_left(1);
        self.tail[DELETED.len() - 1] = byte;
    }
}

/// Reads lines of /proc/self/maps up to the line with this code. None: there is none.
fn look(read: impl Fn(&mut [u8]) -> usize) -> Option<bool> {
    let (mut text, mut line) = ([0u8; CHUNK], Line::EMPTY);
    loop {
        let n = read(&mut text);
        if n == 0 {
            return None;
        }
        for byte in text.get(..n)? {
            if *byte != b'\n' {
                line.push(*byte);
            } else if has(&line.head, is_current as *const () as usize) {
                return Some(line.tail != DELETED);
            } else {
                line = Line::EMPTY;
            }
        }
    }
}

/// Does a line (`FROM-TO rwxp ...`) contain this address?
fn has(line: &[u8], address: usize) -> bool {
    let mut ends = line.split(|c| matches!(c, b'-' | b' ')).map(hexadecimal);
    matches!((ends.next(), ends.next()), (Some(Some(from)), Some(Some(to))) if (from..to).contains(&address))
}

fn hexadecimal(digits: &[u8]) -> Option<usize> {
    usize::from_str_radix(core::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use core::cell::Cell;
    use std::string::String;

    fn said(of_own: &str, at_a_time: usize) -> Option<bool> {
        let own = is_current as *const () as usize;
        let mut text = String::from("1000-2000 r-xp 00000000 00:00 0  /usr/lib/other.so (deleted)\n");
        if !of_own.is_empty() {
            text += &std::format!("{:x}-{:x} r-xp 00000000 00:00 7  {of_own}\n", own - 16, own + 1);
        }
        let at = Cell::new(0);
        look(|to| {
            let part = &text.as_bytes()[at.get()..];
            let n = part.len().min(to.len()).min(at_a_time);
            to[..n].copy_from_slice(&part[..n]);
            at.set(at.get() + n);
            n
        })
    }

    #[test]
    fn the_line_of_the_library_counts() {
        for at_a_time in [1, 7, CHUNK] {
            assert_eq!(said("/usr/lib/libfsocket.so", at_a_time), Some(true));
            assert_eq!(said("/usr/lib/libfsocket.so (deleted)", at_a_time), Some(false));
            assert_eq!(said("", at_a_time), None);
        }
        assert!(is_current());
    }
}
