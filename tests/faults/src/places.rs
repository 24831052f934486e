//! Readable names of places in a file: function and line.

use crate::trap::Site;
use std::path::Path;
use std::process::Command;

/// `function (file:line)` of the innermost frames, without those of the system call itself.
pub fn describe(file: &Path, site: &Site) -> String {
    let Some(at) = address(file, site.offset) else { return String::new() };
    let mut command = Command::new("addr2line");
    command.args(["-fsiCe"]).arg(file).arg(format!("{:x}", at - 2));
    let Ok(out) = command.output() else { return String::new() };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    let frames =
        lines.chunks(2).filter(|f| f.len() == 2 && !["arch.rs", "calls.rs"].iter().any(|s| f[1].starts_with(s)));
    let frames: Vec<String> =
        frames.take(3).map(|f| format!("{} ({})", f[0].split("::h").next().unwrap_or(f[0]), f[1])).collect();
    frames.join(" < ")
}

/// The virtual address of a file offset in an ELF-64 file.
fn address(file: &Path, offset: u64) -> Option<u64> {
    let bytes = std::fs::read(file).ok()?;
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let half = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let (table, size, count) = (word(32)? as usize, half(54)? as usize, half(56)? as usize);
    (0..count).map(|i| table + i * size).find_map(|header| {
        let load = u32::from_le_bytes(bytes.get(header..header + 4)?.try_into().ok()?) == 1;
        let (from, at, length) = (word(header + 8)?, word(header + 16)?, word(header + 32)?);
        (load && (from..from + length).contains(&offset)).then(|| offset - from + at)
    })
}
