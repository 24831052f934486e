//! The attacks whose process sends the messages itself, each with its equivalent over kernel TCP.

use super::probe::Figure::{self, Asked, Connect, Hello, Request};
use super::{closings, floods, heavy, means};
use crate::lives::Life;

pub type Script = fn(&mut Life) -> Option<()>;

/// The attacking user.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Who {
    /// A user that shares memory with no other user.
    Stranger,
    /// A user that the administrator allows to share memory with the server's user.
    Shared,
    /// The server's own user.
    Peer,
}

pub struct Attack {
    /// The row in the table that this attack tests.
    pub row: u8,
    pub name: &'static str,
    pub who: Who,
    pub ours: Script,
    pub kernel: Script,
    pub figure: Figure,
    /// The server is stopped half of the time, and then reads nothing.
    pub is_busy: bool,
}

const fn of(row: u8, name: &'static str, who: Who, figure: Figure, ours: Script, kernel: Script) -> Attack {
    Attack { row, name, who, ours, kernel, figure, is_busy: false }
}

const fn busy(attack: Attack) -> Attack {
    Attack { is_busy: true, ..attack }
}

fn flood(_: &mut Life) -> Option<()> {
    means::kernel_flood(1)
}
fn flood_held(_: &mut Life) -> Option<()> {
    means::kernel_flood(800)
}
fn calls(_: &mut Life) -> Option<()> {
    means::kernel_calls()
}

use Who::{Peer, Shared, Stranger};

pub const ATTACKS: &[Attack] = &[
    of(1, "ends that linger, a broken channel", Stranger, Hello, closings::broken, closings::kernel),
    of(1, "ends that linger, the user is killed", Stranger, Hello, closings::killed, closings::kernel),
    of(1, "ends that linger, released by message", Shared, Asked, closings::released, closings::kernel),
    of(1, "sockets that linger in messages", Stranger, Asked, closings::messages, closings::kernel),
    of(1, "sockets that linger, never read", Stranger, Hello, closings::unread, closings::kernel),
    of(2, "connects and closes", Stranger, Asked, floods::comes_and_goes, flood),
    of(2, "connects, greets and closes", Stranger, Hello, floods::greets_and_goes, flood),
    of(2, "connects and stays", Shared, Hello, floods::comes_and_stays, flood_held),
    busy(of(3, "pipes for a busy server", Shared, Request, floods::pipes, calls)),
    busy(of(3, "rings for a busy server", Peer, Request, floods::rings, calls)),
    busy(of(3, "channels for a busy server", Shared, Request, floods::channels, calls)),
    of(7, "switched ends, kept", Stranger, Connect, closings::hoards_ends, closings::kernel_flight),
    of(7, "descriptors of all kinds", Stranger, Connect, closings::hoards_kinds, closings::kernel_flight),
    of(7, "processes that say nothing", Stranger, Hello, closings::hoards_processes, closings::kernel_flight),
    of(8, "answers that nobody asked for", Stranger, Asked, floods::transferred, calls),
    of(8, "takes descriptors of everybody", Stranger, Asked, floods::takes, calls),
    of(8, "names what is others'", Shared, Asked, floods::others_names, calls),
    of(12, "closes listeners with many channels", Stranger, Asked, heavy::unlistens, flood_held),
    of(12, "ends with many channels", Stranger, Asked, heavy::dies, flood_held),
    of(12, "asks of many channels", Stranger, Asked, heavy::asks, calls),
    of(12, "every message about many channels", Stranger, Asked, heavy::says_everything, calls),
    of(12, "children with all of them", Stranger, Hello, heavy::forks, calls),
];
