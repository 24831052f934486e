//! `sendfile` to a connection of ours.

use crate::stream;
use crate::table::Desc;
use fsocket_sys::{self as sys, Errno, Result};

/// Bytes per step. Stack memory, also in small threads.
const STEP: usize = 16 * 1024;

/// # Safety
/// `off` is null or valid.
pub unsafe fn sendfile(out: &'static Desc, input: i32, off: *mut i64, count: usize) -> Result<usize> {
    let mut buf = core::mem::MaybeUninit::<[u8; STEP]>::uninit();
    let p = buf.as_mut_ptr() as *mut u8;
    // Without an offset the file's own position counts, and moves only by what
    // was sent: so read at a position in either case.
    // SAFETY: the caller's.
    let (own, mut pos) = match unsafe { off.as_ref() } {
        Some(o) => (false, *o),
        // The kernel wants an input in which it can go back (`splice_direct_to_actor`).
        None => {
            (true, seek(input, 0, libc::SEEK_CUR).map_err(|e| if e.raw() == libc::ESPIPE { Errno::EINVAL } else { e })?)
        }
    };
    if pos < 0 {
        return Err(Errno::EINVAL);
    }
    let mut done = 0;
    let mut err = None;
    while done < count {
        // SAFETY: the buffer has STEP bytes.
        let n = match unsafe { sys::pread(input, p, (count - done).min(STEP), pos) } {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) => {
                err = Some(e);
                break;
            }
        };
        // SAFETY: `n` bytes were read.
        match unsafe { stream::send(out, p, n, 0) } {
            Ok(k) => {
                done += k;
                pos += k as i64;
                if k < n {
                    break;
                }
            }
            Err(e) => {
                err = Some(e);
                break;
            }
        }
    }
    if done > 0 || err.is_none() {
        if own {
            let _ = seek(input, pos, libc::SEEK_SET);
        } else {
            // SAFETY: the caller's.
            unsafe { *off = pos };
        }
        return Ok(done);
    }
    Err(err.unwrap_or(Errno::EIO))
}

fn seek(fd: i32, to: i64, whence: i32) -> Result<i64> {
    // SAFETY: no memory involved.
    unsafe { sys::raw(libc::SYS_lseek, [fd as usize, to as usize, whence as usize, 0, 0, 0]) }.map(|v| v as i64)
}
