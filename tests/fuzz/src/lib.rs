//! One function for each fuzzer of `fuzz/`. It takes any bytes, and panics if something is wrong.
//!
//! | target | meaning of the bytes |
//! | --- | --- |
//! | [`ring::ring`] | calls on a byte ring, and what its peer writes at each access to the ring |
//! | [`syn::syn`] | calls on SYN queues, and what a peer writes into them |
//! | [`readers::report`], [`readers::registry`], [`readers::settings`] | a report, a registry, a configuration file |
//! | [`readers::packets`] | packets between library and monitor |
//! | [`player::messages`] | messages with descriptors to a monitor, from two clients |
//! | [`player::arena`] | the arena and the channel of a client, which then ends |

pub mod input;
#[cfg(feature = "monitor")]
pub mod player;
pub mod readers;
pub mod ring;
pub mod syn;

/// A target: the name of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: &[Target] = &[
    ("ring", ring::ring),
    ("syn", syn::syn),
    ("report", readers::report),
    ("registry", readers::registry),
    ("packets", readers::packets),
    #[cfg(feature = "monitor")]
    ("settings", readers::settings),
    #[cfg(feature = "monitor")]
    ("messages", player::messages),
    #[cfg(feature = "monitor")]
    ("arena", player::arena),
];
