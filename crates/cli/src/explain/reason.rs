//! The reasons why something is not accelerated, each with its word in JSON and its sentence.

use serde::Serialize;

/// A reason: a word for programs, and a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub reason: &'static str,
    pub text: String,
}
