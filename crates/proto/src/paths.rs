//! The paths and environment variables by which library, command line and monitor find each other.

/// Environment variable with the path of the monitor's socket; set by
/// `fastsocket run`.
pub const ENV_SOCKET: &str = "FASTSOCKET_SOCKET";
/// Environment variable that switches parts off: a comma-separated list of
/// `shm`, `zones`.
pub const ENV_DISABLE: &str = "FASTSOCKET_DISABLE";
/// Environment variable: how many milliseconds a program waits for a busy monitor before it uses the kernel. Commands
/// wait at least as long for an answer.
pub const ENV_PATIENCE: &str = "FASTSOCKET_PATIENCE";
/// Environment variable: whether workers are pinned to the CPU of their zone (`auto`, `never` or
/// `require`).
pub const ENV_PIN: &str = "FASTSOCKET_PIN";
/// Environment variable: the number of a process. The process and its children each print one line at the
/// end; set by `fastsocket run --summary`.
pub const ENV_SUMMARY: &str = "FASTSOCKET_SUMMARY";
/// The system monitor.
pub const SYSTEM_SOCKET: &str = "/run/fastsocket/monitor.sock";

/// Directory of root's private monitor, if root has no runtime directory.
pub const ROOT_DIRECTORY: &str = "/run/fastsocket-private";
/// The same for another user, followed by the user's number.
pub const USER_DIRECTORY: &str = "/tmp/fastsocket-";

/// Where a monitor with that ABI listens if it was told to listen at `path`: the ABI's number
/// stands before the extension. So monitors with several ABIs have their sockets beside each
/// other (ADR 83). `path` itself leads to the monitor that started last. None: `room` is too
/// small, and a socket address would be as well.
#[inline]
pub fn versioned<'a>(path: &[u8], abi: u32, room: &'a mut [u8]) -> Option<&'a [u8]> {
    let name = path.iter().rposition(|c| *c == b'/').map_or(0, |at| at + 1);
    let dot = path.iter().rposition(|c| *c == b'.').filter(|at| *at > name).unwrap_or(path.len());
    let mut digits = [0u8; 10];
    let (mut first, mut rest) = (digits.len(), abi);
    while rest != 0 || first == digits.len() {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let mut used = 0;
    for part in [&path[..dot], b"-", &digits[first..], &path[dot..]] {
        room.get_mut(used..used + part.len())?.copy_from_slice(part);
        used += part.len();
    }
    room.get(..used)
}

#[cfg(test)]
mod tests {
    use super::versioned;

    #[test]
    fn the_number_stands_before_the_extension() {
        let of = |path: &str, abi, size: usize| {
            let mut room = vec![0; size];
            versioned(path.as_bytes(), abi, &mut room).map(|path| String::from_utf8(path.to_vec()).unwrap())
        };
        assert_eq!(of("/run/fastsocket/monitor.sock", 16, 108).as_deref(), Some("/run/fastsocket/monitor-16.sock"));
        assert_eq!(of("/a.d/s", 0, 108).as_deref(), Some("/a.d/s-0"));
        assert_eq!(of("/a.d/.s", u32::MAX, 108).as_deref(), Some("/a.d/.s-4294967295"));
        assert_eq!(of("", 7, 108).as_deref(), Some("-7"));
        assert_eq!(of("/s.sock", 16, 10).as_deref(), Some("/s-16.sock"));
        assert_eq!(of("/s.sock", 16, 9), None);
    }
}
