//! Which processes must use the kernel because an operator wants it: by a program's entry in the
//! configuration, or by `fastsocket off` and `on`. The monitor refuses new connections over shared
//! memory to such a process. `shm/operate` moves the existing ones.

use crate::context::Context;
use crate::pidfd::read;
use crate::policy::cgroups::cgroup;
use crate::policy::programs::{self, Program};
use crate::policy::rules::{is_in_unit, Party};
use crate::ConnId;
use fsocket_proto::notice;
use std::path::Path;

impl Context {
    pub fn is_off(&self, id: ConnId) -> bool {
        let by_file = || self.program(id).is_some_and(|p| p.off);
        self.clients.get(id).is_some_and(|c| c.off.unwrap_or_else(by_file))
    }

    /// The configuration's entry for a process, if there is one.
    pub fn program(&self, id: ConnId) -> Option<&Program> {
        self.config.programs.get(self.clients.get(id)?.program?)
    }

    /// Finds the configuration entry for a program that has started.
    pub fn choose_program(&mut self, id: ConnId, party: &Party) {
        let Some(client) = self.clients.get_mut(id) else { return };
        client.program = programs::find(&self.config.programs, party, &client.name);
    }

    /// Checks, when a process says HELLO, whether it must use the kernel. `said`: the process was
    /// already switched off under the former monitor.
    pub fn look_if_off(&mut self, id: ConnId, said: bool) {
        let Some(client) = self.clients.get(id) else { return };
        let pid = client.pid;
        let of_unit = self.off.iter().any(|unit| is_of_unit(pid, unit));
        if of_unit && !said {
            self.tell_off(id, true);
        }
        if let Some(client) = self.clients.get_mut(id) {
            if said || of_unit {
                client.off = Some(true);
            }
        }
    }

    /// Tells the library of a process to move its connections to the kernel, or to let them
    /// return.
    pub fn tell_off(&mut self, id: ConnId, off: bool) {
        self.clients.notify(id, notice::ToKernel { off });
    }
}

pub fn is_of_unit(pid: u32, unit: &str) -> bool {
    let path = read(&Path::new("/proc").join(pid.to_string()).join("cgroup")).and_then(|text| cgroup(&text));
    path.is_some_and(|path| is_in_unit(&path, unit))
}
