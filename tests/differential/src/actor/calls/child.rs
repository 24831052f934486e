//! A program that has a connection as its standard input and output.

use crate::shared::{state, Slot};
use libc::{c_char, c_int, FILE};
use std::ffi::{CStr, CString};
use std::ptr::null;
use std::sync::atomic::Ordering::Release;

/// How a child gets its descriptors, and which program it runs.
mod how {
    pub const SPAWN: i64 = 1;
    pub const WITHOUT_LIBRARY: i64 = 2;
    pub const FORK_ONLY: i64 = 3;
}

/// A child whose input does not arrive ends after this many seconds.
const PATIENCE: u32 = 3;

extern "C" {
    static stdin: *mut FILE;
    static stdout: *mut FILE;
    static environ: *const *const c_char;
}

/// Runs a child. Returns its exit status, or 1000 plus the signal that ended it.
///
/// # Safety
/// The caller must have exclusive use of the slot.
pub(super) unsafe fn child(s: &Slot, fd: c_int, n: usize, kind: i64) -> i64 {
    let words = [c"fsocket-differential".to_owned(), c"child".to_owned(), CString::new(n.to_string()).expect("digits")];
    let argv = [words[0].as_ptr(), words[1].as_ptr(), words[2].as_ptr(), null()];
    let preload = |p: &*const c_char| {
        // SAFETY: `p` points to a string of the environment.
        kind == how::WITHOUT_LIBRARY && unsafe { CStr::from_ptr(*p) }.to_bytes().starts_with(b"LD_PRELOAD=")
    };
    // SAFETY: the environment ends with a null pointer, and no thread changes it.
    let all = unsafe { (0..).map(|i| *environ.add(i)).take_while(|p| !p.is_null()) };
    let mut env: Vec<*const c_char> = all.filter(|p| !preload(p)).collect();
    env.push(null());
    let path = c"/proc/self/exe".as_ptr();
    let pid = if kind == how::SPAWN {
        // SAFETY: the arrays of strings end with a null pointer, and `path` is a C string.
        unsafe { spawn(fd, path, &argv, &env) }
    } else {
        // SAFETY: the child only makes system calls.
        match unsafe { libc::fork() } {
            // SAFETY: this is the child, and its memory was prepared before the fork.
            0 => unsafe { run(fd, n, kind, path, &argv, &env) },
            pid => pid,
        }
    };
    if pid < 0 {
        return -1;
    }
    s.state.store(state::SETTLING, Release);
    let mut status = 0;
    // SAFETY: the call writes one local status.
    while unsafe { libc::waitpid(pid, &mut status, 0) } != pid {}
    s.state.store(state::BUSY, Release);
    let signal = status & 0x7f;
    i64::from(if signal == 0 { status >> 8 } else { 1000 + signal })
}

unsafe fn spawn(fd: c_int, path: *const c_char, argv: &[*const c_char], env: &[*const c_char]) -> libc::pid_t {
    // SAFETY: the strings and both lists end with null and live during the call; the other memory
    // is local.
    unsafe {
        let mut actions = std::mem::zeroed();
        libc::posix_spawn_file_actions_init(&mut actions);
        libc::posix_spawn_file_actions_adddup2(&mut actions, fd, 0);
        libc::posix_spawn_file_actions_adddup2(&mut actions, fd, 1);
        let mut pid = -1;
        let r = libc::posix_spawn(&mut pid, path, &actions, null(), argv.as_ptr().cast(), env.as_ptr().cast());
        libc::posix_spawn_file_actions_destroy(&mut actions);
        if r == 0 {
            pid
        } else {
            *libc::__errno_location() = r;
            -1
        }
    }
}

/// The part of the child after a fork.
unsafe fn run(fd: c_int, n: usize, kind: i64, path: *const c_char, argv: &[*const c_char], env: &[*const c_char]) -> ! {
    // SAFETY: the strings and both lists end with null; the child has only this thread and a local buffer.
    unsafe {
        if libc::dup2(fd, 0) != 0 || libc::dup2(fd, 1) != 1 {
            libc::_exit(101);
        }
        if kind != how::FORK_ONLY {
            libc::execve(path, argv.as_ptr(), env.as_ptr());
            libc::_exit(102);
        }
        libc::alarm(PATIENCE);
        let mut buffer = [0u8; 4096];
        let got = libc::read(0, buffer.as_mut_ptr().cast(), n.min(buffer.len()));
        let put = libc::write(1, buffer.as_ptr().cast(), got.max(0) as usize);
        libc::_exit(if put == got { (got % 100) as c_int } else { 103 })
    }
}

/// Main function of the program: writes the bytes that it reads, through stdio. Its exit status is
/// their number modulo 100.
pub fn main(n: usize) -> ! {
    let mut buffer = vec![0u8; n];
    // SAFETY: the streams belong to libc, and the buffer has n bytes.
    unsafe {
        libc::alarm(PATIENCE);
        let got = libc::fread(buffer.as_mut_ptr().cast(), 1, n, stdin);
        let put = libc::fwrite(buffer.as_ptr().cast(), 1, got, stdout);
        let written =
            put == got && libc::fprintf(stdout, c"(%d)".as_ptr(), got as c_int) > 0 && libc::fflush(stdout) == 0;
        libc::_exit(if written { (got % 100) as c_int } else { 103 })
    }
}
