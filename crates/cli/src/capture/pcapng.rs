//! The format pcapng (draft-ietf-opsawg-pcapng): a section, one interface, a block for each packet.

use super::socket::{Packet, LONGEST};
use std::io::{Result, Write};

const SECTION: u32 = 0x0a0d_0d0a;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;
/// LINKTYPE_ETHERNET: packets of the loopback device have Ethernet headers, filled with zeros.
const ETHERNET: u16 = 1;
/// Options of an interface block: its name, and the resolution of its timestamps (here
/// nanoseconds).
const NAME: u16 = 2;
const RESOLUTION: u16 = 9;

/// Writes packets.
pub struct Writer<W>(W);

impl<W: Write> Writer<W> {
    /// Writes the head of the file: the section and the interface.
    ///
    /// # Errors
    /// Any error of the writer, as for the other methods.
    pub fn new(to: W) -> Result<Writer<W>> {
        let mut writer = Writer(to);
        let version: [u8; 4] = [1, 0, 0, 0];
        writer.block(SECTION, &[&BYTE_ORDER.to_le_bytes(), &version, &(-1i64).to_le_bytes()])?;
        let kind = [ETHERNET.to_le_bytes(), [0, 0]].concat();
        let snap = (LONGEST as u32).to_le_bytes();
        let options = [option(NAME, b"lo"), option(RESOLUTION, &[9]), option(0, &[])].concat();
        writer.block(INTERFACE, &[&kind, &snap, &options])?;
        Ok(writer)
    }

    pub fn packet(&mut self, p: &Packet) -> Result<()> {
        let ns = p.at.as_nanos() as u64;
        let words = [0, (ns >> 32) as u32, ns as u32, p.bytes.len() as u32, p.length as u32];
        let head = words.map(u32::to_le_bytes).concat();
        self.block(PACKET, &[&head, p.bytes])
    }

    /// Flushes everything and returns the writer.
    pub fn end(mut self) -> Result<W> {
        self.0.flush()?;
        Ok(self.0)
    }

    fn block(&mut self, kind: u32, parts: &[&[u8]]) -> Result<()> {
        let length: usize = parts.iter().map(|p| p.len()).sum();
        let padding = length.next_multiple_of(4) - length;
        let total = ((length + padding + 12) as u32).to_le_bytes();
        self.0.write_all(&kind.to_le_bytes())?;
        self.0.write_all(&total)?;
        parts.iter().try_for_each(|p| self.0.write_all(p))?;
        self.0.write_all(&[0; 3][..padding])?;
        self.0.write_all(&total)
    }
}

fn option(code: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = [code.to_le_bytes(), (value.len() as u16).to_le_bytes()].concat();
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn blocks_are_as_the_draft_has_them() {
        let mut w = Writer::new(Vec::new()).unwrap();
        w.packet(&Packet { bytes: b"abcde", length: 7, at: Duration::new(1, 2) }).unwrap();
        let bytes = w.end().unwrap();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let (mut at, mut kinds) = (0, Vec::new());
        while at < bytes.len() {
            let length = word(at + 4);
            assert_eq!(word(at + length as usize - 4), length, "the length at both ends");
            kinds.push((word(at), at));
            at += length as usize;
        }
        assert_eq!(at, bytes.len());
        assert_eq!(kinds.iter().map(|k| k.0).collect::<Vec<_>>(), [SECTION, INTERFACE, PACKET]);
        let packet = kinds[2].1;
        assert_eq!((word(packet + 12), word(packet + 16)), (0, 1_000_000_002));
        assert_eq!((word(packet + 20), word(packet + 24)), (5, 7));
        assert_eq!(&bytes[packet + 28..packet + 36], b"abcde\0\0\0");
    }
}
