//! The limits in `limits.toml`, which is beside this crate's manifest. The cases in which a counter grows are
//! documented with the counter, in `fsocket_abi::arena`.

use serde::Deserialize;
use std::sync::LazyLock;

/// The text of docs/limits.md, and the limits of single functions in docs/hooks.md.
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
    /// Title of the section.
    pub name: String,
    pub notice: Vec<Notice>,
}

/// A limit that a user or an operator notices.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notice {
    pub what: String,
    pub why: String,
    /// The remedy; `None`: there is none.
    #[serde(rename = "do")]
    pub remedy: Option<String>,
}

/// A limit that a program may notice with some functions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Names of hooks.
    pub of: Vec<String>,
    pub what: String,
}

/// The contents of `limits.toml`.
pub fn limits() -> &'static Limits {
    static ALL: LazyLock<Limits> =
        LazyLock::new(|| toml::from_str(include_str!("../limits.toml")).expect("limits.toml is as the types say"));
    &ALL
}
