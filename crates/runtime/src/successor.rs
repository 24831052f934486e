//! How the monitor recognizes the program that replaces this one at `exec`: by a named control
//! socket that stays open (ADR 9).

use fsocket_sys as sys;

/// The socket name of a successor's control socket. From it the next program knows that
/// FASTSOCKET_SUCCESSOR means this socket, and not another one with the same number.
fn name_of(nonce: u64) -> [u8; 28] {
    let mut b = [0u8; 28];
    b[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    b[3..19].copy_from_slice(b"fastsocket-next/");
    b[19..27].copy_from_slice(&nonce.to_ne_bytes());
    b
}

/// Gives a control socket the name of a successor.
pub fn mark(fd: i32, nonce: u64) -> bool {
    sys::bind(fd, &name_of(nonce)).is_ok()
}

/// SO_COOKIE: the kernel's number of a socket, unique while the system runs.
pub fn cookie(fd: i32) -> Option<u64> {
    let mut b = [0u8; 8];
    sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, &mut b).ok()?;
    Some(u64::from_ne_bytes(b))
}

/// Did root or this process's user make the socket pair? (A program makes the pair right before
/// `exec`.)
fn is_from_this_user(fd: i32) -> bool {
    let mut cred = [0u8; 12];
    let of = |c: &[u8; 12]| u32::from_ne_bytes([c[4], c[5], c[6], c[7]]);
    sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut cred).is_ok_and(|n| n == cred.len())
        && [0, sys::getuid(), sys::geteuid()].contains(&of(&cred))
}

/// Parses FASTSOCKET_SUCCESSOR: control socket and nonce, if both are still valid.
pub fn of(value: &[u8]) -> Option<(i32, u64)> {
    let text = core::str::from_utf8(value).ok()?;
    let (fd, nonce) = text.split_once(':')?;
    let (fd, nonce) = (fd.parse().ok()?, u64::from_str_radix(nonce, 16).ok()?);
    let mut name = [0u8; 28];
    let is_named = sys::getsockname(fd, &mut name).ok()? == name.len() && name == name_of(nonce);
    (is_named && is_from_this_user(fd)).then_some((fd, nonce))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket pair that is made while this thread is another user.
    fn made_by(uid: u32) -> [i32; 2] {
        let be = |uid: u32| {
            let args = [u32::MAX as usize, uid as usize, u32::MAX as usize, 0, 0, 0];
            // SAFETY: the call takes numbers only. As a raw system call it concerns only this
            // thread.
            unsafe { sys::raw(libc::SYS_setresuid, args) }.expect("root")
        };
        be(uid);
        let pair = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC);
        be(0);
        pair.unwrap()
    }

    #[test]
    fn a_successor_is_known_by_its_name() {
        let [a, b] = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC).unwrap();
        assert!(mark(a, 0x1234_5678_9abc_def1));
        let mut text = [0u8; 32];
        let said = |fd: i32, text: &mut [u8; 32]| {
            use core::fmt::Write;
            struct W<'a>(&'a mut [u8], usize);
            impl Write for W<'_> {
                fn write_str(&mut self, s: &str) -> core::fmt::Result {
                    self.0[self.1..self.1 + s.len()].copy_from_slice(s.as_bytes());
                    self.1 += s.len();
                    Ok(())
                }
            }
            let mut w = W(text, 0);
            write!(w, "{fd}:123456789abcdef1").unwrap();
            w.1
        };
        let n = said(a, &mut text);
        assert_eq!(of(&text[..n]), Some((a, 0x1234_5678_9abc_def1)));
        let n = said(b, &mut text);
        assert_eq!(of(&text[..n]), None, "another socket under that number");
        let _ = sys::close(a);
        if sys::getuid() == 0 {
            let [c, d] = made_by(65533);
            assert!(mark(c, 0x1234_5678_9abc_def1));
            let n = said(c, &mut text);
            assert_eq!(of(&text[..n]), None, "another user has made it");
            let _ = (sys::close(c), sys::close(d));
        }
        assert_eq!(of(b"900"), None);
        assert_eq!(of(b"-1:1"), None);
        let _ = sys::close(b);
    }
}
