//! Files and settings of a device, in the device's network namespace.

use super::place::Place;
use fsocket_tune::deliver::{self, Step};
use fsocket_tune::ethtool::Ioctl;
use fsocket_tune::Root;

/// Undoes the recorded changes of a device.
pub fn undo(place: &Place, device: &str, steps: &[Step]) {
    let done = in_sys(place, device, |root, nic| {
        deliver::undo_in_card(nic, steps);
        deliver::undo_files(root, root, steps);
        Ok(())
    });
    if let Err(e) = done {
        tracing::warn!(device, "not undone: {e}");
    }
}

/// Runs `work` on a thread where /sys shows the namespace `place`, and /proc/sys shows the
/// machine's first network namespace (the only one with the table for RFS).
pub fn in_sys<T: Send>(
    place: &Place,
    device: &str,
    work: impl FnOnce(&Root, &Ioctl) -> Result<T, String> + Send,
) -> Result<T, String> {
    let failed = |what: &'static str| move |e: std::io::Error| format!("{what}: {e}");
    place.within(|| {
        // The socket in `nic` stays in the namespace in which it is made.
        let nic = Ioctl::new(device).map_err(failed("socket"))?;
        mount_sys().map_err(failed("cannot mount /sys of the network namespace"))?;
        if let Ok(first) = std::fs::File::open("/proc/1/ns/net") {
            use std::os::fd::AsRawFd;
            // SAFETY: the call accesses no memory, and changes only this thread. If it fails,
            // there is no RFS.
            unsafe { libc::setns(first.as_raw_fd(), libc::CLONE_NEWNET) };
        }
        work(&Root::new("/"), &nic)
    })?
}

/// Mounts /sys for the calling thread, which must end afterwards.
fn mount_sys() -> std::io::Result<()> {
    let checked = |r: libc::c_int| if r == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) };
    let (none, sys) = (c"none".as_ptr(), c"sysfs".as_ptr());
    // SAFETY: all pointers are C strings or null. The mount namespace is unshared first, so only
    // this thread sees the mounts.
    unsafe {
        checked(libc::unshare(libc::CLONE_NEWNS))?;
        checked(libc::mount(none, c"/".as_ptr(), std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE, std::ptr::null()))?;
        // The old /sys is unmounted first: the kernel refuses to mount the same one on top.
        libc::umount2(c"/sys".as_ptr(), libc::MNT_DETACH);
        checked(libc::mount(sys, c"/sys".as_ptr(), sys, 0, std::ptr::null()))
    }
}
