//! How many messages a peer has room for. No message is sent that would not fit into the other agent's inbox,
//! and none is overwritten before it was read.
//!
//! Credits go back with every message; a message for nothing but credits is due when half of the inbox was read
//! since. The last place in the inbox is kept for those, so that two agents with much to say do not wait
//! for each other: each such message gives back half an inbox at least.

/// Messages that fit into an inbox.
pub const DEPTH: u32 = 64;
/// Work requests that a send queue holds: for each message one, and one for the write before it.
pub const QUEUE: u32 = 2 * DEPTH;
/// Peer hosts of one agent: what its completion queue has room for.
pub const MAX_LINKS: u32 = 32;

/// The peer broke the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hostile;

/// Counters of messages, one link's. They wrap.
#[derive(Debug, Default)]
pub struct Flow {
    sent: u32,
    /// Of the sent ones: left this host's outbox, which has as many places.
    completed: u32,
    /// Of the sent ones: read by the peer, as it says.
    returned: u32,
    received: u32,
    /// Of the received ones: given back to the peer.
    told: u32,
}

impl Flow {
    /// Is there room for a message?
    pub fn may_send(&self) -> bool {
        self.under_way() < DEPTH - 1
    }

    /// Is a message due that only returns credits?
    pub fn owes(&self) -> bool {
        self.received.wrapping_sub(self.told) >= DEPTH / 2 && self.under_way() < DEPTH
    }

    fn under_way(&self) -> u32 {
        // A credit may come back before the completion of what it is for.
        self.sent.wrapping_sub(self.returned).max(self.outstanding())
    }

    /// Messages that have not left the outbox.
    pub fn outstanding(&self) -> u32 {
        self.sent.wrapping_sub(self.completed)
    }

    /// The number of the next message, and the credits to send with it.
    pub fn send(&mut self) -> (u32, u32) {
        let number = self.sent;
        self.sent = self.sent.wrapping_add(1);
        self.told = self.received;
        (number, self.received)
    }

    /// The oldest message that was under way has left.
    pub fn complete(&mut self) {
        self.completed = self.completed.wrapping_add(1);
    }

    /// The number that the next message must have.
    pub fn expected(&self) -> u32 {
        self.received
    }

    /// A message has come and was read.
    pub fn receive(&mut self, number: u32, returned: u32) -> Result<(), Hostile> {
        // More than was sent, or less than before, would let us write over what was not read.
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
                    // Bursts of any length in any order.
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
