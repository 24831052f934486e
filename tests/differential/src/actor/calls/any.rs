//! Calls from a table, through libc or `syscall`, with one argument that may be a bad pointer or an
//! odd number.

use super::{bytes::pattern, errno};
use crate::shared::Slot;
use fsocket_sys as sys;
use libc::{c_long, iovec, mmsghdr, msghdr};
use std::mem::zeroed;
use std::slice::from_raw_parts;
use std::sync::atomic::Ordering::Relaxed;

const PAGE: usize = 4096;
/// Accessible bytes between the start of an `edge` object and the inaccessible page.
const LEFT: usize = 6;

/// The fields: name, libc's function, system-call number, arguments of the function, arguments of
/// the system call. Each argument is one letter. Pointers and sets: `f` the descriptor, `g` the
/// other descriptor, `b` bytes and `n` their number, `i` vectors, `m` and `M` messages, `a` an
/// address, `l` room for an address length, `p` pollfds, `rwx` sets, `e` events. Others: `t` and
/// `v` times, `s` a signal mask, `6` the last argument of pselect6, `c` an int, `@` an offset; `k K
/// P E L S N` are numbers or sizes of these objects. All other letters are numbers.
struct Entry(&'static str, unsafe extern "C" fn(), c_long, &'static str, &'static str);

macro_rules! table {
    ($($name:ident $function:path, $number:ident $form:literal $raw:literal;)*) => {
        static TABLE: &[Entry] = &[$(Entry(stringify!($name), {
            // SAFETY: `any` calls the function with the arguments that `$form` lists.
            unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn()>($function as *const ()) }
        }, libc::$number, $form, $raw)),*];
        /// The names of the calls, with their numbers.
        pub const NAMES: crate::symbols::Names = &table!(@ 0; [] $($name)*);
    };
    (@ $n:expr; [$($done:tt)*] $name:ident $($rest:ident)*) => {
        table!(@ $n + 1; [$($done)* (stringify!($name), $n),] $($rest)*)
    };
    (@ $n:expr; [$($done:tt)*]) => { [$($done)*] };
}

table! {
    read libc::read, SYS_read "fbn" "fbn";
    write libc::write, SYS_write "fbn" "fbn";
    readv libc::readv, SYS_readv "fik" "fik";
    writev libc::writev, SYS_writev "fik" "fik";
    preadv2 libc::preadv2, SYS_preadv2 "fikh0" "fikhh0";
    pwritev2 libc::pwritev2, SYS_pwritev2 "fikh0" "fikhh0";
    recv libc::recv, SYS_recvfrom "fbnF" "fbnF00";
    send libc::send, SYS_sendto "fbnF" "fbnF00";
    recvfrom libc::recvfrom, SYS_recvfrom "fbnFal" "fbnFal";
    sendto libc::sendto, SYS_sendto "fbnFaL" "fbnFaL";
    recvmsg libc::recvmsg, SYS_recvmsg "fmF" "fmF";
    sendmsg libc::sendmsg, SYS_sendmsg "fmF" "fmF";
    recvmmsg libc::recvmmsg, SYS_recvmmsg "fMKFt" "fMKFt";
    sendmmsg libc::sendmmsg, SYS_sendmmsg "fMKF" "fMKF";
    connect libc::connect, SYS_connect "faL" "faL";
    bind libc::bind, SYS_bind "faL" "faL";
    accept libc::accept, SYS_accept "fal" "fal";
    accept4 libc::accept4, SYS_accept4 "fal0" "fal0";
    getsockname libc::getsockname, SYS_getsockname "fal" "fal";
    getpeername libc::getpeername, SYS_getpeername "fal" "fal";
    setsockopt libc::setsockopt, SYS_setsockopt "fOoc4" "fOoc4";
    getsockopt libc::getsockopt, SYS_getsockopt "fOocl" "fOocl";
    ioctl libc::ioctl, SYS_ioctl "fRc" "fRc";
    sendfile libc::sendfile, SYS_sendfile "fg@n" "fg@n";
    poll libc::poll, SYS_poll "pPT" "pPT";
    ppoll libc::ppoll, SYS_ppoll "pPts" "pPtsS";
    select libc::select, SYS_select "Nrwxv" "Nrwxv";
    pselect libc::pselect, SYS_pselect6 "Nrwxts" "Nrwxt6";
    epoll_wait libc::epoll_wait, SYS_epoll_wait "feET" "feET";
    epoll_pwait libc::epoll_pwait, SYS_epoll_pwait "feETs" "feETsS";
    epoll_pwait2 super::epoll_pwait2, SYS_epoll_pwait2 "feEts" "feEtsS";
    epoll_ctl libc::epoll_ctl, SYS_epoll_ctl "fAge" "fAge";
}

/// From this number on, the bad pointer is inside an object that an argument points to: a vector's
/// bytes (two of them), the name, the control data, the mask of pselect6.
pub const INNER: usize = 7;

/// The arguments of a call, one letter each.
pub fn form(call: i64, raw: bool) -> &'static str {
    let e = &TABLE[call as usize];
    if raw {
        e.4
    } else {
        e.3
    }
}

/// Six pages: good objects, objects that end with their page, an inaccessible page, a read-only
/// page, and two pages for further good objects.
struct Memory {
    at: *mut u8,
    used: usize,
}

impl Memory {
    fn new() -> Memory {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let at = sys::mmap(6 * PAGE, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0).expect("memory");
        // SAFETY: the page belongs to this mapping.
        unsafe { libc::mprotect(at.add(2 * PAGE).cast(), PAGE, libc::PROT_NONE) };
        Memory { at, used: 0 }
    }

    /// Stores an object and returns its address: a good one if `how` is 0, else as
    /// [`crate::symbols::NOWHERE`] says.
    fn put(&mut self, how: i64, what: &[u8]) -> usize {
        // SAFETY: all written addresses are within the mapping, because objects are small.
        unsafe {
            let to = match how {
                1 => return 0,
                2 => return 1,
                3 => return self.at.add(2 * PAGE) as usize,
                4 => return self.at.add(2 * PAGE - LEFT) as usize,
                5 => self.at.add(3 * PAGE),
                6 => return 0x8000_0000_0000_1000,
                7 => return 0xffff_8000_0000_0000,
                8 => self.at.add(2 * PAGE - what.len()),
                _ => {
                    self.used = self.used.next_multiple_of(64) + what.len();
                    self.at.add(if self.used > PAGE { 3 * PAGE + self.used } else { self.used } - what.len())
                }
            };
            to.copy_from(what.as_ptr(), what.len());
            if how == 5 {
                libc::mprotect(self.at.add(3 * PAGE).cast(), PAGE, libc::PROT_READ);
            }
            to as usize
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: unmaps the mapping of `new`; `any`, its only user, has returned from its call.
        unsafe { libc::munmap(self.at.cast(), 6 * PAGE) };
    }
}

/// The odd number for `how`, for arguments that are numbers.
fn odd(how: i64) -> usize {
    [0, 0, 1, 3, LEFT, 1 << 20, 0x8000_0000_0000_1000, usize::MAX, 8][how as usize]
}

fn raw_bytes<T>(v: &T) -> &[u8] {
    // SAFETY: `v` is a plain C structure that was zeroed before it was filled, so its padding has values, too.
    unsafe { from_raw_parts(v as *const T as *const u8, size_of::<T>()) }
}

/// Makes the call. Arguments: descriptor, other descriptor, call, whether by `syscall`, number of
/// the bad argument, how it is bad, bytes, milliseconds.
// Long: one arm for each system call.
pub(super) unsafe fn any(s: &Slot) -> i64 {
    let (fd, other, call, raw) = (s.arg(0), s.arg(1), s.arg(2), s.arg(3) != 0);
    let (bad, how, n, ms) = (s.arg(4) as usize, s.arg(5), s.arg(6) as usize, s.arg(7));
    let entry = &TABLE[call as usize];
    let mut mem = Memory::new();
    let filled: Vec<u8> = (0..n).map(|i| pattern(s.step.load(Relaxed), i)).collect();
    let inner = |k: usize| if bad == INNER + k { how } else { 0 };
    // SAFETY: zero is valid for all these structures. Pointers lead into this mapping, or are bad
    // on purpose.
    unsafe {
        let first = mem.put(inner(0), &filled[..n / 2]);
        let second = mem.put(inner(1), &filled[n / 2..]);
        let mut vectors: [iovec; 6] = zeroed();
        vectors[0] = iovec { iov_base: first as *mut _, iov_len: n / 2 };
        vectors[1] = iovec { iov_base: second as *mut _, iov_len: n - n / 2 };
        let mut message: msghdr = zeroed();
        if form(call, raw).contains(['m', 'M']) {
            message.msg_iov = mem.put(0, raw_bytes(&vectors)) as *mut _;
            message.msg_iovlen = 2;
            if inner(2) != 0 {
                message.msg_name = mem.put(how, &[0; 28]) as *mut _;
                message.msg_namelen = 28;
            }
            if inner(3) != 0 {
                message.msg_control = mem.put(how, &[0; 32]) as *mut _;
                message.msg_controllen = 32;
            }
        }
        let mut messages: [mmsghdr; 6] = zeroed();
        messages[0].msg_hdr = message;
        let mask = super::mask(0);
        let six = if raw && entry.0 == "pselect" { [mem.put(inner(4), &raw_bytes(&mask)[..8]), 8] } else { [0; 2] };
        let mut args = [0usize; 6];
        for (i, letter) in form(call, raw).bytes().enumerate() {
            let how = if bad == i + 1 { how } else { 0 };
            let mut set: libc::fd_set = zeroed();
            if (0..1024).contains(&fd) {
                libc::FD_SET(fd as i32, &mut set);
            }
            let mut polls = [libc::pollfd { fd: -1, events: 0, revents: 0x55 }; 6];
            polls[0] = libc::pollfd { fd: fd as i32, events: libc::POLLIN | libc::POLLOUT, revents: 0x55 };
            let mut name: libc::sockaddr_in = zeroed();
            name.sin_family = libc::AF_INET as u16;
            name.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
            let event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: other as u64 };
            let mut at = |what: &[u8]| mem.put(how, what);
            let number = |v: i64| if how == 0 { v as usize } else { odd(how) };
            args[i] = match letter {
                b'f' => fd as usize,
                b'g' => other as usize,
                b'b' => at(&filled),
                b'i' => at(raw_bytes(&vectors)),
                b'm' => at(raw_bytes(&message)),
                b'M' => at(raw_bytes(&messages)),
                b'a' => at(&[raw_bytes(&name), &[0; 12]].concat()),
                b'l' => at(&28u32.to_ne_bytes()),
                b'p' => at(raw_bytes(&polls)),
                b'r' | b'w' | b'x' => at(raw_bytes(&set)),
                b'e' => at(raw_bytes(&[event; 8])),
                b't' => at(raw_bytes(&libc::timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 })),
                b'v' => at(raw_bytes(&libc::timeval { tv_sec: 0, tv_usec: ms * 1000 })),
                b's' => at(raw_bytes(&mask)),
                b'6' => at(raw_bytes(&six)),
                b'c' => at(&1i32.to_ne_bytes()),
                b'@' => at(&0i64.to_ne_bytes()),
                b'n' => number(n as i64),
                b'k' | b'K' | b'P' | b'E' => number(2),
                b'L' => number(16),
                b'S' => number(8),
                b'N' => (fd + 1).max(0) as usize,
                b'T' => ms as usize,
                b'F' => (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize,
                b'A' => 1 + n % 3,
                b'h' => usize::MAX,
                b'O' => libc::SOL_SOCKET as usize,
                b'o' => libc::SO_KEEPALIVE as usize,
                b'4' => 4,
                b'R' => libc::FIONREAD as usize,
                _ => 0,
            };
        }
        let [a, b, c, d, e, f] = args;
        let r = if raw {
            libc::syscall(entry.2, a, b, c, d, e, f)
        } else {
            type Six = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> isize;
            let r = std::mem::transmute::<unsafe extern "C" fn(), Six>(entry.1)(a, b, c, d, e, f);
            // Most functions return an int, and the upper half of the register is undefined.
            if r as i32 == -1 {
                -1
            } else {
                (r as i32).into()
            }
        };
        let saved = errno();
        if r >= 0 {
            look(s, entry.0, raw, &args, bad, [first, second], r as usize, n);
        }
        *libc::__errno_location() = saved;
        r
    }
}

/// Adds the bytes that the call has written to the answer.
#[allow(clippy::too_many_arguments)] // what `any` knows
unsafe fn look(s: &Slot, name: &str, raw: bool, args: &[usize; 6], bad: usize, parts: [usize; 2], r: usize, n: usize) {
    // SAFETY: an argument that is not bad points to an object of its letter's kind.
    unsafe {
        let sum = |at: usize, n: usize| {
            from_raw_parts(at as *const u8, n).iter().fold(7i64, |h, b| h * 31 % 65521 + i64::from(*b))
        };
        let form = form(s.arg(2), raw);
        for (i, letter) in form.bytes().enumerate().filter(|(i, _)| bad != i + 1) {
            let at = args[i];
            match letter {
                b'b' => s.put_aux(sum(at, n)),
                b'i' | b'm' if bad < INNER => s.put_aux(sum(parts[0], n / 2) + sum(parts[1], n - n / 2)),
                b'M' => s.put_aux((*(at as *const mmsghdr)).msg_len.into()),
                b'l' => s.put_aux((at as *const u32).read_unaligned().into()),
                b'p' => s.put_aux((*(at as *const libc::pollfd)).revents.into()),
                b'r' | b'w' | b'x' if name.contains("select") => {
                    s.put_aux(libc::FD_ISSET(s.arg(0) as i32, at as *const libc::fd_set).into())
                }
                b'e' if r > 0 => {
                    // The order of the events is not promised.
                    let e = |i| (at as *const libc::epoll_event).add(i).read_unaligned();
                    s.put_aux((0..r.min(8)).fold(0, |all, i| all | e(i).events).into());
                }
                b't' | b'v' => s.put_aux((*(at as *const [i64; 2]) != [0, 0]).into()),
                b'c' if name != "setsockopt" => s.put_aux((at as *const i32).read_unaligned().into()),
                b'@' => s.put_aux((at as *const i64).read_unaligned()),
                _ => {}
            }
        }
        if form.contains('m') && bad != 2 {
            let m = &*(args[1] as *const msghdr);
            s.put_aux(m.msg_flags.into());
            s.put_aux(m.msg_namelen.into());
            s.put_aux(m.msg_controllen as i64);
        }
    }
}
