//! `sendfile` to a connection over shared memory.

use crate::stream::{self, Midway};
use crate::table::Desc;
use crate::{lengths, user};
use fsocket_sys::{self as sys, Errno, Result};

/// Bytes per step. The stack holds them: a hook takes less than 16 KiB
/// (crates/e2e/tests/e2e/musl/stacks.c).
const STEP: usize = 12 * 1024;

/// # Safety
/// `off` is null or comes from the program.
pub unsafe fn sendfile(out: &'static Desc, input: i32, off: *mut i64, count: usize) -> Result<usize> {
    // Without an offset the file's own position counts, and moves only by the sent bytes. So the
    // file is read at a position in either case.
    // SAFETY: `off` is null or comes from the program; the copy returns EFAULT for a bad one.
    let (own, mut pos) = match unsafe { user::get_if(off) }? {
        Some(o) => {
            if count == 0 {
                // Otherwise a read would give another error.
                readable(input, false)?;
            }
            (false, o)
        }
        // The kernel wants an input with a position (`splice_direct_to_actor`).
        None => (true, seek(input, 0, libc::SEEK_CUR).map_err(without_place)?),
    };
    // (`rw_verify_area`.)
    if pos < 0 || (count as isize) < 0 || pos.checked_add(count as i64).is_none() {
        return readable(input, own).and(Err(Errno::EINVAL));
    }
    let count = count.min(lengths::MOST);
    let (done, err) = stream::throughout(out, |call| pieces(out, input, pos, count, call));
    pos += done as i64;
    // (Some files, as epoll instances, have a position that can be set, but no bytes there.)
    let err = if own { err.map(without_place) } else { err };
    let failed = err.filter(|_| done == 0);
    match own {
        true if failed.is_none() => _ = seek(input, pos, libc::SEEK_SET),
        true => {}
        // SAFETY: `off` is null or comes from the program; the copy returns EFAULT for a bad one.
        // (The kernel writes it even after a failure.)
        false => unsafe { user::put(off, pos) }?,
    }
    failed.map_or(Ok(done), Err)
}

/// Sends up to `count` bytes of `input` from `pos` on. Returns how many, and why not more.
fn pieces(out: &'static Desc, input: i32, pos: i64, count: usize, call: &Midway) -> (usize, Option<Errno>) {
    let mut buf = core::mem::MaybeUninit::<[u8; STEP]>::uninit();
    let p = buf.as_mut_ptr() as *mut u8;
    let (mut done, block) = (0, stream::blocks(out, 0));
    while done < count {
        // SAFETY: the buffer has STEP bytes.
        let n = match unsafe { sys::pread(input, p, (count - done).min(STEP), pos + done as i64) } {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) => return (done, Some(e)),
        };
        // SAFETY: `n` bytes were read.
        match unsafe { stream::send_part(out, p, n, 0, (block, done)) } {
            Ok(k) => {
                call.begun();
                done += k;
                if k < n {
                    break;
                }
            }
            Err(e) => return (done, Some(e)),
        }
    }
    (done, None)
}

/// Can the input be read at a position, or (`own`) at its own one?
fn readable(input: i32, own: bool) -> Result<()> {
    let may = seek(input, 0, libc::SEEK_CUR).and_then(|_| {
        // SAFETY: no byte is read.
        unsafe { sys::pread(input, core::ptr::NonNull::dangling().as_ptr(), 0, 0) }
    });
    may.map(drop).map_err(|e| if own { without_place(e) } else { e })
}

/// The kernel's error for an input without positions, where the caller gives none.
fn without_place(e: Errno) -> Errno {
    if e.raw() == libc::ESPIPE {
        Errno::EINVAL
    } else {
        e
    }
}

fn seek(fd: i32, to: i64, whence: i32) -> Result<i64> {
    // SAFETY: no memory involved.
    unsafe { sys::raw(libc::SYS_lseek, [fd as usize, to as usize, whence as usize, 0, 0, 0]) }.map(|v| v as i64)
}
