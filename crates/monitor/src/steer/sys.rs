//! Files and settings of a device in its own network namespace.

use super::place::Place;
use fsocket_tune::deliver::{self, Step};
use fsocket_tune::ethtool::Ioctl;
use fsocket_tune::Root;

/// Undoes what was recorded of a device.
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

/// Runs `work` where /sys is that of `place`, and /proc/sys that of the machine's first network
/// namespace, which alone has the table for RFS.
pub fn in_sys<T: Send>(
    place: &Place,
    device: &str,
    work: impl FnOnce(&Root, &Ioctl) -> Result<T, String> + Send,
) -> Result<T, String> {
    let failed = |what: &'static str| move |e: std::io::Error| format!("{what}: {e}");
    place.within(|| {
        // Its socket stays there.
        let nic = Ioctl::new(device).map_err(failed("socket"))?;
        mount_sys().map_err(failed("cannot mount /sys of the network namespace"))?;
        if let Ok(first) = std::fs::File::open("/proc/1/ns/net") {
            use std::os::fd::AsRawFd;
            // SAFETY: concerns this thread alone. Where it fails there is no RFS.
            unsafe { libc::setns(first.as_raw_fd(), libc::CLONE_NEWNET) };
        }
        work(&Root::new("/"), &nic)
    })?
}

/// For the calling thread, which ends afterwards.
fn mount_sys() -> std::io::Result<()> {
    let checked = |r: libc::c_int| if r == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) };
    let (none, sys) = (c"none".as_ptr(), c"sysfs".as_ptr());
    // SAFETY: C strings throughout; unshared first, so that only this thread sees the mounts.
    unsafe {
        checked(libc::unshare(libc::CLONE_NEWNS))?;
        checked(libc::mount(none, c"/".as_ptr(), std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE, std::ptr::null()))?;
        // Not on top of the same one.
        libc::umount2(c"/sys".as_ptr(), libc::MNT_DETACH);
        checked(libc::mount(sys, c"/sys".as_ptr(), sys, 0, std::ptr::null()))
    }
}
