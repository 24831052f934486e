//! Flow control: counts how many more messages the peer has room for. A message is sent only if it
//! fits into the other agent's inbox, and no message is overwritten before it was read.
//!
//! Every message returns credits. If half of the inbox was read since the last one, a message that
//! only returns credits is due. The last place in the inbox is reserved for such messages. So two
//! agents that both send much cannot block each other: each such message returns at least half an
//! inbox.

/// Number of messages that fit into an inbox.
pub const DEPTH: u32 = 64;
/// Number of work requests that a send queue holds: one for each message, and one for the write
/// before it.
pub const QUEUE: u32 = 2 * DEPTH;
/// Most peer hosts of one agent; the completion queue has room for them.
pub const MAX_LINKS: u32 = 32;

/// The peer broke the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hostile;

/// Message counters of one link. They wrap around.
#[derive(Debug, Default)]
pub struct Flow {
    sent: u32,
    /// Sent messages that have left this host's outbox. The outbox has [`DEPTH`] places.
    completed: u32,
    /// Sent messages that the peer has reported as read.
    returned: u32,
    received: u32,
    /// Received messages whose places were returned to the peer.
    told: u32,
}

impl Flow {
    /// Whether there is room for a message.
    pub fn may_send(&self) -> bool {
        self.under_way() < DEPTH - 1
    }

    /// Whether a message is due that only returns credits.
    pub fn owes(&self) -> bool {
        self.received.wrapping_sub(self.told) >= DEPTH / 2 && self.under_way() < DEPTH
    }

    fn under_way(&self) -> u32 {
        // The credit for a message may arrive before the completion of its send.
        self.sent.wrapping_sub(self.returned).max(self.outstanding())
    }

    /// Messages that have not left the outbox yet.
    pub fn outstanding(&self) -> u32 {
        self.sent.wrapping_sub(self.completed)
    }

    /// Counts a message to send. Returns its number, and the number of received messages to report
    /// with it.
    pub fn send(&mut self) -> (u32, u32) {
        let number = self.sent;
        self.sent = self.sent.wrapping_add(1);
        self.told = self.received;
        (number, self.received)
    }

    /// The oldest message in flight has left.
    pub fn complete(&mut self) {
        self.completed = self.completed.wrapping_add(1);
    }

    /// The number that the next message must have.
    pub fn expected(&self) -> u32 {
        self.received
    }

    /// Counts a message that has arrived and was read.
    pub fn receive(&mut self, number: u32, returned: u32) -> Result<(), Hostile> {
        // Refuse more credits than messages were sent, and fewer than before: both would let us
        // overwrite unread messages.
        let fresh = returned.wrapping_sub(self.returned);
        if number != self.received || fresh > self.sent.wrapping_sub(self.returned) {
            return Err(Hostile);
        }
        self.received = self.received.wrapping_add(1);
        self.returned = returned;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// A pseudo-random number below `n`; the same in each run.
    fn below(state: &mut u64, n: u64) -> u64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) % n
    }

    #[test]
    fn two_agents_with_much_to_say_never_wait_for_each_other() {
        for seed in 0..200 {
            let mut state = seed;
            let near_wrap = u32::MAX - 100;
            let start = || Flow {
                sent: near_wrap,
                completed: near_wrap,
                returned: near_wrap,
                received: near_wrap,
                told: near_wrap,
            };
            let mut agents = [start(), start()];
            let mut wires = [VecDeque::new(), VecDeque::new()];
            let mut said = [0; 2];
            while said != [500; 2] || agents.iter().any(Flow::owes) {
                let mut moved = false;
                for me in 0..2 {
                    // Send bursts of random length.
                    for _ in 0..below(&mut state, 2 * u64::from(DEPTH)) {
                        let flow = &mut agents[me];
                        let data = flow.may_send() && said[me] < 500;
                        if data || flow.owes() {
                            wires[me].push_back(flow.send());
                            said[me] += usize::from(data);
                            moved = true;
                        }
                        assert!(wires[me].len() <= DEPTH as usize, "more than the inbox has places for");
                    }
                    for _ in 0..below(&mut state, 2 * u64::from(DEPTH)) {
                        let Some((number, returned)) = wires[me].pop_front() else { break };
                        agents[1 - me].receive(number, returned).unwrap();
                        agents[me].complete();
                        moved = true;
                    }
                }
                let idle = wires.iter().all(VecDeque::is_empty);
                let stuck = (0..2).all(|me| !agents[me].may_send() && !agents[me].owes());
                assert!(moved || !(idle && stuck), "seed {seed}: {agents:?}");
            }
        }
    }

    #[test]
    fn credits_that_were_not_sent_are_hostile() {
        let mut flow = Flow::default();
        for _ in 0..3 {
            flow.send();
        }
        assert_eq!(flow.receive(1, 0), Err(Hostile), "one was left out");
        assert_eq!(flow.receive(0, 4), Err(Hostile), "more than was sent");
        assert_eq!(flow.receive(0, 2), Ok(()));
        assert_eq!(flow.receive(1, 1), Err(Hostile), "less than before");
    }

    #[test]
    fn a_place_in_the_outbox_is_free_when_it_was_sent() {
        let mut flow = Flow::default();
        while flow.may_send() {
            flow.send();
        }
        flow.receive(0, DEPTH - 1).unwrap();
        assert!(!flow.may_send(), "the peer has read all, the device has not said so");
        flow.complete();
        assert!(flow.may_send());
    }
}
