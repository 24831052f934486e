//! The symbols of the running kernel.

use crate::{Error, Result};
use std::fs::File;
use std::io::{BufRead, BufReader};

const FILE: &str = "/proc/kallsyms";
/// A variable must begin at most this far below an address, because the kernel does not list
/// sizes.
const VARIABLE: u64 = 4096;

pub(crate) struct Symbols {
    /// Address and name, ascending.
    functions: Vec<(u64, String)>,
    variables: Vec<(u64, String)>,
}

impl Symbols {
    /// # Errors
    /// [`Error::File`], also if the kernel hides addresses (kptr_restrict).
    pub fn read() -> Result<Symbols> {
        let file = File::open(FILE).map_err(|e| Error::file(FILE, e))?;
        let mut symbols = Symbols { functions: Vec::new(), variables: Vec::new() };
        for line in BufReader::new(file).lines() {
            symbols.add(&line.map_err(|e| Error::file(FILE, e))?);
        }
        if symbols.functions.is_empty() {
            return Err(Error::file(FILE, std::io::Error::other("addresses are hidden (kernel.kptr_restrict)")));
        }
        symbols.functions.sort();
        symbols.variables.sort();
        Ok(symbols)
    }

    /// Adds a line such as "ffffffff81000000 T _stext" or "ffffffffc0000000 t name\t[module]".
    fn add(&mut self, line: &str) {
        let mut fields = line.split_whitespace();
        let (Some(address), Some(kind), Some(name)) = (fields.next(), fields.next(), fields.next()) else { return };
        let Ok(address @ 1..) = u64::from_str_radix(address, 16) else { return };
        match kind.as_bytes() {
            b"t" | b"T" | b"w" | b"W" => self.functions.push((address, name.to_owned())),
            b"b" | b"B" | b"d" | b"D" => self.variables.push((address, name.to_owned())),
            _ => {}
        }
    }

    /// The function that contains an address, without suffixes that the compiler has added.
    pub fn function(&self, address: u64) -> Option<&str> {
        let (_, name) = below(&self.functions, address)?;
        let name = name.strip_prefix("__pfx_").unwrap_or(name);
        Some(name.split_once('.').map_or(name, |(name, _)| name))
    }

    /// The variable that contains an address, if there is one near enough.
    pub fn variable(&self, address: u64) -> Option<&str> {
        let (start, name) = below(&self.variables, address)?;
        (address - start < VARIABLE).then_some(name.as_str())
    }
}

fn below(sorted: &[(u64, String)], address: u64) -> Option<&(u64, String)> {
    sorted[..sorted.partition_point(|(start, _)| *start <= address)].last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_around() {
        let mut symbols = Symbols { functions: Vec::new(), variables: Vec::new() };
        for line in [
            "ffffffff81000000 T _stext",
            "ffffffff81000100 t tcp_v4_rcv.isra.0",
            "ffffffff82000000 d tcp_hashinfo",
            "ffffffffc0000000 t nf_hook\t[nf_tables]",
            "0000000000000000 A fixed_percpu_data",
            "nonsense",
        ] {
            symbols.add(line);
        }
        assert_eq!(symbols.function(0xffffffff81000150), Some("tcp_v4_rcv"));
        assert_eq!(symbols.function(0xffffffff81000000), Some("_stext"));
        assert_eq!(symbols.function(0xffffffff80000000), None);
        assert_eq!(symbols.function(0xffffffffc0000010), Some("nf_hook"));
        assert_eq!(symbols.variable(0xffffffff82000008), Some("tcp_hashinfo"));
        assert_eq!(symbols.variable(0xffff888100000000), None, "memory, not a variable");
        assert_eq!(symbols.variable(0xffffffff82100000), None, "too far from any");
    }
}
