//! Limits that belong to no single function: `limits.toml`, beside this crate's manifest. Those that do stand
//! with it, in the library's table of hooks; cases that a counter counts stand with the counter, in
//! `fsocket_abi::arena`.

use serde::Deserialize;
use std::sync::LazyLock;

/// What docs/limits.md says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub notice: Vec<Notice>,
    pub section: Vec<Section>,
}

/// What somebody notices who uses fastsocket.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notice {
    pub what: String,
    pub why: String,
    /// What to do about it.
    #[serde(rename = "do")]
    pub remedy: String,
}

/// A section of the details.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Its title; also the word in the table of hooks.
    pub name: String,
    /// Beginnings of the names of the counters of its table.
    pub counters: Vec<String>,
    pub limits: Vec<String>,
}

/// All of it.
pub fn limits() -> &'static Limits {
    static ALL: LazyLock<Limits> =
        LazyLock::new(|| toml::from_str(include_str!("../limits.toml")).expect("limits.toml is as the types say"));
    &ALL
}
