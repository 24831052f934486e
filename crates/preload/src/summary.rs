//! `fastsocket run --summary`: prints one line when the program ends. The line goes to the file
//! that was standard error at the start, or nowhere.

use core::fmt::Write;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use fsocket_abi::arena::{Counter, COUNTERS};
use fsocket_runtime::stats;
use fsocket_sys as sys;

const STDERR: i32 = 2;
/// The process that `fastsocket run` has become. Only it always prints. 0: no process prints.
#[link_section = ".data.fsocket_start"]
static OF: AtomicI32 = AtomicI32::new(0);
/// The file that standard error was at the start. Programs may close standard error, and a socket
/// may get its number.
static PLACE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// `pid`: the value in the environment.
pub fn begin(pid: &[u8]) {
    let pid = core::str::from_utf8(pid).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    if let Some(place) = stderr().filter(|_| pid > 0) {
        PLACE.iter().zip(place).for_each(|(to, from)| to.store(from, Ordering::Relaxed));
        OF.store(pid, Ordering::Relaxed);
    }
}

/// Device and inode of standard error. None: it is closed, or a socket.
fn stderr() -> Option<[u64; 2]> {
    let mut st = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call fills the structure, or fails.
    let st = unsafe {
        fsocket_sys::raw(libc::SYS_fstat, [STDERR as usize, st.as_mut_ptr() as usize, 0, 0, 0, 0]).ok()?;
        st.assume_init()
    };
    (st.st_mode & libc::S_IFMT != libc::S_IFSOCK).then_some([st.st_dev, st.st_ino])
}

/// Must a line be printed when the program ends?
#[inline]
pub fn is_wanted() -> bool {
    OF.load(Ordering::Relaxed) != 0
}

/// Prints the line, when the program ends.
pub fn print() {
    // Printed once, even if a signal handler ends the program meanwhile.
    let of = OF.swap(0, Ordering::Relaxed);
    if of == 0 || stderr() != Some(PLACE.each_ref().map(|word| word.load(Ordering::Relaxed))) {
        return;
    }
    let total = |c: Counter| stats::total(c as usize);
    let shm = total(Counter::ConnectShm) + total(Counter::AcceptShm);
    let kernel = total(Counter::ConnectKernel) + total(Counter::AcceptKernel);
    if shm + kernel == 0 && sys::getpid() != of {
        return;
    }
    let mut line = Line { text: [0; 512], len: 0 };
    let name = stats::name();
    let name = name.split(|b| *b == 0).next().and_then(|n| core::str::from_utf8(n).ok()).unwrap_or("?");
    // Text that does not fit is cut off.
    let _ = write!(
        line,
        "fastsocket: {name} ({}): {shm} connections over shared memory, {kernel} over kernel TCP",
        sys::getpid()
    );
    for (counter, name) in COUNTERS.iter().enumerate() {
        if let (Some(reason), n @ 1..) = (name.strip_prefix("fallback."), stats::total(counter)) {
            let _ = write!(line, "; {reason} {n}");
        }
    }
    line.end();
    let _ = sys::write(STDERR, &line.text[..line.len]);
}

/// A line of limited length, built without an allocator.
struct Line {
    text: [u8; 512],
    len: usize,
}

impl Line {
    fn end(&mut self) {
        self.len = self.len.min(self.text.len() - 1);
        self.text[self.len] = b'\n';
        self.len += 1;
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let n = text.len().min(self.text.len() - self.len);
        self.text[self.len..self.len + n].copy_from_slice(&text.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}
