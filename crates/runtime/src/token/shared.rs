//! The token of a socket that threads of several processes may use.

use super::{Linux, Reentered};
use crate::process;
use fsocket_abi::half::Half;
use fsocket_sync::token;
use fsocket_sys as sys;

/// The entered token; leaves on drop.
pub type Entered<'a> = token::Entered<'a, Half>;

#[inline(always)]
pub fn enter(h: &Half) -> Result<Entered<'_>, Reentered> {
    token::enter::<Linux, Half>(h, process::thread())
}

/// Gives the token back; see [`token::Entered::give_back`].
pub fn give_back(t: Entered<'_>) {
    t.give_back(process::thread());
}

/// [`enter`] by the thread that has given credit; see [`fsocket_sync::token`].
#[inline(always)]
pub fn enter_on_credit(h: &Half) -> Option<token::Owned<'_, Half>> {
    token::enter_on_credit(h)
}

/// [`token::on_credit`]; the place is the position.
#[inline(always)]
pub fn on_credit(h: &Half, from: u64, to: u64) -> Option<token::OnCredit<'_, Half>> {
    token::on_credit(h, from, to)
}

/// Does the calling thread own the token?
pub fn owned(h: &Half) -> bool {
    token::is_owner(h, process::thread())
}

/// The calling thread, within the process.
#[inline(always)]
pub fn here() -> u64 {
    sys::cpu::thread_id()
}

/// `id ==` [`here`].
#[inline(always)]
pub fn is_here(id: u64) -> bool {
    sys::cpu::is_thread(id)
}

/// [`is_here`] for a caller that has a register left: what it has loaded serves once more.
#[inline(always)]
pub fn if_here(id: u64) -> Option<Here> {
    let me = sys::cpu::thread_id_in_place();
    (id == me).then_some(Here(me))
}

/// The calling thread.
pub struct Here(u64);
impl Here {
    /// [`sys::cpu::mark`].
    #[inline(always)]
    pub fn cpu_mark(self) -> u32 {
        // SAFETY: `if_here` has asked for it.
        unsafe { sys::cpu::mark_of(self.0) }
    }
}
