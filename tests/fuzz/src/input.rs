//! Bytes as a stream of decisions. When they are used up, zeroes follow.

pub struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Input<'a> {
        Input { rest: bytes }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let n = self.rest.len().min(N);
        let (now, rest) = self.rest.split_at(n);
        self.rest = rest;
        let mut bytes = [0; N];
        bytes[..n].copy_from_slice(now);
        bytes
    }

    pub fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        self.take()
    }
}
