//! Why something is not accelerated.

use serde::Serialize;

/// A word for programs, a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub reason: &'static str,
    pub text: String,
}
