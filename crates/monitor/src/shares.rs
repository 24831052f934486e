//! Shares of what the monitor has little of: descriptors, and mappings of memory.
//!
//! A user may hold as much as is left for all others. One alone gets half, the next one half of the rest:
//! one that comes after ten that took all they could still finds a thousandth, and a user that holds little
//! is served as long as there is anything. So it is with the memory of channels and arenas: a user
//! whose share is used up gets no further channel. Each descriptor counts for a user until it is closed
//! ([`crate::foreign`]); a request beyond the share is refused with EMFILE, and no process is dropped.

/// What the monitor itself has open: streams, sockets, epoll, registry, policy, BPF maps.
const OWN: u64 = 96;
/// What can come with one message. Descriptors for which there is no room the kernel closes, in the loop.
const MESSAGE: u64 = 253;
/// A process is sent so many descriptors before it receives the first. The kernel lets all processes together have
/// RLIMIT_NOFILE of the monitor's in flight, and beyond that the monitor can send none to anybody (ETOOMANYREFS). So they
/// count like open ones. (One more waits in the monitor at most: then no further request is read.)
pub const FLIGHT: u64 = 8;
/// A control socket, with what is in flight there.
pub const CONTROL: u64 = 1 + FLIGHT;
/// The same, its arena, and what tells of its end.
pub const CLIENT: u64 = CONTROL + 2;
/// Without a live process that has made it: its memory, and what tells of our end.
pub const ARENA: u64 = 2;
pub const LISTENER: u64 = 2;
/// Its memory, and the mapping of it.
pub const CHANNEL: u64 = 2;
/// Both ends of a connection that has become the kernel's.
pub const SWITCHED: u64 = 2;
/// Both ends of a pipe.
pub const PIPE: u64 = 2;
/// `vm.max_map_count` is 65,530 by default.
const MAPPINGS: u64 = 60_000;

/// Raises the limit of descriptors as far as it goes; returns it.
pub fn raise_nofile() -> u64 {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)
}

/// How much there is of this machine's memory for all users, bytes.
pub fn memory() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(info.mem_unit.into()) / 2
}

/// How much there is for all users, in descriptors. `open`: RLIMIT_NOFILE.
pub fn total(open: u64) -> u64 {
    let open = open.min(MAPPINGS);
    open.saturating_sub(OWN + MESSAGE.min(open / 8))
}

/// Whether a user that holds `own`, of `all` that are held, gets `more` out of `total`.
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
