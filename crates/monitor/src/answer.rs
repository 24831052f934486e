//! Answers to what clients ask for.

use crate::foreign::ForeignFd;
use fsocket_proto::Msg;
use rustix::io::Errno;
use std::rc::Rc;

/// What an answer is made of.
pub type Answer = Result<(Msg, Option<Rc<ForeignFd>>), Errno>;

/// Ends the client that sent such a thing.
pub struct Misbehaved(pub &'static str);

/// An answer that is too long for a message: in a memfd. `uid`: for whom.
pub fn answer_json(msg: &Msg, uid: u32, what: &impl serde::Serialize) -> Answer {
    let json = serde_json::to_vec(what).map_err(|_| Errno::NOMEM)?;
    let fd = crate::memory::memfd_of("fastsocket-answer", &json)
        .map_err(|e| e.raw_os_error().map_or(Errno::NOMEM, Errno::from_raw_os_error))?;
    Ok((Msg { arg0: json.len() as u64, ..reply(msg) }, Some(Rc::new(ForeignFd::new(fd, uid)))))
}

/// The frame of an answer.
pub fn reply(msg: &Msg) -> Msg {
    Msg { seq: msg.seq, ..Msg::new(msg.kind) }
}
