//! The kind of an executable file. It decides whether the dynamic loader can put the library into
//! the program.

use object::elf::{FileHeader64, ET_DYN, ET_EXEC};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, ReadCache};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The interpreter of a script may be a script itself. The kernel follows at most this many.
const SCRIPTS: u32 = 5;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Dynamically linked, with the same loader as this command.
    Ours,
    /// Dynamically linked, with musl's loader (Alpine).
    Musl,
    /// Statically linked: there is no loader that could load the library.
    Static,
    /// A Go program. Go's runtime makes system calls without libc, so the library has no effect
    /// even if it is loaded.
    Go,
    /// Dynamically linked, with another loader.
    Loader(PathBuf),
    /// Made for another machine or for 32 bits.
    Machine,
    /// Not an ELF file.
    Unknown,
}

impl Kind {
    /// The word for this kind in JSON output.
    pub fn word(&self) -> &'static str {
        match self {
            Kind::Ours => "dynamic",
            Kind::Static => "static",
            Kind::Go => "go",
            Kind::Musl => "musl",
            Kind::Loader(_) => "other_loader",
            Kind::Machine => "other_machine",
            Kind::Unknown => "unknown",
        }
    }

    /// Whether the program does not even start if LD_PRELOAD names the library.
    pub fn refuses_library(&self) -> bool {
        matches!(self, Kind::Loader(_) | Kind::Machine)
    }

    /// The reason why the library has no effect on this program. `None`: the library works.
    pub fn obstacle(&self) -> Option<String> {
        Some(match self {
            Kind::Ours | Kind::Musl | Kind::Unknown => return None,
            Kind::Static => "it is statically linked".into(),
            Kind::Go => "it is a Go program, which makes its system calls itself".into(),
            Kind::Loader(loader) => format!("it has another loader ({})", loader.display()),
            Kind::Machine => "it is made for another machine".into(),
        })
    }
}

fn is_musl(loader: &Path) -> bool {
    loader.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-musl"))
}

/// Finds the kind of a file. For a script this is the kind of its interpreter.
///
/// # Errors
/// The file cannot be read.
pub fn look(path: &Path) -> io::Result<Kind> {
    let mut path = path.to_owned();
    for _ in 0..SCRIPTS {
        let file = File::open(&path)?;
        match interpreter(&file)? {
            Some(next) => path = next,
            None => return Ok(elf(file).unwrap_or(Kind::Unknown)),
        }
    }
    Ok(Kind::Unknown)
}

/// The interpreter that the first line of a script names. `None`: the file is not a script.
fn interpreter(file: &File) -> io::Result<Option<PathBuf>> {
    let mut line = Vec::new();
    // The kernel does not look further than this for the end of the line, either.
    BufReader::new(file).take(256).read_until(b'\n', &mut line)?;
    io::Seek::rewind(&mut &*file)?;
    let Some(rest) = line.strip_prefix(b"#!") else { return Ok(None) };
    let name = rest.trim_ascii().split(|b| b.is_ascii_whitespace()).next().unwrap_or_default();
    Ok((!name.is_empty()).then(|| OsStr::from_bytes(name).into()))
}

struct Elf {
    machine: u16,
    loader: Option<PathBuf>,
    is_go: bool,
}

/// `None`: the file is not a 64-bit executable.
fn read(file: File) -> Option<Elf> {
    let data = ReadCache::new(file);
    let header = FileHeader64::<Endianness>::parse(&data).ok()?;
    let endian = header.endian().ok()?;
    if !matches!(header.e_type(endian), ET_DYN | ET_EXEC) {
        return None;
    }
    let segments = header.program_headers(endian, &data).ok()?;
    let loader = segments.iter().find_map(|s| s.interpreter(endian, &data).ok()?);
    let loader = loader.map(|name| OsString::from_vec(name.to_vec()).into());
    // Stripped programs may have no section table, but Go's linker leaves it.
    let is_go = header.sections(endian, &data).is_ok_and(|s| s.section_by_name(endian, b".go.buildinfo").is_some());
    Some(Elf { machine: header.e_machine(endian), loader, is_go })
}

fn elf(mut file: File) -> Option<Kind> {
    let mut magic = [0; 4];
    file.read_exact(&mut magic).ok()?;
    if magic != *b"\x7fELF" {
        return None;
    }
    let Some(it) = read(file) else { return Some(Kind::Machine) };
    let own = read(File::open("/proc/self/exe").ok()?)?;
    Some(match it.loader {
        _ if it.machine != own.machine => Kind::Machine,
        _ if it.is_go => Kind::Go,
        None => Kind::Static,
        // Compare only the file name, because distributions install the loader at different paths.
        Some(loader) if loader.file_name() == own.loader.as_deref().and_then(Path::file_name) => Kind::Ours,
        Some(loader) if is_musl(&loader) => Kind::Musl,
        Some(loader) => Kind::Loader(loader),
    })
}

/// The file that `execvp` would execute.
pub fn in_path(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(name.into());
    }
    let is_program = |p: &PathBuf| std::fs::metadata(p).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0);
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind of a file that begins with this program's headers, changed by `change`.
    fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Kind {
        let mut bytes = std::fs::read("/proc/self/exe").unwrap();
        change(&mut bytes);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        look(file.path()).unwrap()
    }

    fn loader_at(bytes: &[u8]) -> usize {
        bytes.windows(5).position(|w| w == b"/lib/" || w == b"/lib6").unwrap()
    }

    #[test]
    fn kinds() {
        assert_eq!(changed(|_| ()), Kind::Ours);
        assert_eq!(changed(|b| b[18] ^= 1), Kind::Machine);
        assert_eq!(changed(|b| b[4] = 1), Kind::Machine);
        assert_eq!(changed(|b| b.truncate(100)), Kind::Machine);
        assert_eq!(changed(|b| b.clear()), Kind::Unknown);
        let musl = changed(|b| {
            let at = loader_at(b);
            b[at..at + 17].copy_from_slice(b"/lib/ld-musl.so.1");
        });
        assert_eq!((musl.word(), musl.obstacle(), musl.refuses_library()), ("musl", None, false));
        let other = changed(|b| {
            let at = loader_at(b);
            b[at..at + 17].copy_from_slice(b"/lib/ld-other.so\0");
        });
        assert!(other.refuses_library() && other.obstacle().unwrap().contains("another loader"), "{other:?}");
    }

    #[test]
    fn scripts_are_what_their_interpreter_is() {
        let script = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(script.path(), "#! /proc/self/exe -x\n").unwrap();
        assert_eq!(look(script.path()).unwrap(), Kind::Ours);
        std::fs::write(script.path(), format!("#!{}\n", script.path().display())).unwrap();
        assert_eq!(look(script.path()).unwrap(), Kind::Unknown);
        assert!(look(Path::new("/nowhere/at-all")).is_err());
    }
    #[test]
    fn programs_in_path() {
        assert!(in_path(OsStr::new("sh")).unwrap().is_absolute());
        assert_eq!(in_path(OsStr::new("no-such-program-here")), None);
    }
}
