//! The library's table of hooks as data, and the pages of `docs/` that are generated from it and from the table of
//! counters.

pub mod limits;
pub mod pages;
pub mod unhooked;

#[path = "../../preload/src/hook.rs"]
pub mod hook;
#[path = "../../preload/src/table.rs"]
mod table;

use hook::AfterSignal;
use table::{hooks as of_table, variadic_hooks};

/// One exported function.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    pub family: &'static str,
    /// Effect of the function.
    pub what: &'static str,
    pub name: &'static str,
    /// Arguments and result, in Rust's notation.
    pub signature: &'static str,
    /// Properties of the hook, such as cancellation. None: the function has variable arguments.
    pub properties: Option<hook::Hook>,
}

macro_rules! data {
    ($($family:ident($($property:ident),*) $what:literal
        fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $(, lent $lent:ident)?
        $(= $how:ident($($code:tt)*))?;)*) => {
        /// All hooks without variable arguments, in the table's order.
        pub const HOOKS: &[Hook] = &[$(Hook {
            family: stringify!($family),
            what: $what,
            name: stringify!($name),
            signature: concat!("(", stringify!($($arg: $ty),*), ") -> ", stringify!($ret)),
            properties: Some(hook::Hook::$family()$(.$property())*),
        }),*];
    };
}
of_table!(data);

macro_rules! variadic_data {
    ($($family:ident $what:literal $first:ident fn $name:ident;)*) => {
        /// Hooks with variable arguments.
        pub const VARIADIC: &[Hook] = &[$(Hook {
            family: stringify!($family),
            what: $what,
            name: stringify!($name),
            signature: "(...)",
            properties: None,
        }),*];
    };
}
variadic_hooks!(variadic_data);

impl Hook {
    /// The rule for a call that a signal interrupts.
    pub fn after_signal(&self) -> AfterSignal {
        self.properties.map_or(AfterSignal::NoSleep, |p| p.after_signal)
    }
}

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
