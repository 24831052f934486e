//! Versions of glibc: what the library needs, and what a process has.

use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader};
use object::{Endianness, ReadCache};
use std::fmt;
use std::fs::File;
use std::path::Path;

/// A version as `2.36`: major and minor number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32, u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The newest version of glibc's symbols that the file names. For a program or a library it is the
/// version that the file requires; for glibc itself (libc.so.6) it is the version that glibc has.
/// `None`: the file cannot be read, or names no version.
pub fn newest(file: &Path) -> Option<Version> {
    let data = ReadCache::new(File::open(file).ok()?);
    let header = FileHeader64::<Endianness>::parse(&data).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, &data).ok()?;
    let (_, names) = sections.section_by_name(endian, b".dynstr")?;
    newest_in(names.data(endian, &data).ok()?)
}

/// The newest version among strings that end with NUL each.
fn newest_in(strings: &[u8]) -> Option<Version> {
    strings.split(|b| *b == 0).filter_map(version).max()
}

/// Parses a symbol version such as `GLIBC_2.34`.
fn version(name: &[u8]) -> Option<Version> {
    let numbers = std::str::from_utf8(name).ok()?.strip_prefix("GLIBC_")?;
    let mut parts = numbers.split('.').map(str::parse);
    Some(Version(parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_counts() {
        let of = |text: &str| newest_in(text.as_bytes()).map(|v| v.to_string());
        assert_eq!(of("memcpy\0GLIBC_2.9\0GLIBC_2.14\0GLIBC_2.2.5\0").as_deref(), Some("2.14"));
        assert_eq!(of("GLIBC_PRIVATE\0GLIBCXX_3.4\0libc.so.6\0"), None);
        assert!(version(b"GLIBC_2.9") < version(b"GLIBC_2.28"));
    }

    #[test]
    fn this_program_needs_no_more_than_its_glibc_has() {
        let own = newest(Path::new("/proc/self/exe")).expect("a dynamic program");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc =
            maps.lines().find_map(|l| l.split_whitespace().nth(5).filter(|p| p.ends_with("/libc.so.6"))).unwrap();
        assert!(newest(Path::new(libc)).is_some_and(|has| has >= own));
        assert_eq!(newest(Path::new("/etc/passwd")), None);
    }
}
