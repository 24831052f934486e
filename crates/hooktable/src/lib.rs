//! The library's table of hooks read as data, and the pages of `docs/` that
//! are written from it and from the table of counters.

pub mod limits;
pub mod pages;
pub mod unhooked;

/// One exported function.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    pub family: &'static str,
    /// What it does on our path.
    pub what: &'static str,
    pub name: &'static str,
    /// Arguments and result, in Rust's notation.
    pub signature: &'static str,
}

macro_rules! hook_table {
    ($($family:ident: $what:literal fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        /// All hooks, in the table's order.
        pub const HOOKS: &[Hook] = &[$(Hook {
            family: stringify!($family),
            what: $what,
            name: stringify!($name),
            signature: concat!("(", stringify!($($arg: $ty),*), ") -> ", stringify!($ret)),
        }),*];
    };
}
macro_rules! variadic_table {
    ($($family:ident: $what:literal $first:ident fn $name:ident;)*) => {
        /// Those with variable arguments.
        pub const VARIADIC: &[Hook] = &[$(Hook {
            family: stringify!($family),
            what: $what,
            name: stringify!($name),
            signature: "(...)",
        }),*];
    };
}
/// What a program may notice of some functions.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// Of docs/limits.md; one of [`limits::SECTIONS`].
    pub section: &'static str,
    pub what: &'static str,
    /// Names of hooks.
    pub functions: &'static [&'static str],
}

macro_rules! limit_table {
    ($($section:ident: $what:literal of $($name:ident),+;)*) => {
        /// The limits that belong to hooks, in the table's order.
        pub const LIMITS: &[Limit] = &[$(Limit {
            section: stringify!($section),
            what: $what,
            functions: &[$(stringify!($name)),+],
        }),*];
    };
}
include!("../../preload/src/table.rs");

/// All hooks.
pub fn hooks() -> impl Iterator<Item = &'static Hook> {
    HOOKS.iter().chain(VARIADIC)
}

/// Families in the order in which the table names them first.
pub fn families() -> Vec<&'static str> {
    let mut all = Vec::new();
    for h in hooks() {
        if !all.contains(&h.family) {
            all.push(h.family);
        }
    }
    all
}
