//! Tells which users have a number in this user namespace. Users without a number look alike.

use fsocket_sys as sys;

/// The number that stands for all users without one in the namespace (the default of
/// /proc/sys/kernel/overflowuid).
pub const OVERFLOW: u32 = 65534;

/// The largest map in bytes: 340 lines of three numbers.
const SIZE: usize = 12 << 10;

/// Is [`OVERFLOW`] here only the number of users without one, not also that of a real user? False
/// if the map cannot be read.
#[cold]
pub fn overflow_is_nobody() -> bool {
    let mut text = [0u8; SIZE];
    let args = [libc::AT_FDCWD as usize, c"/proc/self/uid_map".as_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: the path is a NUL-terminated string.
    let Ok(fd) = (unsafe { sys::raw(libc::SYS_openat, args) }) else { return false };
    // SAFETY: `text` has room for SIZE bytes.
    let read = unsafe { sys::read(fd as i32, text.as_mut_ptr(), SIZE) };
    let _ = sys::close(fd as i32);
    // A map that fills the buffer may continue.
    read.is_ok_and(|n| n < SIZE && !has(&text[..n], OVERFLOW))
}

/// Does the map give `user` a number? True also if the map cannot be parsed.
fn has(map: &[u8], user: u32) -> bool {
    let Ok(text) = core::str::from_utf8(map) else { return true };
    text.lines().any(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u64>);
        match (numbers.next(), numbers.next(), numbers.next()) {
            (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) => u64::from(user).wrapping_sub(first) < count,
            _ => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_says_who_has_a_number() {
        assert!(has(b"         0          0 4294967295\n", OVERFLOW), "the first namespace");
        assert!(has(b"0 100000 65536\n", OVERFLOW), "a container's");
        assert!(has(b"0 1000 1\n65534 1001 1\n", OVERFLOW));
        assert!(!has(b"0 1000 1\n", OVERFLOW) && !has(b"", OVERFLOW));
        assert!(!has(b"0 100000 65534\n65535 170000 1\n", OVERFLOW));
        assert!(has(b"nonsense\n", OVERFLOW));
    }
}
