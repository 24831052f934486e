//! What a hook shall do.

/// What a hook shall do: the answer, or "let libc do it".
pub enum Outcome<T> {
    /// Done here.
    Done(T),
    /// The kernel's business; whatever reason there is has been counted.
    Kernel,
}

impl<T> Outcome<T> {
    /// Look at, or change, an answer of ours.
    pub fn map_done<U>(self, f: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Outcome::Done(v) => Outcome::Done(f(v)),
            Outcome::Kernel => Outcome::Kernel,
        }
    }
}
