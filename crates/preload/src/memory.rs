//! The C functions that the compiler itself calls: to copy, compare and measure memory.
//!
//! A program or another preloaded library may define its own `memcpy`, for example one that
//! watches, counts or allocates. Such a function must not run inside the library, which is called
//! in signal handlers and between `fork` and `exec`. So this module defines these names for the
//! library alone. They are short. Larger copies, of what a program sends and receives, use libc's
//! own `memcpy` ([`libcs_memcpy`]).

use crate::home;
use core::ffi::c_void;

// System V calling convention: arguments in rdi, rsi, rdx, result in rax. A call may change all
// other registers used here. The direction flag is clear on entry and must be clear on return.
core::arch::global_asm!(
    ".pushsection .text.fsocket_memory, \"ax\", @progbits",
    ".hidden memcpy, memmove, memset, memcmp, bcmp, strlen",
    ".globl memcpy, memmove, memset, memcmp, bcmp, strlen",
    ".p2align 4",
    "memmove:",
    "  mov rcx, rdi",
    "  sub rcx, rsi",
    "  cmp rcx, rdx",
    "  jb 20f",
    // Copies forwards. This is also right if `dst` overlaps `src` from below, because each turn
    // loads before it stores.
    "memcpy:",
    "  mov rax, rdi",
    "  cmp rdx, 16",
    "  jb 12f",
    "  movups xmm2, [rsi + rdx - 16]",
    "  cmp rdx, 2048",
    "  jae 14f",
    "  lea rcx, [rdi + rdx - 16]",
    "11:",
    "  cmp rdi, rcx",
    "  jae 13f",
    "  movups xmm0, [rsi]",
    "  movups [rdi], xmm0",
    "  add rsi, 16",
    "  add rdi, 16",
    "  jmp 11b",
    "13:",
    "  movups [rcx], xmm2",
    "  ret",
    "14:",
    "  mov rcx, rdx",
    "  rep movsb",
    "  ret",
    "12:",
    "  cmp edx, 8",
    "  jb 15f",
    "  mov r8, [rsi]",
    "  mov r9, [rsi + rdx - 8]",
    "  mov [rdi], r8",
    "  mov [rdi + rdx - 8], r9",
    "  ret",
    "15:",
    "  cmp edx, 4",
    "  jb 16f",
    "  mov r8d, [rsi]",
    "  mov r9d, [rsi + rdx - 4]",
    "  mov [rdi], r8d",
    "  mov [rdi + rdx - 4], r9d",
    "  ret",
    "16:",
    "  test edx, edx",
    "  je 17f",
    "  movzx r8d, byte ptr [rsi]",
    "  movzx r9d, byte ptr [rsi + rdx - 1]",
    "  shr edx, 1",
    "  movzx ecx, byte ptr [rsi + rdx]",
    "  mov [rdi + rdx], cl",
    "  mov [rdi], r8b",
    "  adc edx, edx",
    "  mov [rdi + rdx - 1], r9b",
    "17:",
    "  ret",
    // Copies backwards, first words, then bytes.
    "20:",
    "  mov rax, rdi",
    "21:",
    "  cmp rdx, 8",
    "  jb 22f",
    "  mov r8, [rsi + rdx - 8]",
    "  mov [rdi + rdx - 8], r8",
    "  sub rdx, 8",
    "  jmp 21b",
    "22:",
    "  test rdx, rdx",
    "  je 23f",
    "  mov r8b, [rsi + rdx - 1]",
    "  mov [rdi + rdx - 1], r8b",
    "  dec rdx",
    "  jmp 22b",
    "23:",
    "  ret",
    ".p2align 4",
    "memset:",
    "  movzx ecx, sil",
    "  mov rax, 0x0101010101010101",
    "  imul rcx, rax",
    "  mov rax, rdi",
    "  cmp rdx, 16",
    "  jb 53f",
    "  movq xmm0, rcx",
    "  punpcklqdq xmm0, xmm0",
    "  movups [rdi + rdx - 16], xmm0",
    "  cmp rdx, 1024",
    "  jae 52f",
    "  lea r8, [rdi + rdx - 16]",
    "51:",
    "  cmp rdi, r8",
    "  jae 54f",
    "  movups [rdi], xmm0",
    "  add rdi, 16",
    "  jmp 51b",
    "52:",
    "  mov r8, rax",
    "  mov eax, ecx",
    "  mov rcx, rdx",
    "  rep stosb",
    "  mov rax, r8",
    "  ret",
    "53:",
    "  test rdx, rdx",
    "  je 54f",
    "  mov [rdi + rdx - 1], cl",
    "  dec rdx",
    "  jmp 53b",
    "54:",
    "  ret",
    ".p2align 4",
    "bcmp:",
    "memcmp:",
    "  xor ecx, ecx",
    "31:",
    "  lea r8, [rcx + 8]",
    "  cmp r8, rdx",
    "  ja 32f",
    "  mov r9, [rdi + rcx]",
    "  cmp r9, [rsi + rcx]",
    "  jne 32f",
    "  mov rcx, r8",
    "  jmp 31b",
    "32:",
    "  cmp rcx, rdx",
    "  jae 33f",
    "  movzx eax, byte ptr [rdi + rcx]",
    "  movzx r8d, byte ptr [rsi + rcx]",
    "  inc rcx",
    "  sub eax, r8d",
    "  je 32b",
    "  ret",
    "33:",
    "  xor eax, eax",
    "  ret",
    ".p2align 4",
    "strlen:",
    "  mov rax, -1",
    "41:",
    "  inc rax",
    "  cmp byte ptr [rdi + rax], 0",
    "  jne 41b",
    "  ret",
    ".popsection",
);

/// libc's own `memcpy`, which is the fastest for this processor. None: it was not found.
pub fn libcs_memcpy() -> Option<fsocket_uaccess::Memcpy> {
    let at = crate::real::address(c"memcpy");
    let is_libcs = home::of(at).is_some_and(|h| h.name.to_bytes().ends_with(b"/libc.so.6"));
    // SAFETY: libc's function of that name has this type.
    is_libcs.then(|| unsafe { core::mem::transmute::<*const c_void, fsocket_uaccess::Memcpy>(at) })
}

#[cfg(test)]
mod tests {
    use core::ffi::{c_int, c_void};
    use core::hint::black_box;

    extern "C" {
        fn memcpy(to: *mut c_void, from: *const c_void, n: usize) -> *mut c_void;
        fn memmove(to: *mut c_void, from: *const c_void, n: usize) -> *mut c_void;
        fn memset(to: *mut c_void, c: c_int, n: usize) -> *mut c_void;
        fn memcmp(a: *const c_void, b: *const c_void, n: usize) -> c_int;
        fn strlen(text: *const c_void) -> usize;
    }

    const ROOM: usize = 5000;
    /// Lengths around each change of the method.
    fn lengths() -> impl Iterator<Item = usize> {
        (0..80).chain([127, 128, 129, 2030, 2047, 2048, 2049, 3000])
    }
    fn noise() -> Vec<u8> {
        (0..ROOM).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn moves_as_byte_for_byte() {
        for n in lengths() {
            for (from, to) in
                [(1000, 3), (1000, 1003 + n), (1000, 999), (1000, 1001), (1000, 1015), (1000, 985), (9, 9)]
            {
                let mut ours = noise();
                let mut expected = noise();
                if to + n > ROOM {
                    continue;
                }
                let moved: Vec<u8> = (0..n).map(|i| expected[from + i]).collect();
                (0..n).for_each(|i| expected[to + i] = moved[i]);
                let base = black_box(ours.as_mut_ptr());
                // SAFETY: both ranges are inside the vector.
                let r = unsafe { memmove(base.add(to).cast(), base.add(from).cast(), black_box(n)) };
                assert!(r == base.wrapping_add(to).cast() && ours == expected, "memmove of {n} from {from} to {to}");
                if from.abs_diff(to) >= n {
                    let mut ours = noise();
                    let base = black_box(ours.as_mut_ptr());
                    // SAFETY: both ranges of `n` bytes are inside the vector and do not overlap.
                    let r = unsafe { memcpy(base.add(to).cast(), base.add(from).cast(), black_box(n)) };
                    assert!(r == base.wrapping_add(to).cast() && ours == expected, "memcpy of {n} from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn fills_compares_and_counts() {
        for n in lengths() {
            let mut a = noise();
            let base = black_box(a.as_mut_ptr());
            // SAFETY: the range is inside the vector.
            unsafe { memset(base.add(5).cast(), 0x1ab, n) };
            assert!(a[5..5 + n].iter().all(|b| *b == 0xab) && a[..5] == noise()[..5] && a[5 + n..] == noise()[5 + n..]);
            let b = a.clone();
            // SAFETY: the ranges are inside the vectors.
            let compare = |a: &[u8], b: &[u8]| unsafe { memcmp(a.as_ptr().cast(), b.as_ptr().cast(), black_box(n)) };
            assert_eq!(compare(&a, &b), 0);
            for at in [0, n / 2, n.saturating_sub(1)].into_iter().filter(|at| *at < n) {
                let mut c = b.clone();
                c[at] = c[at].wrapping_add(1);
                assert_eq!(compare(&a, &c).signum(), i32::from(a[at]).cmp(&i32::from(c[at])) as i32, "{n} {at}");
            }
            a[..n].fill(1);
            a[n] = 0;
            // SAFETY: the string is NUL-terminated.
            assert_eq!(unsafe { strlen(black_box(a.as_ptr()).cast()) }, n);
        }
    }
}
