//! Socket options that the placeholder (the kernel socket behind a descriptor) keeps, by name.

use crate::identity;
use crate::table::{self, Desc, KeptOption};
use fsocket_sys as sys;

const S: i32 = libc::SOL_SOCKET;

/// Bytes of the longest option.
const LONG: usize = 64;

/// Records that the placeholder keeps this option. A socket that replaces the placeholder gets the
/// option, too.
pub fn kept(d: &Desc, level: i32, name: i32) {
    d.options().kept().insert(KeptOption::One(level, name));
}

/// Are there kept options?
#[inline]
pub fn any(d: &Desc) -> bool {
    !d.options().kept().is_empty()
}

/// Kept options that no firewall or other policy can see. (The recorded options show none,
/// either.)
const HARMLESS: [(i32, i32); 13] = [
    (S, libc::SO_BROADCAST),
    (S, libc::SO_REUSEPORT),
    (S, libc::SO_BUSY_POLL),
    (S, libc::SO_INCOMING_CPU),
    (S, libc::SO_ZEROCOPY),
    (S, SO_PREFER_BUSY_POLL),
    (S, SO_BUSY_POLL_BUDGET),
    (libc::IPPROTO_TCP, libc::TCP_SYNCNT),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
    (libc::IPPROTO_IP, libc::IP_RECVERR),
    (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
];
/// include/uapi/asm-generic/socket.h
const SO_PREFER_BUSY_POLL: i32 = 69;
const SO_BUSY_POLL_BUDGET: i32 = 70;

/// Does every policy treat the socket like one without options? Not if it has a mark, a priority,
/// a type of service, a time to live or a device. Then the result of a test connection does not
/// hold for this socket.
pub fn is_plain(d: &Desc) -> bool {
    d.options().kept().iter().all(|option| match option {
        KeptOption::One(level, name) => HARMLESS.contains(&(level, name)),
        KeptOption::All => false,
    })
}

/// Replaces a recycled placeholder by a new socket under the same number. The kernel's policies
/// would attribute the recycled socket to its maker.
pub fn renew(d: &Desc, fd: i32) {
    let sole = d.refs() == 1 && !d.placeholder().is_watched();
    if !sole || d.placeholder().identity() != identity::RECYCLED {
        return;
    }
    let family = d.family() as i32;
    let nonblock = if d.unconnected().nonblock() { libc::SOCK_NONBLOCK } else { 0 };
    let Ok(new) = sys::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | nonblock, 0) else { return };
    let untouched = !d.placeholder().is_changed();
    if untouched || fsocket_reuseport::copy::options(fd, new, family == libc::AF_INET6).is_ok() {
        let cloexec = sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags & libc::FD_CLOEXEC != 0);
        let _ = sys::dup3(new, fd, if cloexec { libc::O_CLOEXEC } else { 0 });
        d.placeholder().set_identity(identity::now());
    }
    let _ = sys::close(new);
}

/// Copies to socket `to` the options that the program has set on `from`, a descriptor of `d`.
fn copy(d: &Desc, from: i32, to: i32) {
    copy_each(d, from, to);
    // Setting IP_TOS has also changed the priority, so the priority is copied last.
    one(from, to, S, libc::SO_PRIORITY);
}

fn copy_each(d: &Desc, from: i32, to: i32) {
    for option in d.options().kept().iter() {
        match option {
            KeptOption::One(level, name) => one(from, to, level, name),
            KeptOption::All => {
                let _ = fsocket_reuseport::copy::options(from, to, d.family() as i32 == libc::AF_INET6);
                return;
            }
        }
    }
}

fn one(from: i32, to: i32, level: i32, name: i32) {
    let mut value = [0u8; LONG];
    // A value that cannot be read (a filter, a key) cannot be copied.
    if let Ok(n) = sys::getsockopt(from, level, name, &mut value) {
        let _ = sys::setsockopt(to, level, name, &value[..n.min(LONG)]);
    }
}

/// An accepted connection inherits the options that the program has set on its listener.
pub fn inherit(listener: &Desc, fd: i32, d: &Desc, placeholder: i32) {
    copy_each(listener, fd, placeholder);
    // The kernel does not inherit the priority (`sk_clone_lock`).
    let _ = sys::setsockopt(placeholder, S, libc::SO_PRIORITY, &[0; 4]);
    d.options().kept().copy(listener.options().kept());
    d.placeholder().mark_changed();
}

/// When a connection moves to the kernel, its kernel socket gets the options of the placeholder.
pub fn apply_options(d: &Desc, fd: i32) {
    if any(d) {
        if let Some(from) = table::fd_of(d) {
            copy(d, from, fd);
        }
    }
}
