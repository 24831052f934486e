//! Attaches an XDP program to a device by a link. The program is detached when the process that
//! holds the link ends, in whatever way.

use crate::{Error, Result};
use libbpf_rs::{libbpf_sys, Program};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// How a device runs an XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver, before the kernel makes a packet buffer.
    Native,
    /// In the network stack, which works on every device but is slower.
    Generic,
}

impl Mode {
    /// The usual name of the mode.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Native => "native",
            Mode::Generic => "generic",
        }
    }

    fn flags(self) -> u32 {
        match self {
            Mode::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            Mode::Generic => libbpf_sys::XDP_FLAGS_SKB_MODE,
        }
    }
}

/// An attached program. It is detached when this value is dropped.
#[derive(Debug)]
pub(crate) struct XdpLink {
    fd: OwnedFd,
    pub mode: Mode,
}

impl XdpLink {
    /// Attaches the program to device `ifindex` of the calling thread's network namespace.
    pub fn attach(program: &Program<'_>, ifindex: u32, mode: Mode) -> io::Result<XdpLink> {
        let opts = libbpf_sys::bpf_link_create_opts {
            sz: size_of::<libbpf_sys::bpf_link_create_opts>() as u64,
            flags: mode.flags(),
            ..Default::default()
        };
        // SAFETY: a valid descriptor of a program, and options of the size that they say.
        let fd = unsafe {
            libbpf_sys::bpf_link_create(program.as_fd().as_raw_fd(), ifindex as i32, libbpf_sys::BPF_XDP, &opts)
        };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        // SAFETY: the kernel has just returned this descriptor, and no other value owns it.
        Ok(XdpLink { fd: unsafe { OwnedFd::from_raw_fd(fd) }, mode })
    }

    /// Does the device still exist? (If it is removed, the kernel cuts the link.)
    pub fn is_alive(&self) -> bool {
        let mut info = libbpf_sys::bpf_link_info::default();
        let mut length = size_of_val(&info) as u32;
        // SAFETY: `info` has room for `length` bytes, and both live during the call.
        let result = unsafe { libbpf_sys::bpf_link_get_info_by_fd(self.fd.as_raw_fd(), &mut info, &mut length) };
        // SAFETY: for an XDP link, the kernel has filled this member of the union.
        result == 0 && unsafe { info.__bindgen_anon_1.xdp.ifindex } != 0
    }
}

/// Index of the device `name` in the calling thread's network namespace.
///
/// # Errors
/// [`Error::Device`].
pub(crate) fn ifindex(name: &str) -> Result<u32> {
    let no_device = || Error::Device(name.to_owned());
    let c = CString::new(name).map_err(|_| no_device())?;
    // SAFETY: `c` is a C string.
    match unsafe { libc::if_nametoindex(c.as_ptr()) } {
        0 => Err(no_device()),
        index => Ok(index),
    }
}
