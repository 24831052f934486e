//! Attaching an XDP program to a device by a link, so that it is gone with the
//! process that holds the link, whatever happens to that process.

use crate::{Error, Result};
use libbpf_rs::{libbpf_sys, Program};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// How the device runs a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver, before a packet buffer is made.
    Native,
    /// In the stack, on every device; dearer.
    Generic,
}

impl Mode {
    /// The name that people use.
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

/// An attached program; dropping it detaches.
#[derive(Debug)]
pub(crate) struct XdpLink {
    fd: OwnedFd,
    pub mode: Mode,
}

impl XdpLink {
    /// Attaches to `ifindex` of the calling thread's network namespace.
    pub fn attach(program: &Program<'_>, ifindex: u32, mode: Mode) -> io::Result<XdpLink> {
        let opts = libbpf_sys::bpf_link_create_opts {
            sz: size_of::<libbpf_sys::bpf_link_create_opts>() as u64,
            flags: mode.flags(),
            ..Default::default()
        };
        // SAFETY: a program's descriptor and options of the size they name.
        let fd = unsafe {
            libbpf_sys::bpf_link_create(program.as_fd().as_raw_fd(), ifindex as i32, libbpf_sys::BPF_XDP, &opts)
        };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        // SAFETY: the kernel has just made it for us.
        Ok(XdpLink { fd: unsafe { OwnedFd::from_raw_fd(fd) }, mode })
    }

    /// False once the device is gone: the kernel then cuts the link.
    pub fn is_alive(&self) -> bool {
        let mut info = libbpf_sys::bpf_link_info::default();
        let mut length = size_of_val(&info) as u32;
        // SAFETY: room of the length named, for the time of the call.
        let result = unsafe { libbpf_sys::bpf_link_get_info_by_fd(self.fd.as_raw_fd(), &mut info, &mut length) };
        // SAFETY: of the union, an XDP link fills this member.
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
    // SAFETY: a C string.
    match unsafe { libc::if_nametoindex(c.as_ptr()) } {
        0 => Err(no_device()),
        index => Ok(index),
    }
}
