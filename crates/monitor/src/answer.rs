//! Answers to the requests of clients.

use crate::foreign::ForeignFd;
use fsocket_proto::Message;
use rustix::io::Errno;
use std::rc::Rc;

/// The answer to a request, and the descriptor that goes with it.
pub type Answer<A> = Result<(A, Option<Rc<ForeignFd>>), Errno>;

/// Converts the answer to one kind of request into an answer of any kind.
pub fn any<A: Into<Message>>(answer: Answer<A>) -> Answer<Message> {
    answer.map(|(answer, fd)| (answer.into(), fd))
}

/// A violation of the protocol. The monitor drops the client that sent it.
pub struct Misbehaved(pub &'static str);

/// An answer that does not fit into a message: the length of the JSON text, and a memfd with it.
/// The memfd counts for user `uid`.
pub fn answer_json(uid: u32, what: &impl serde::Serialize) -> Answer<u64> {
    let json = serde_json::to_vec(what).map_err(|_| Errno::NOMEM)?;
    let fd = crate::memory::memfd_of("fastsocket-answer", &json)
        .map_err(|e| e.raw_os_error().map_or(Errno::NOMEM, Errno::from_raw_os_error))?;
    Ok((json.len() as u64, Some(Rc::new(ForeignFd::new(fd, uid)))))
}
