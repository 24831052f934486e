//! The agent's connection to the monitor ([`fsocket_proto::agent`]). The library in this process
//! has its own socket to the monitor.

use anyhow::Context as _;
use fsocket_proto::{request, Asks, Msg, MSG_SIZE};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags};
use rustix::net::{SocketAddrUnix, SocketType};
use serde::Deserialize;
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use zerocopy::{FromBytes, IntoBytes};

/// The agent's part of the configuration.
#[derive(Debug, Deserialize)]
pub struct Links {
    pub address: SocketAddr,
    pub peers: Vec<SocketAddr>,
    pub key: PathBuf,
}

/// The monitor's answer or refusal, with a descriptor if one came.
type Answered<R> = (Result<<R as Asks>::Answer, Errno>, Option<OwnedFd>);

pub struct Line {
    pub fd: OwnedFd,
    /// Messages that arrived while the agent waited for an answer.
    early: VecDeque<Msg>,
    seq: u32,
}

impl Line {
    pub fn new(socket: &Path) -> anyhow::Result<(Line, Links)> {
        let fd = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        net::connect(&fd, &SocketAddrUnix::new(socket)?)
            .with_context(|| format!("no monitor at {}", socket.display()))?;
        let mut line = Line { fd, early: VecDeque::new(), seq: 0 };
        let (answer, text) = match line.ask(request::Agent {})? {
            (Ok(answer), text) => (answer, text),
            (Err(Errno::OPNOTSUPP), _) => anyhow::bail!("the configuration of the monitor has no [hosts.rdma]"),
            (Err(e), _) => anyhow::bail!("the monitor does not want an agent: {e}"),
        };
        let text = text.context("the monitor's answer has no text")?;
        let mut json = vec![0; answer.length as usize];
        rustix::io::pread(&text, &mut json, 0)?;
        Ok((line, serde_json::from_slice(&json)?))
    }

    /// Sends a message without waiting for an answer.
    ///
    /// # Errors
    /// The monitor is gone.
    pub fn tell(&mut self, msg: impl Into<Msg>) -> io::Result<()> {
        net::send(&self.fd, msg.into().as_bytes(), SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Sends a request and waits for its answer.
    fn ask<R: Asks>(&mut self, request: R) -> io::Result<Answered<R>> {
        self.seq += 1;
        let request = Msg::from(request).numbered(self.seq);
        self.tell(request)?;
        loop {
            match self.receive(RecvFlags::empty())? {
                Some((answer, fd)) if answer.answers(&request) => {
                    let answer = match answer.refusal() {
                        Some(errno) => Err(Errno::from_raw_os_error(errno)),
                        None => answer.read().map_err(|_| Errno::PROTO),
                    };
                    return Ok((answer, fd));
                }
                Some((other, _)) => self.early.push_back(other),
                None => {}
            }
        }
    }

    /// Sends a request. Returns whether the monitor granted it.
    ///
    /// # Errors
    /// The monitor is gone.
    pub fn request<R: Asks>(&mut self, request: R) -> io::Result<bool> {
        Ok(self.ask(request)?.0.is_ok())
    }

    /// The monitor's next message. `None`: there is none now.
    ///
    /// # Errors
    /// The monitor is gone.
    pub fn next(&mut self) -> io::Result<Option<Msg>> {
        match self.early.pop_front() {
            Some(msg) => Ok(Some(msg)),
            None => Ok(self.receive(RecvFlags::DONTWAIT)?.map(|(msg, _)| msg)),
        }
    }

    fn receive(&mut self, flags: RecvFlags) -> io::Result<Option<(Msg, Option<OwnedFd>)>> {
        let mut bytes = [0u8; MSG_SIZE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut part = [rustix::io::IoSliceMut::new(&mut bytes)];
        let got = match net::recvmsg(&self.fd, &mut part, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let fd = control.drain().find_map(|m| match m {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        if got != MSG_SIZE {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Msg::read_from_bytes(&bytes).ok().map(|msg| (msg, fd)))
    }
}
