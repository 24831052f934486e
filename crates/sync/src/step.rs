//! The steps that a model can leave out, to show that they are needed.

/// A step of the doorbell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The heavy fence of a sleeper that does not find CONFIRMED.
    SleeperHeavy,
    /// The fence of a sender that sees SLEEPY.
    SenderFence,
    /// Another sleeper than the first does not confirm.
    OnlyFirstConfirms,
    /// Only a confirmed word is cleared.
    ClearConfirmed,
}
