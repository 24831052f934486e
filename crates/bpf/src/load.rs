//! Loads BPF objects, and keeps what the kernel's verifier prints about them.
//!
//! libbpf prints the verifier's log through a callback of the whole process. This module catches
//! the log while an object loads, and adds the end of it to the error.

use crate::{Error, Result};
use libbpf_rs::{OpenObject, PrintLevel};
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held during a load, so that objects load one after the other and each log belongs to one
/// object.
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

/// Memory in which a skeleton keeps its object. The skeleton borrows it for its whole life, so it
/// is never freed: one word for each load.
pub(crate) fn storage() -> &'static mut MaybeUninit<OpenObject> {
    Box::leak(Box::new(MaybeUninit::uninit()))
}

/// Stops libbpf from printing to standard error, because every failure is returned as an
/// [`Error`]. Lasts until the program ends.
pub fn quiet() {
    libbpf_rs::set_print(None);
}

/// Runs `load` for the object `name`. An error contains the end of the verifier's log.
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
