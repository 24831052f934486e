//! A file with the requests for steering, so that a restarted monitor steers again. XDP programs
//! are not pinned (ADR 18): between the two monitors, devices are as they were before.

use super::place::Place;
use super::sys::undo;
use super::Steers;
use fsocket_proto::steer::Attach;
use fsocket_tune::deliver::Step;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

#[derive(Serialize, Deserialize)]
struct Kept {
    request: Attach,
    /// The file that names the network namespace (`ip netns`); `None`: the monitor's own.
    netns: Option<PathBuf>,
    /// Changes that do not end with the process, and so must be undone.
    #[serde(default)]
    steps: Vec<Step>,
}

impl Steers {
    /// Undoes what a former monitor has left of its steering. With `again`, steers as that monitor
    /// did. `netns`: SO_NETNS_COOKIE of this process.
    pub fn take_over(&mut self, directory: &Path, netns: u64, again: bool) {
        let file = directory.join("steer.json");
        let kept = std::fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Vec<Kept>>(&text).ok());
        let any = kept.as_ref().is_some_and(|k| !k.is_empty());
        for Kept { request, netns, steps } in kept.into_iter().flatten() {
            let device = request.device.clone();
            let done = place(netns.as_deref()).and_then(|place| {
                if !steps.is_empty() {
                    undo(&place, &device, &steps);
                }
                if again {
                    self.attach(place, request)
                } else {
                    Ok(())
                }
            });
            if let Err(e) = done {
                tracing::warn!(device, "not steered again: {e}");
            }
        }
        self.keep = Some((file, netns));
        if any {
            self.write();
        }
    }

    /// Writes the present steering to the file.
    pub(super) fn write(&self) {
        let Some((file, own)) = &self.keep else { return };
        let mut kept = Vec::new();
        let by_xdp = self.all.iter().map(|s| (s.netns, &s.place, &s.request, s.left.steps.clone()));
        let plain = self.plain.iter().map(|p| (p.netns, &p.place, &p.request, p.steps.clone()));
        for (netns, place, request, steps) in by_xdp.chain(plain) {
            match (netns != *own).then(|| place.file()) {
                Some(None) => tracing::warn!(device = request.device, "a network namespace without a name: not kept"),
                netns => kept.push(Kept { request: request.clone(), netns: netns.flatten(), steps }),
            }
        }
        let new = file.with_extension("new");
        let written = serde_json::to_vec(&kept)
            .map_err(std::io::Error::from)
            .and_then(|text| std::fs::write(&new, text))
            .and_then(|()| std::fs::rename(&new, file));
        if let Err(e) = written {
            tracing::warn!("{}: {e}", file.display());
        }
    }

    /// Removes the file: no monitor will come after this one.
    pub fn leave_nothing(&mut self) {
        if let Some((file, _)) = self.keep.take() {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn socket() -> Result<OwnedFd, String> {
    rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|e| format!("cannot make a socket: {e}"))
}

fn place(netns: Option<&Path>) -> Result<Place, String> {
    match netns {
        None => Place::of(socket()?.as_fd()),
        Some(file) => Place::named(file, socket),
    }
}
