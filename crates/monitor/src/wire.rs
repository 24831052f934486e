//! One message on a control socket, in or out, never blocking.
//!
//! MSG_DONTWAIT on every call: the file status flags of an adopted socket are
//! shared with whoever sent it.

use crate::descriptor::Attached;
use fsocket_proto::{Msg, MSG_SIZE, VERSION};
use rustix::fd::BorrowedFd;
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::mem::MaybeUninit;
use zerocopy::{FromBytes, IntoBytes};

/// What a receive brought.
#[derive(Debug)]
pub enum Received {
    Message(Msg, Option<Attached>),
    /// Nothing there now.
    Nothing,
    /// The other side is gone.
    End,
    /// Not a message of ours.
    Malformed,
}

/// Receives at most one message.
pub fn receive(fd: BorrowedFd<'_>) -> Received {
    let mut bytes = [0u8; MSG_SIZE + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            fd,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        )
    });
    let got = match got {
        Ok(got) => got,
        // CONNRESET: it went without reading everything. Reported once, before
        // what it sent; level-triggered readiness brings us back.
        Err(Errno::AGAIN | Errno::CONNRESET) => return Received::Nothing,
        Err(_) => return Received::End,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights.map(Attached::new));
        }
    }
    if got.bytes == 0 {
        return Received::End;
    }
    let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
    if got.bytes != MSG_SIZE || got.flags.intersects(cut) || fds.len() > 1 {
        return Received::Malformed;
    }
    match Msg::read_from_bytes(&bytes[..MSG_SIZE]) {
        Ok(msg) if msg.version == VERSION => Received::Message(msg, fds.pop()),
        _ => Received::Malformed,
    }
}

/// Sends one message with at most one descriptor.
///
/// # Errors
/// EAGAIN: the receiver is slow; anything else: it is gone.
pub fn send(fd: BorrowedFd<'_>, msg: &Msg, attach: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let attach = attach.map(|fd| [fd]);
    if let Some(fds) = &attach {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            fd,
            &[IoSlice::new(msg.as_bytes())],
            &mut control,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        )
    })
    .map(|_| ())
}
