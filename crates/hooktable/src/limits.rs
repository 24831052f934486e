//! Limits: `limits.toml`, beside this crate's manifest. The cases in which a counter grows stand with the counter, in
//! `fsocket_abi::arena`.

use serde::Deserialize;
use std::sync::LazyLock;

/// What docs/limits.md says before its appendix, and what docs/hooks.md says of single functions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub section: Vec<Section>,
    pub hook: Vec<Limit>,
}

/// A section of docs/limits.md.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Its title.
    pub name: String,
    pub notice: Vec<Notice>,
}

/// What a user or an operator notices.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notice {
    pub what: String,
    pub why: String,
    /// What to do about it; none: nothing.
    #[serde(rename = "do")]
    pub remedy: Option<String>,
}

/// What a program may notice of some functions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Names of hooks.
    pub of: Vec<String>,
    pub what: String,
}

/// All of it.
pub fn limits() -> &'static Limits {
    static ALL: LazyLock<Limits> =
        LazyLock::new(|| toml::from_str(include_str!("../limits.toml")).expect("limits.toml is as the types say"));
    &ALL
}
