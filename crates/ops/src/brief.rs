//! Connections for which a process is forked, and that are short, begin in the kernel.
//!
//! Their clients see in the registry that the listener wants that. What is learned, and how:
//! [`fsocket_runtime::brief`]; ADR 53.

use crate::listen::{self, Listener};
use crate::table::{self, Desc, Kind, DESCS};
use crate::{arena, ctl, upgrade};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::arena::BRIEF_OFF;
use fsocket_proto::request;
use fsocket_runtime::brief as state;
use fsocket_sys as sys;

pub use state::{at_end, is_for_connection};

/// The connection that this process has accepted last, since its last fork: place of the listener plus one
/// and of the description, and the latter's generation. 0: none.
#[link_section = ".data.fsocket_start"]
static ACCEPTED: AtomicU64 = AtomicU64::new(0);

/// `fd` was accepted on `l`.
pub fn accepted(l: &Listener, fd: i32) {
    state::is_another();
    let Some(d) = table::lookup(fd) else { return };
    let place = listen::place_of(l);
    if place < state::LISTENERS {
        let which = u64::from(d.index()) << 8 | (place as u64 + 1);
        ACCEPTED.store(u64::from(d.generation()) << 32 | which, Ordering::Relaxed);
    }
}

/// The process is about to fork: for a connection that it has just accepted? Returns that, if it is the kernel's.
pub fn before_fork() -> Option<&'static Desc> {
    let accepted = ACCEPTED.swap(0, Ordering::Relaxed);
    if accepted == 0 {
        return None;
    }
    let (generation, index, place) = ((accepted >> 32) as u32, (accepted as u32) >> 8, (accepted & 0xff) as usize - 1);
    let is_it = |d: &&Desc| matches!(d.kind(), Kind::Shm | Kind::Kernel) && d.generation() == generation && d.is_used();
    let d = DESCS.get(index).filter(is_it)?;
    let l = listen::at(place)?;
    let id = l.id.load(Ordering::Relaxed);
    let arena = arena::ARENA.load(Ordering::Acquire);
    if !arena.is_null() {
        // SAFETY: an arena stays mapped, or is replaced by empty memory.
        unsafe { state::provide(arena.add(BRIEF_OFF)) };
    }
    let learned = state::of(place, id).filter(|_| id != 0)?;
    if let Some(in_kernel) = learned.judge() {
        let secret = state::secret_or(sys::getrandom_u64()).unwrap_or(0);
        if ctl::tell(request::Brief { listener: id, in_kernel, secret }, None) {
            learned.turn_to(in_kernel);
        }
    }
    state::expect(place, learned.in_kernel(), d.kind() == Kind::Kernel);
    (learned.in_kernel() && upgrade::can_be_handed_down(d)).then_some(d)
}

/// After the fork, in the parent.
pub fn after_fork() {
    state::is_another();
    upgrade::handed_down();
}

/// Do new connections to this listener begin in the kernel?
#[inline]
pub fn is_in_kernel(l: &Listener) -> bool {
    state::is_in_kernel(listen::place_of(l), l.id.load(Ordering::Relaxed))
}

/// Has this process nothing that a forked child would have to say to the monitor? Its listeners are the kernel's
/// for now: a child that is to accept shows them itself ([`listen::show_inherited`]).
pub fn is_silent() -> bool {
    let mut listeners = listen::used().filter(|l| l.id.load(Ordering::Relaxed) != 0);
    listeners.all(|l| is_in_kernel(l) && !l.has_syn(true))
}
