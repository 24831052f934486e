//! Steps that a model can leave out, to show that they are needed.

/// A step of the doorbell, or of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The heavy fence of a sleeper that does not find CONFIRMED.
    SleeperHeavy,
    /// The fence of a sender that sees SLEEPY in the word.
    SenderFence,
    /// Only the sleeper that set SLEEPY may confirm.
    OnlyFirstConfirms,
    /// A sender clears the word only if it is confirmed.
    ClearConfirmed,
    /// The look between arming and sleeping.
    SecondLook,
    /// The fence of a sleeper after it has noted that it sleeps, before it looks for a request.
    SleepsFence,
}
