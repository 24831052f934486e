//! What the configuration says of a program, and `fastsocket off` and `on`: processes that use the kernel because
//! somebody wants it. New connections are refused wherever two processes are to meet; see `shm/operate` for those
//! that there are.

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

    /// What the configuration says of a process, if anything.
    pub fn program(&self, id: ConnId) -> Option<&Program> {
        self.config.programs.get(self.clients.get(id)?.program?)
    }

    /// A program has begun.
    pub fn choose_program(&mut self, id: ConnId, party: &Party) {
        let Some(client) = self.clients.get_mut(id) else { return };
        client.program = programs::find(&self.config.programs, party, &client.name);
    }

    /// A process has said hello. `said`: it was switched off under a monitor before this one.
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

    /// Its library switches its connections, or lets them come back.
    pub fn tell_off(&mut self, id: ConnId, off: bool) {
        self.clients.notify(id, notice::ToKernel { off });
    }
}

pub fn is_of_unit(pid: u32, unit: &str) -> bool {
    let path = read(&Path::new("/proc").join(pid.to_string()).join("cgroup")).and_then(|text| cgroup(&text));
    path.is_some_and(|path| is_in_unit(&path, unit))
}
