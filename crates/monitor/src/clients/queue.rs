//! Messages that wait to be sent to one process.
//!
//! A process that does not read must take only a bounded amount of memory. It must not be dropped
//! because of messages that others cause. So there are three kinds of messages:
//!
//! | what | bound |
//! | --- | --- |
//! | answers, and what the process itself has caused | while many answers wait, or one with a descriptor, its requests are not read; beyond [`OWN`] messages it is dropped |
//! | the state of something (a channel has ended, a waker was rung) | one message for each thing; a repetition is not added |
//! | what another process causes, each time | each process has a share; beyond it that process is refused |

use crate::by_user::Counts;
use crate::foreign::ForeignFd;
use crate::{shares, ConnId};
use fsocket_proto::{Message, Msg, Payload};
use std::collections::VecDeque;
use std::rc::Rc;

/// Messages that a process may cause to itself. A process with more unread messages does not read,
/// and is dropped.
const OWN: usize = 8192;
/// Messages that one other process may cause. (A process that has connections from all ports of an
/// address has 64 channels.)
const OF_ONE: u32 = 256;
/// Messages that all other processes may cause. One user may cause as many as are then left for
/// all other users.
const OF_ALL: u64 = 4096;

pub struct Outgoing {
    pub msg: Msg,
    pub fd: Option<Rc<ForeignFd>>,
    /// The message is no answer: the monitor bumps `pending` in the arena once it is sent.
    pub unasked: bool,
}

impl Outgoing {
    /// An unrequested message.
    pub fn of(notice: impl Payload) -> Outgoing {
        Outgoing { msg: notice.into(), fd: None, unasked: true }
    }

    /// An unrequested message with a descriptor.
    pub fn with(notice: impl Payload, fd: Rc<ForeignFd>) -> Outgoing {
        Outgoing { fd: Some(fd), ..Outgoing::of(notice) }
    }
}

/// The process that causes a message, and the user of that process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct By {
    pub process: ConnId,
    pub uid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Own,
    /// The message tells the state of something.
    State,
    Other(By),
}

#[derive(Default)]
pub struct Queue {
    all: VecDeque<(Outgoing, Cause)>,
    answers: usize,
    /// Answers with a descriptor.
    descriptors: usize,
    own: usize,
    of_process: Counts<ConnId>,
    of_user: Counts<u32>,
    of_others: u64,
}

impl Queue {
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Number of answers that wait.
    pub fn answers(&self) -> usize {
        self.answers
    }

    /// Whether an answer with a descriptor waits.
    pub fn has_descriptors(&self) -> bool {
        self.descriptors > 0
    }

    /// Whether the process has caused so many messages to itself that it evidently does not read.
    pub fn is_too_long(&self) -> bool {
        self.own >= OWN
    }

    /// Whether process `by` may cause this many `more` messages.
    pub fn has_room(&self, by: By, more: u32) -> bool {
        let more = u64::from(more);
        self.of_process.of(by.process) + more <= OF_ONE.into()
            && shares::admits(self.of_user.of(by.uid), self.of_others, more, OF_ALL)
    }

    pub fn push(&mut self, out: Outgoing, cause: Cause) {
        self.answers += usize::from(!out.unasked);
        self.descriptors += usize::from(!out.unasked && out.fd.is_some());
        match cause {
            Cause::Own => self.own += 1,
            Cause::State => {}
            Cause::Other(by) => {
                self.of_process.change(by.process, 1);
                self.of_user.change(by.uid, 1);
                self.of_others += 1;
            }
        }
        self.all.push_back((out, cause));
    }

    pub fn first(&self) -> Option<&Outgoing> {
        self.all.front().map(|(out, _)| out)
    }

    pub fn pop(&mut self) {
        if let Some(gone) = self.all.pop_front() {
            self.uncount(&gone);
        }
    }

    fn uncount(&mut self, (out, cause): &(Outgoing, Cause)) {
        self.answers -= usize::from(!out.unasked);
        self.descriptors -= usize::from(!out.unasked && out.fd.is_some());
        match cause {
            Cause::Own => self.own -= 1,
            Cause::State => {}
            Cause::Other(by) => {
                self.of_process.change(by.process, -1);
                self.of_user.change(by.uid, -1);
                self.of_others -= 1;
            }
        }
    }

    pub fn clear(&mut self) {
        *self = Queue::default();
    }

    /// Removes the first unrequested message that `is` accepts.
    fn take(&mut self, is: impl Fn(Message) -> bool) -> bool {
        let at = self.all.iter().position(|(out, _)| out.unasked && Message::decode(&out.msg).is_ok_and(&is));
        let gone = at.and_then(|at| self.all.remove(at));
        gone.inspect(|gone| self.uncount(gone)).is_some()
    }

    /// Whether this message is of no use to a process that has not read the earlier ones. It may
    /// repeat an earlier message. Or it may report the end of something whose beginning is still
    /// unread: then both messages are dropped.
    pub fn is_needless(&mut self, msg: &Msg) -> bool {
        match Message::decode(msg) {
            Ok(Message::ChannelGone(gone)) => {
                self.take(|m| matches!(m, Message::ChannelSrv(made) if made.channel == gone.channel))
            }
            Ok(Message::PeerGone(gone)) => {
                self.take(|m| matches!(m, Message::Peer(peer) if (peer.group, peer.place) == (gone.group, gone.place)))
            }
            // Only the last message of this kind counts.
            Ok(Message::ToKernel(_)) => {
                self.take(|m| matches!(m, Message::ToKernel(_)));
                false
            }
            Ok(
                Message::WakeHint(_)
                | Message::Look(_)
                | Message::Transfer(_)
                | Message::Transferred(_)
                | Message::Watched(_)
                | Message::OtherRights(_),
            ) => self.all.iter().any(|(out, _)| out.msg == *msg),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::notice;

    /// Sends until a message is refused. Returns how many were accepted.
    fn fill(q: &mut Queue, by: By) -> u32 {
        let mut n = 0;
        while q.has_room(by, 1) {
            q.push(Outgoing::of(notice::WakeHint { group: n.into() }), Cause::Other(by));
            n += 1;
        }
        n
    }

    #[test]
    fn a_sender_that_takes_all_it_can_leaves_room_for_others() {
        let mut q = Queue::default();
        for process in 0..1000 {
            fill(&mut q, By { process, uid: 7 });
        }
        assert_eq!(fill(&mut q, By { process: 1000, uid: 7 }), 0, "its user has enough");
        assert_eq!(fill(&mut q, By { process: 1001, uid: 8 }), OF_ONE);
        assert!(!q.is_too_long(), "what others send is no fault of the receiver's");
        while q.first().is_some() {
            q.pop();
        }
        assert_eq!(fill(&mut q, By { process: 1000, uid: 7 }), OF_ONE, "it has been read");
        q.clear();
        assert!(q.is_empty() && q.has_room(By { process: 1000, uid: 7 }, OF_ONE));
    }

    #[test]
    fn what_is_over_before_it_was_read_is_not_said() {
        let gone = |channel| Msg::from(notice::ChannelGone { channel, broken: false });
        let mut q = Queue::default();
        let by = By { process: 1, uid: 7 };
        for n in 0..10 {
            q.push(Outgoing::of(notice::ChannelSrv { channel: n, listener: 1, size: 1 }), Cause::Other(by));
            q.push(Outgoing::of(notice::Peer { group: 1, place: n, cpu: 1 }), Cause::Other(by));
            let (channel, place) = (gone(n), notice::PeerGone { group: 1, place: n });
            assert!(q.is_needless(&channel) && q.is_needless(&place.into()));
        }
        assert!(q.is_empty() && q.has_room(by, OF_ONE));
        assert!(!q.is_needless(&gone(3)), "it knows of that one");
        for off in [true, false, true] {
            let out = Outgoing::of(notice::ToKernel { off });
            assert!(!q.is_needless(&out.msg));
            q.push(out, Cause::State);
        }
        assert_eq!(q.all.len(), 1);
        assert!(q.first().is_some_and(|out| out.msg.read() == Ok(notice::ToKernel { off: true })));
    }
}
