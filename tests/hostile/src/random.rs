//! Random numbers, the same for the same seed.

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    #[allow(clippy::should_implement_trait)] // it never ends
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `n`, which must not be 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }

    pub fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// A value at which arithmetic may go wrong, or any value.
    pub fn word(&mut self) -> u64 {
        let near = *self.one(&[0, 1 << 8, 1 << 10, 1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 63, u64::MAX]);
        match self.below(4) {
            0 => self.next(),
            1 => near,
            2 => near.wrapping_add(self.below(9) as u64).wrapping_sub(4),
            _ => self.below(1100) as u64,
        }
    }
}
