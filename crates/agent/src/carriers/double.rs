//! A replacement for RDMA in tests: a TCP connection that fails as an RDMA link does.

use crate::carrier::{Carrier, Head, CHUNK};
use crate::link::{read_some, write_some};
use rustix::fd::AsFd;
use std::io;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;

const HEAD: usize = 32;
/// Most bytes that may wait to be sent.
const MOST: usize = 1 << 20;

pub struct Double {
    stream: TcpStream,
    out: Vec<u8>,
    sent: usize,
    refused: bool,
    input: Vec<u8>,
}

impl Double {
    pub fn new(stream: TcpStream) -> io::Result<Double> {
        use rustix::net::sockopt;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_tcp_user_timeout(&stream, 1500)?;
        Ok(Double { stream, out: Vec::new(), sent: 0, refused: false, input: Vec::new() })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sent += write_some(&mut self.stream, &self.out[self.sent..])?;
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        }
        Ok(())
    }
}

impl Carrier for Double {
    fn is_ready(&self) -> bool {
        true
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn send(&mut self, head: &Head, bytes: &[u8]) -> io::Result<bool> {
        if self.out.len() - self.sent > MOST {
            self.refused = true;
            return Ok(false);
        }
        self.out.extend((bytes.len() as u64).to_le_bytes());
        self.out.extend(head.iter().flat_map(|word| word.to_le_bytes()));
        self.out.extend(bytes);
        self.flush()?;
        Ok(true)
    }

    fn poll(&mut self, got: &mut dyn FnMut(Head, &[u8])) -> io::Result<bool> {
        self.flush()?;
        let mut chunk = [0u8; 65536];
        while let Some(n) = read_some(&mut self.stream, &mut chunk)? {
            self.input.extend(&chunk[..n]);
            let mut at = 0;
            while let Some((head, rest)) = self.input[at..].split_at_checked(HEAD) {
                let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| head[8 * i + k]));
                let n = word(0) as usize;
                if n > CHUNK {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let Some(bytes) = rest.get(..n) else { break };
                got([word(1), word(2), word(3)], bytes);
                at += HEAD + n;
            }
            self.input.drain(..at);
        }
        Ok(std::mem::take(&mut self.refused))
    }
}
