//! Loading, with what the kernel's verifier had to say about it.
//!
//! libbpf prints the verifier's log through a process-wide callback; here it is
//! caught while an object loads, and its end becomes part of the error.

use crate::{Error, Result};
use libbpf_rs::{OpenObject, PrintLevel};
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Loads are taken in turn, so that a log belongs to its object.
static TURN: Mutex<()> = Mutex::new(());
static LOG: Mutex<String> = Mutex::new(String::new());

/// Lines of the log that an error shows: the verifier's reason is at its end.
const LINES: usize = 12;

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn catch(_level: PrintLevel, text: String) {
    lock(&LOG).push_str(&text);
}

/// Where a skeleton keeps its object. A skeleton borrows it for life, so it is
/// never freed: one word a load.
pub(crate) fn storage() -> &'static mut MaybeUninit<OpenObject> {
    Box::leak(Box::new(MaybeUninit::uninit()))
}

/// Nothing that libbpf says goes to standard error: what matters comes as an
/// [`Error`]. Lasts until the program ends.
pub fn quiet() {
    libbpf_rs::set_print(None);
}

/// Runs `load` for the object `name`; a failure carries the end of the log.
pub(crate) fn logged<T>(name: &str, load: impl FnOnce() -> libbpf_rs::Result<T>) -> Result<T> {
    let _turn = lock(&TURN);
    lock(&LOG).clear();
    let before = libbpf_rs::set_print(Some((PrintLevel::Warn, catch)));
    let result = load();
    libbpf_rs::set_print(before);
    result.map_err(|source| Error::Load { object: name.to_owned(), source, log: end_of(&lock(&LOG)) })
}

fn end_of(log: &str) -> String {
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
