//! One sleep on both a futex and a descriptor. The kernel offers this only by io_uring.

use crate::{close, mmap_briefly, munmap, raw, Errno, Result};
use core::sync::atomic::{AtomicU32, Ordering};

const OP_POLL_ADD: u8 = 6;
const OP_FUTEX_WAIT: u8 = 51;
const FUTEX2_SIZE_U32: u32 = 2;
const ENTER_GETEVENTS: u32 = 1 << 0;
const ENTER_EXT_ARG: u32 = 1 << 3;
/// Indices of fields in `io_uring_params`, counted in words of 4 bytes.
const SQ_ENTRIES: usize = 0;
const CQ_ENTRIES: usize = 1;
const FEATURES: usize = 5;
const SQ_TAIL: usize = 11;
const SQ_ARRAY: usize = 16;
const CQ_HEAD: usize = 20;
const CQ_TAIL: usize = 21;
const CQ_CQES: usize = 25;
/// Needed features: both queues are in one mapping, and a wait can have a limit (`EXT_ARG`, Linux
/// 5.11).
const NEEDED: u32 = 1 << 0 | 1 << 8;
const SQES: usize = 0x1000_0000;
const CQE: usize = 16;

/// `io_uring_sqe`
#[repr(C)]
#[derive(Default)]
struct Request {
    op: u8,
    flags: u8,
    priority: u16,
    fd: u32,
    off: u64,
    addr: u64,
    len: u32,
    events: u32,
    data: u64,
    buffer: u64,
    addr3: u64,
    reserved: u64,
}
const _: () = assert!(core::mem::size_of::<Request>() == 64);

/// Makes a descriptor (close-on-exec) for one call of [`wait`] by this thread. The wait ends when
/// `word` is woken or is not `expected`, or when `fd` is readable. The caller closes the
/// descriptor afterwards. ENOSYS: Linux before 6.7.
pub fn ring(word: &AtomicU32, expected: u32, fd: i32) -> Result<i32> {
    let mut p = [0u32; 30];
    // SAFETY: the kernel writes the 120 bytes of its parameters.
    let ring = unsafe { raw(libc::SYS_io_uring_setup, [2, p.as_mut_ptr() as usize, 0, 0, 0, 0]) }? as i32;
    let requests = [
        Request {
            op: OP_FUTEX_WAIT,
            fd: FUTEX2_SIZE_U32,
            off: expected.into(),
            addr: word as *const AtomicU32 as u64,
            addr3: u32::MAX.into(),
            ..Request::default()
        },
        Request { op: OP_POLL_ADD, fd: fd as u32, events: libc::POLLIN as u32, ..Request::default() },
    ];
    let r = if p[FEATURES] & NEEDED == NEEDED { submit(ring, &p, requests) } else { Err(Errno::ENOSYS) };
    if r.is_err() {
        let _ = close(ring);
    }
    r.map(|()| ring)
}

/// Submits both requests. The queues are mapped only here, and not while the thread sleeps.
fn submit(ring: i32, p: &[u32; 30], requests: [Request; 2]) -> Result<()> {
    let at = |i: usize| p[i] as usize;
    let len = (at(SQ_ARRAY) + at(SQ_ENTRIES) * 4).max(at(CQ_CQES) + at(CQ_ENTRIES) * CQE);
    let sqes = at(SQ_ENTRIES) * core::mem::size_of::<Request>();
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
    let queues = mmap_briefly(len, access, flags, ring, 0)?;
    let r = mmap_briefly(sqes, access, flags, ring, SQES).and_then(|array| {
        // SAFETY: the mappings have the size and layout that the kernel has just returned, with
        // room for at least two requests; no other code has the ring.
        let r = unsafe {
            for (i, request) in requests.into_iter().enumerate() {
                array.cast::<Request>().add(i).write(request);
                queues.add(at(SQ_ARRAY)).cast::<u32>().add(i).write(i as u32);
            }
            (*queues.add(at(SQ_TAIL)).cast::<AtomicU32>()).store(2, Ordering::Release);
            raw(libc::SYS_io_uring_enter, [ring as usize, 2, 0, 0, 0, 0]).and_then(|n| {
                let word = |i: usize| (*queues.add(at(i)).cast::<AtomicU32>()).load(Ordering::Acquire);
                let answers = word(CQ_TAIL).wrapping_sub(word(CQ_HEAD)).min(2) as usize;
                // The result comes after `user_data`.
                let result = |i: usize| queues.add(at(CQ_CQES) + i * CQE + 8).cast::<i32>().read();
                let unknown = (0..answers).any(|i| ![0, -libc::EAGAIN, libc::POLLIN as i32].contains(&result(i)));
                if n < 2 || unknown {
                    Err(Errno::ENOSYS)
                } else {
                    Ok(())
                }
            })
        };
        // SAFETY: mapped above; nothing refers to the mapping any more.
        let _ = unsafe { munmap(array, sqes) };
        r
    });
    // SAFETY: mapped above; nothing refers to the mapping any more.
    let _ = unsafe { munmap(queues, len) };
    r
}

/// Sleeps until the futex or the descriptor has an event. Errors: EINTR, ETIMEDOUT; any other
/// error: the kernel cannot sleep in this way.
pub fn wait(ring: i32, timeout_ns: u64) -> Result<()> {
    let ts = crate::calls::timespec(timeout_ns);
    // `io_uring_getevents_arg`: no mask.
    let arg = [0u64, 0, &ts as *const libc::timespec as u64];
    let flags = (ENTER_GETEVENTS | ENTER_EXT_ARG) as usize;
    // SAFETY: the argument and its time limit are read during the call.
    let r = unsafe {
        let args = [ring as usize, 0, 1, flags, arg.as_ptr() as usize, core::mem::size_of_val(&arg)];
        raw(libc::SYS_io_uring_enter, args)
    };
    match r {
        Err(Errno::ETIME) => Err(Errno::ETIMEDOUT),
        r => r.map(drop),
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::time::Duration;

    const LONG: u64 = 60_000_000_000;

    /// None: this kernel cannot do it (Linux before 6.7).
    fn ring_of(word: &AtomicU32, expected: u32, fd: i32) -> Option<i32> {
        match ring(word, expected, fd) {
            Err(Errno::ENOSYS | Errno::EPERM) => {
                std::eprintln!("SKIPPED: no io_uring with futexes");
                None
            }
            r => Some(r.unwrap()),
        }
    }

    #[test]
    fn either_ends_the_sleep() {
        static WORD: AtomicU32 = AtomicU32::new(7);
        let quiet = crate::eventfd().unwrap();
        let loud = crate::eventfd().unwrap();
        crate::eventfd_ring(loud).unwrap();
        let Some(r) = ring_of(&WORD, 7, loud) else { return };
        assert_eq!(wait(r, LONG), Ok(()), "the descriptor is readable");
        close(r).unwrap();

        let r = ring_of(&WORD, 8, quiet).unwrap();
        assert_eq!(wait(r, LONG), Ok(()), "the word is another one");
        close(r).unwrap();

        let r = ring_of(&WORD, 7, quiet).unwrap();
        assert_eq!(wait(r, 1_000_000), Err(Errno::ETIMEDOUT), "neither");
        let wake = std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            crate::futex_wake(&WORD, 1);
        });
        assert_eq!(wait(r, LONG), Ok(()), "woken");
        wake.join().unwrap();
        close(r).unwrap();

        let r = ring_of(&WORD, 7, quiet).unwrap();
        let wake = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            crate::eventfd_ring(quiet).unwrap();
        });
        assert_eq!(wait(r, LONG), Ok(()), "readable while it slept");
        wake.join().unwrap();
        for fd in [r, quiet, loud] {
            close(fd).unwrap();
        }
    }
}
