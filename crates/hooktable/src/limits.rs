//! Limits: `limits.toml`, beside this crate's manifest. Cases that a counter counts stand with the counter, in
//! `fsocket_abi::arena`.

use serde::Deserialize;
use std::sync::LazyLock;

/// What docs/limits.md says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub notice: Vec<Notice>,
    pub section: Vec<Section>,
    pub hook: Vec<Limit>,
}

/// What a program may notice of some functions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Names of hooks.
    pub of: Vec<String>,
    /// The name of a section.
    pub section: String,
    pub what: String,
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
    /// Its title.
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
