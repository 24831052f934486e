//! `fastsocket off` and `on`: processes that use the kernel because an operator wants it. New connections are
//! refused wherever two processes are to meet; see `shm/operate` for those that there are.

use crate::clients::Outgoing;
use crate::context::Context;
use crate::pidfd::read;
use crate::policy::process::cgroup;
use crate::policy::rules::is_in_unit;
use crate::ConnId;
use fsocket_proto::{kind, Msg};
use std::path::Path;

impl Context {
    pub fn is_off(&self, id: ConnId) -> bool {
        self.clients.get(id).is_some_and(|c| c.off)
    }

    /// A process has said hello. `said`: it was switched off under a monitor before this one.
    pub fn look_if_off(&mut self, id: ConnId, said: bool) {
        let Some(client) = self.clients.get(id) else { return };
        let (pid, inherits) = (client.pid, client.off);
        let of_unit = self.off.iter().any(|unit| is_of_unit(pid, unit));
        if of_unit && !said {
            self.tell_off(id, true);
        }
        if let Some(client) = self.clients.get_mut(id) {
            client.off = inherits || said || of_unit;
        }
    }

    /// Its library switches its connections, or lets them come back.
    pub fn tell_off(&mut self, id: ConnId, off: bool) {
        let msg = Msg { arg0: off.into(), ..Msg::new(kind::TO_KERNEL) };
        self.clients.send(id, Outgoing { msg, fd: None, unasked: true });
    }
}

pub fn is_of_unit(pid: u32, unit: &str) -> bool {
    let path = read(&Path::new("/proc").join(pid.to_string()).join("cgroup")).and_then(|text| cgroup(&text));
    path.is_some_and(|path| is_in_unit(&path, unit))
}
