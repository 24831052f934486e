//! Each user's share of what the monitor has little of: descriptors and memory mappings.
//!
//! A user may hold as much as is left for all others. So a single user gets half, the next one
//! half of the rest. After ten users have taken all they could, the next one still finds a
//! thousandth, and a user that holds little is served as long as anything is left. The memory of
//! channels and arenas is shared in the same way: a user whose share is used up gets no further
//! channel. Each descriptor counts for a user until it is closed ([`crate::foreign`]). A request
//! beyond the share is refused with EMFILE; no process is dropped for it.

/// Descriptors for the monitor itself: streams, sockets, epoll, registry, policy, BPF maps.
const OWN: u64 = 96;
/// Descriptors that one message can bring. If there were no room for them, the kernel would close
/// them in the event loop's thread.
const MESSAGE: u64 = 253;
/// Descriptors that the monitor sends to one process before the process receives the first of
/// them. The kernel limits those in flight to all processes together by the monitor's
/// RLIMIT_NOFILE. Beyond that limit the monitor can send no descriptor to any process
/// (ETOOMANYREFS). So descriptors in flight count like open ones. (At most one more waits in the
/// monitor: then it reads no further request.)
pub const FLIGHT: u64 = 8;
/// A control socket, with the descriptors in flight in it.
pub const CONTROL: u64 = 1 + FLIGHT;
/// A client: its control socket, its arena, and the lifeline of the arena.
pub const CLIENT: u64 = CONTROL + 2;
/// An arena after the process that made it has ended: its memory, and its lifeline.
pub const ARENA: u64 = 2;
pub const LISTENER: u64 = 2;
/// A channel: its memory, and the mapping of it.
pub const CHANNEL: u64 = 2;
/// Both ends of a connection that has moved to kernel TCP.
pub const SWITCHED: u64 = 2;
/// Both ends of a pipe.
pub const PIPE: u64 = 2;
/// Fewer than `vm.max_map_count`, which is 65,530 by default.
const MAPPINGS: u64 = 60_000;

/// Raises the limit of open descriptors as far as possible, and returns it.
pub fn raise_nofile() -> u64 {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)
}

/// Memory that all users together may have: half of this machine's memory, in bytes.
pub fn memory() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(info.mem_unit.into()) / 2
}

/// Descriptors that all users together may have. `open`: RLIMIT_NOFILE.
pub fn total(open: u64) -> u64 {
    let open = open.min(MAPPINGS);
    open.saturating_sub(OWN + MESSAGE.min(open / 8))
}

/// Whether a user that holds `own` may get `more`, if `all` of `total` are held now.
pub fn admits(own: u64, all: u64, more: u64, total: u64) -> bool {
    own + more <= total.saturating_sub(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_users_leave_something_for_the_next() {
        let total = total(1 << 20);
        let mut held = Vec::new();
        for user in 0..10 {
            let all: u64 = held.iter().sum();
            let mut own = 0;
            while admits(own, all + own, CLIENT, total) {
                own += CLIENT;
            }
            assert!(own > 20, "user {user} of ten gets {own}");
            held.push(own);
        }
    }

    #[test]
    fn nothing_is_given_that_is_not_there() {
        assert!(!admits(0, 100, 1, 100));
        assert!(!admits(0, 101, 1, 100));
        assert!(admits(0, 99, 1, 100));
        assert_eq!(super::total(64), 0);
    }
}
