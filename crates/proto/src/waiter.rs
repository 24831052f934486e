//! A waiter of a channel in one word: side and number.

pub const fn pack(side: usize, number: usize) -> u64 {
    (side as u64) << 8 | number as u64
}
/// Side and number; `None`: there is no such waiter.
pub fn unpack(word: u64) -> Option<(usize, usize)> {
    let (side, number) = ((word >> 8) as usize, word as usize & 0xff);
    (side < 2 && number < fsocket_abi::channel::WAITERS).then_some((side, number))
}
