//! Selection of a listen socket without privileges: a classic BPF program returns a socket's place in the kernel's
//! group. Places follow the order in which the sockets joined the group.

use fsocket_sys::{self as sys, Result};
use libc::{sock_filter, sock_fprog};

const SO_ATTACH_REUSEPORT_CBPF: i32 = 51;
const SO_ATTACH_REUSEPORT_EBPF: i32 = 52;
/// SKF_AD_OFF + SKF_AD_CPU.
const CPU: u32 = (-0x1000i32 + 36) as u32;

/// Maximum number of CPUs that get an instruction of their own.
pub const MAX_CPUS: usize = 512;

/// Attaches a program to the group of `member`. If CPU `c` handles the SYN of a connection, the connection goes to
/// the socket at `place_of(c)`. Without such a place, or if `c` is not below `cpus` and [`MAX_CPUS`], it goes to
/// the socket at place `c % members`.
///
/// # Errors
/// Errors of `setsockopt`. EINVAL: `member` is in no group.
pub fn attach(member: i32, cpus: usize, members: u32, place_of: impl Fn(u32) -> Option<u32>) -> Result<()> {
    const LD_ABS: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const JEQ: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const MOD: u16 = 0x94; // BPF_ALU | BPF_MOD | BPF_K
    const RET_K: u16 = 0x06;
    const RET_A: u16 = 0x16;
    let mut code = [sock_filter { code: 0, jt: 0, jf: 0, k: 0 }; 2 * MAX_CPUS + 3];
    let mut n = 0;
    let mut put = |code_: u16, jf: u8, k: u32| {
        code[n] = sock_filter { code: code_, jt: 0, jf, k };
        n += 1;
    };
    put(LD_ABS, 0, CPU);
    for cpu in 0..cpus.min(MAX_CPUS) as u32 {
        if let Some(place) = place_of(cpu) {
            put(JEQ, 1, cpu);
            put(RET_K, 0, place);
        }
    }
    put(MOD, 0, members.max(1));
    put(RET_A, 0, 0);
    let program = sock_fprog { len: n as u16, filter: code.as_mut_ptr() };
    // SAFETY: `program` lives longer than the slice, which covers it. The kernel copies what it points to.
    let bytes =
        unsafe { core::slice::from_raw_parts(&program as *const _ as *const u8, core::mem::size_of_val(&program)) };
    sys::setsockopt(member, libc::SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, bytes)
}

/// Attaches a loaded eBPF program to the group of `member`. Needs no privilege.
///
/// # Errors
/// Errors of `setsockopt`. EINVAL: `member` is in no group.
pub fn attach_loaded(member: i32, program: i32) -> Result<()> {
    sys::setsockopt(member, libc::SOL_SOCKET, SO_ATTACH_REUSEPORT_EBPF, &program.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::{backlog, like, reuse_port, Shape};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn the_place_decides() {
        let g = TcpListener::bind("127.0.0.1:0").unwrap();
        let shape = Shape::of(g.as_raw_fd()).unwrap();
        reuse_port(g.as_raw_fd(), true).unwrap();
        let locals: Vec<i32> = (0..3).map(|_| like(g.as_raw_fd(), &shape).unwrap()).collect();
        for place in 0..3u32 {
            attach(g.as_raw_fd(), 256, 4, |_| Some(place + 1)).unwrap();
            let clients: Vec<_> = (0..16).map(|_| TcpStream::connect(g.local_addr().unwrap()).unwrap()).collect();
            assert_eq!(backlog(locals[place as usize]).unwrap().1, 16, "place {}", place + 1);
            drop(clients);
        }
        assert_eq!(backlog(g.as_raw_fd()).unwrap().1, 0);
        for fd in locals {
            let _ = sys::close(fd);
        }
    }
}
