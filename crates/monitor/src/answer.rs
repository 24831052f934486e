//! Answers to what clients ask for.

use crate::foreign::ForeignFd;
use fsocket_proto::Message;
use rustix::io::Errno;
use std::rc::Rc;

/// The answer to a request, and the descriptor that goes with it.
pub type Answer<A> = Result<(A, Option<Rc<ForeignFd>>), Errno>;

/// The answer to one request as that to any.
pub fn any<A: Into<Message>>(answer: Answer<A>) -> Answer<Message> {
    answer.map(|(answer, fd)| (answer.into(), fd))
}

/// Ends the client that sent such a thing.
pub struct Misbehaved(pub &'static str);

/// An answer that is too long for a message: its length, and a memfd. The memfd counts for user `uid`.
pub fn answer_json(uid: u32, what: &impl serde::Serialize) -> Answer<u64> {
    let json = serde_json::to_vec(what).map_err(|_| Errno::NOMEM)?;
    let fd = crate::memory::memfd_of("fastsocket-answer", &json)
        .map_err(|e| e.raw_os_error().map_or(Errno::NOMEM, Errno::from_raw_os_error))?;
    Ok((json.len() as u64, Some(Rc::new(ForeignFd::new(fd, uid)))))
}
