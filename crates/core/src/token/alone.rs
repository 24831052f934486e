//! For one thread and its signal handlers only, with the feature `unguarded` not even for these: to
//! measure what the rest costs (`make bench-sharing`).

use super::{Linux, Reentered};
use fsocket_abi::arena::Half;
use fsocket_sync::token;
use fsocket_sys as sys;

const GUARDED: bool = cfg!(not(feature = "unguarded"));

/// Entered; leaves on drop.
pub struct Entered<'a>(#[allow(dead_code)] Option<token::Owned<'a, Half>>);

#[inline(always)]
pub fn enter(h: &Half) -> Result<Entered<'_>, Reentered> {
    let _ = token::enter::<Linux, Half>;
    match GUARDED {
        true => token::enter_on_credit(h).map(|t| Entered(Some(t))).ok_or(Reentered),
        false => Ok(Entered(None)),
    }
}

/// Leaves for good.
pub fn give_back(_: Entered<'_>) {}

#[inline(always)]
pub fn enter_on_credit(h: &Half) -> Option<Entered<'_>> {
    enter(h).ok()
}

pub struct OnCredit<'a>(Option<token::OnCredit<'a, Half>>);
impl OnCredit<'_> {
    #[inline(always)]
    pub fn begin(self) {
        if let Some(inside) = self.0 {
            inside.begin();
        }
    }
}

#[inline(always)]
pub fn on_credit(h: &Half, from: u64, to: u64) -> Option<OnCredit<'_>> {
    match GUARDED {
        true => token::on_credit(h, from, to).map(|t| OnCredit(Some(t))),
        false => Some(OnCredit(None)),
    }
}

pub fn owned(_: &Half) -> bool {
    true
}

/// The only thread.
#[inline(always)]
pub fn here() -> u64 {
    1
}

#[inline(always)]
pub fn is_here(id: u64) -> bool {
    id == here()
}

#[inline(always)]
pub fn if_here(id: u64) -> Option<Here> {
    is_here(id).then_some(Here(()))
}

pub struct Here(());
impl Here {
    #[inline(always)]
    pub fn cpu_mark(self) -> u32 {
        sys::cpu::mark()
    }
}
