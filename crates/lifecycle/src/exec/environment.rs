//! Builds the environment of the next program from the one that the caller has passed. If the next
//! program is to have the library, the variables for the library, the monitor and the successor
//! are added.

use super::hidden::{self, words};
use crate::ctl;
use crate::lock::Lock;
use core::cell::UnsafeCell;
use core::ffi::{c_char, CStr};
use core::fmt::Write;
use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_sys as sys;

/// Through this variable the next program finds what it inherits.
pub const SUCCESSOR: &[u8] = b"FASTSOCKET_SUCCESSOR=";
const PRELOAD: &[u8] = b"LD_PRELOAD=";
pub const SOCKET: &[u8] = b"FASTSOCKET_SOCKET=";
pub const DISABLE: &[u8] = b"FASTSOCKET_DISABLE=";
pub const PIN: &[u8] = b"FASTSOCKET_PIN=";
pub const UPGRADE: &[u8] = b"FASTSOCKET_UPGRADE=";
pub const PATIENCE: &[u8] = b"FASTSOCKET_PATIENCE=";

/// The most bytes of one variable that is kept.
const LEN: usize = 1024;
/// Variables that the same binary gets again if its environment was cleared.
const KEPT: [&[u8]; 6] = [PRELOAD, SOCKET, DISABLE, PIN, UPGRADE, PATIENCE];
/// The most entries on the stack. A longer environment gets memory of its own.
const ENTRIES: usize = 256;

/// Addresses of the [`KEPT`] entries with which the program was started; null: not set.
#[link_section = ".data.fsocket_start"]
static AT_START: [AtomicPtr<c_char>; KEPT.len()] = [const { AtomicPtr::new(core::ptr::null_mut()) }; KEPT.len()];

/// Bytes for copies of those entries, made at the start: the program may write its title over the
/// originals before the library starts. Entries for which there is no room stay in place, and may
/// be lost.
const POOL: usize = 512;
struct Pool(UnsafeCell<[u8; POOL]>);
// SAFETY: only `note` writes the bytes, once, before any other thread runs. Later they are only
// read.
unsafe impl Sync for Pool {}
#[link_section = ".data.fsocket_start"]
static COPIES: Pool = Pool(UnsafeCell::new([0; POOL]));

/// How the loader found this library.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loaded {
    /// By a word of `LD_PRELOAD`, at this offset and with this length.
    By(usize, usize),
    /// By the file that applies to every program (`/etc/ld.so.preload`).
    ForAll,
    /// Unknown, so the next program may lack the library.
    Unknown,
}

/// The library's variables at the start of the program, which may later clear or overwrite them.
struct Start {
    loaded: Loaded,
    /// `NAME=value` with a NUL; empty: not set.
    kept: [[u8; LEN]; KEPT.len()],
}
static START: Lock<Start> = Lock::new(Start { loaded: Loaded::Unknown, kept: [[0; LEN]; KEPT.len()] });

type Env = *const *const c_char;

fn entries(env: Env) -> impl Iterator<Item = *const c_char> {
    let mut at = env;
    core::iter::from_fn(move || {
        if at.is_null() {
            return None;
        }
        // SAFETY: an environment is an array of strings that ends with null, and this entry is not
        // behind its end.
        let entry = unsafe { *at };
        if entry.is_null() {
            return None;
        }
        at = at.wrapping_add(1);
        Some(entry)
    })
}

fn bytes<'a>(entry: *const c_char) -> &'a [u8] {
    // SAFETY: the entry is a C string of the program, which does not change it during the call.
    unsafe { CStr::from_ptr(entry) }.to_bytes()
}

/// The value of a variable. `name` ends with '='.
pub fn value<'a>(env: Env, name: &[u8]) -> Option<&'a [u8]> {
    entries(env).find_map(|e| bytes(e).strip_prefix(name))
}

/// Variables for this program only, not for its children.
#[derive(Default)]
pub struct Once<'a> {
    pub successor: Option<&'a [u8]>,
    /// Value of FASTSOCKET_SUMMARY.
    pub summary: Option<&'a [u8]>,
}

/// Called at the start: records where the variables are. They are read only when the library
/// starts ([`at_start`]), because most programs open no socket.
#[link_section = ".text.fsocket_start"]
pub fn note(env: Env) -> Once<'static> {
    let mut once = Once::default();
    let mut used = 0;
    // SAFETY: the entry is a string, so at least its first byte is readable.
    for entry in entries(env).filter(|e| matches!(unsafe { **e } as u8, b'F' | b'L')) {
        let text = bytes(entry);
        if let Some(i) = KEPT.iter().position(|name| text.starts_with(name)) {
            if AT_START[i].load(Ordering::Relaxed).is_null() {
                AT_START[i].store(copied(text, &mut used).unwrap_or(entry.cast_mut()), Ordering::Relaxed);
            }
        } else if let Some(value) = text.strip_prefix(SUCCESSOR) {
            once.successor = Some(value);
        } else if let Some(value) = text.strip_prefix(b"FASTSOCKET_SUMMARY=") {
            once.summary = Some(value);
        }
    }
    once
}

/// Copies a string behind the `used` bytes of [`COPIES`]. None: there is no room.
fn copied(text: &[u8], used: &mut usize) -> Option<*mut c_char> {
    let end = used.checked_add(text.len() + 1).filter(|end| *end <= POOL)?;
    // SAFETY: the range is inside the pool, and no other code uses it yet. A zero byte follows,
    // because the pool begins as zeros.
    let to = unsafe { COPIES.0.get().cast::<u8>().add(*used) };
    // SAFETY: `text` is a string of the environment, outside of the pool. The pool has room for
    // it, as checked above.
    unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), to, text.len()) };
    *used = end;
    Some(to.cast())
}

/// Entry `i` of [`KEPT`] as it was at the start. A program that overwrites its environment with a
/// title copies the entries first, so `now` has them. It writes upwards, so the name of an entry
/// is overwritten first.
fn entry_at_start(i: usize, now: Env) -> Option<&'static [u8]> {
    let at = AT_START[i].load(Ordering::Relaxed);
    if at.is_null() {
        return None;
    }
    // Only the name is compared, because an overwritten entry may have no terminating NUL.
    let intact = KEPT[i].iter().enumerate().all(|(n, b)| {
        // SAFETY: the kernel has put a string there that begins with this name, so these bytes are
        // mapped.
        unsafe { *at.add(n) as u8 == *b }
    });
    match intact {
        true => Some(bytes(at)),
        false => entries(now).map(bytes).find(|e| e.starts_with(KEPT[i])),
    }
}

/// The value of a kept variable, as it was at the start.
pub fn at_start(name: &[u8], now: Env) -> Option<&'static [u8]> {
    let i = KEPT.iter().position(|kept| *kept == name)?;
    entry_at_start(i, now)?.strip_prefix(name)
}

/// Called when the library starts: copies its variables from the environment. `library`: the path
/// by which the loader knows this library.
pub fn remember(now: Env, library: &[u8]) {
    let Ok(mut s) = START.lock() else { return };
    let name = |path: &[u8]| path.rsplit(|c| *c == b'/').next().map_or(0, |n| path.len() - n.len());
    for i in 0..KEPT.len() {
        let Some(entry) = entry_at_start(i, now).filter(|e| e.len() < LEN) else {
            continue;
        };
        s.kept[i][..entry.len()].copy_from_slice(entry);
        if i == 0 {
            let list = &entry[PRELOAD.len()..];
            let same = |w: &&[u8]| *w == library || w[name(w)..] == library[name(library)..];
            if let Some(w) = words(list).find(same) {
                s.loaded = Loaded::By(w.as_ptr() as usize - entry.as_ptr() as usize, w.len());
            }
        }
    }
    if s.loaded == Loaded::Unknown && is_for_all(&library[name(library)..]) {
        s.loaded = Loaded::ForAll;
    }
}

/// Does the loader's file for all programs name the library?
fn is_for_all(name: &[u8]) -> bool {
    let args = [libc::AT_FDCWD as usize, c"/etc/ld.so.preload".as_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: the path is a NUL-terminated string.
    let Ok(fd) = (unsafe { sys::raw(libc::SYS_openat, args) }) else { return false };
    let mut text = [0u8; 4096];
    // SAFETY: `text` has room for that many bytes.
    let n = unsafe { sys::pread(fd as i32, text.as_mut_ptr(), text.len(), 0) };
    let _ = sys::close(fd as i32);
    let text = &text[..n.unwrap_or(0).min(text.len())];
    let lines = text.split(|c| *c == b'\n').filter_map(|line| line.split(|c| *c == b'#').next());
    let mut words = lines.flat_map(|line| line.split(|c| matches!(c, b':' | b' ' | b'\t')));
    words.any(|w| w.rsplit(|c| *c == b'/').next() == Some(name))
}

/// Will a dynamically linked program with this environment have the library, the same monitor, and
/// shared memory?
pub fn carries_us(env: Env) -> bool {
    carries(env, b"shm")
}

/// Like [`carries_us`], but for zones instead of shared memory.
pub fn carries_zones(env: Env) -> bool {
    carries(env, b"zones")
}

fn carries(env: Env, what: &[u8]) -> bool {
    let Ok(s) = START.lock() else { return false };
    let loaded = match s.loaded {
        Loaded::By(at, len) => value(env, PRELOAD).is_some_and(|v| words(v).any(|w| *w == s.kept[0][at..at + len])),
        Loaded::ForAll => true,
        Loaded::Unknown => false,
    };
    let off = value(env, DISABLE).is_some_and(|v| v.split(|c| *c == b',').any(|w| w == what));
    loaded && !off && ctl::same_path(value(env, SOCKET))
}

/// Has the environment lost the library? False if the program has set another `LD_PRELOAD`, which
/// must stay.
pub fn lost_us(env: Env) -> bool {
    START.lock().is_ok_and(|s| matches!(s.loaded, Loaded::By(..))) && value(env, PRELOAD).is_none()
}

/// Can the library's file no longer be opened under the path with which this program was started
/// ([`hidden`])?
#[link_section = ".text.fsocket_start"]
pub fn hides_us() -> bool {
    extern "C" {
        static environ: Env;
    }
    // SAFETY: `environ` is a variable of libc; only its value is copied.
    let now = unsafe { environ };
    entry_at_start(0, now).is_some_and(|e| hidden::hides(&e[PRELOAD.len()..]))
}

/// How the environment of the next program differs from the one that the caller passed.
#[derive(Clone, Copy, Default)]
pub struct Changes {
    /// The successor's control socket and nonce.
    pub successor: Option<(i32, u64)>,
    /// Add the variables of [`KEPT`].
    pub inject: bool,
    /// Leave this library out of `LD_PRELOAD`; see [`hidden`].
    pub hidden: bool,
}

/// Calls `f` with a copy of `env` that has the changes.
pub fn extended<R>(env: Env, changes: Changes, f: impl FnOnce(Env) -> R) -> R {
    let Changes { successor, inject, hidden } = changes;
    if successor.is_none() && !inject && !hidden {
        return f(env);
    }
    let mut variable = Text { buf: [0; 64], len: 0 };
    if let Some((fd, nonce)) = successor {
        let _ = variable.write_str(core::str::from_utf8(SUCCESSOR).unwrap_or_default());
        let _ = write!(variable, "{fd}:{nonce:x}");
    }
    let variable = successor.is_some().then_some(&variable);
    let needed = entries(env).count() + KEPT.len() + 2;
    let text = if hidden { value(env, PRELOAD).map_or(0, |v| PRELOAD.len() + v.len() + 1) } else { 0 };
    if needed <= ENTRIES && text <= LEN {
        let mut stack = ([core::ptr::null::<c_char>(); ENTRIES], [0; LEN]);
        fill(&mut stack.0, &mut stack.1[..text], env, variable, inject);
        return f(stack.0.as_ptr());
    }
    let pointers = needed * core::mem::size_of::<*const c_char>();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let Ok(memory) = sys::mmap_briefly(pointers + text, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) else {
        return f(env);
    };
    // SAFETY: the memory is zeroed and page-aligned. It has room for that many pointers, followed
    // by the text.
    let (list, text_at) = unsafe {
        let list = core::slice::from_raw_parts_mut(memory as *mut *const c_char, needed);
        (list, core::slice::from_raw_parts_mut(memory.add(pointers), text))
    };
    fill(list, text_at, env, variable, inject);
    let r = f(memory as Env);
    // SAFETY: the memory was mapped above with this length, and nothing refers to it any more.
    let _ = unsafe { sys::munmap(memory, pointers + text) };
    r
}

/// Fills `list`, which is long enough and remains null-terminated. `text`, if not empty, has room
/// for `LD_PRELOAD`.
fn fill(list: &mut [*const c_char], text: &mut [u8], env: Env, successor: Option<&Text>, inject: bool) {
    let mut n = 0;
    let mut add = |entry: *const c_char| {
        list[n] = entry;
        n += 1;
    };
    let is_replaced = |e: &[u8]| e.starts_with(SUCCESSOR) || !text.is_empty() && e.starts_with(PRELOAD);
    for e in entries(env).filter(|e| !is_replaced(bytes(*e))) {
        add(e);
    }
    if let (false, Some(list)) = (text.is_empty(), value(env, PRELOAD)) {
        text[..PRELOAD.len()].copy_from_slice(PRELOAD);
        if hidden::rest(list, &mut text[PRELOAD.len()..]) > 0 {
            add(text.as_ptr() as *const c_char);
        }
    }
    if inject {
        if let Ok(s) = START.lock() {
            for (text, name) in s.kept.iter().zip(KEPT) {
                if text[0] != 0 && value(env, name).is_none() {
                    add(text.as_ptr() as *const c_char);
                }
            }
        }
    }
    if let Some(t) = successor {
        add(t.buf.as_ptr() as *const c_char);
    }
}

/// A short NUL-terminated string.
struct Text {
    buf: [u8; 64],
    len: usize,
}
impl Write for Text {
    fn write_str(&mut self, s: &str) -> core::fmt::Result {
        let end = self.len + s.len();
        if end >= self.buf.len() {
            return Err(core::fmt::Error);
        }
        self.buf[self.len..end].copy_from_slice(s.as_bytes());
        self.len = end;
        Ok(())
    }
}
