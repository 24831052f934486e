//! The effect of `fastsocket off` and `on` on connections. The library moves existing connections
//! when it next reads its messages; threads that sleep on such a connection are woken for it.
//! Clients ask the monitor again before their next connection.

use crate::context::Context;
use crate::off::is_of_unit;
use crate::shm::state::Shm;
use crate::ConnId;
use fsocket_abi::sock::Sock;
use fsocket_proto::operate::{Answer, Process, Request, Target};
use rustix::io::Errno;

impl Shm {
    /// [`fsocket_proto::request::Operate`].
    ///
    /// # Errors
    /// ENOENT: there is no such process. EPERM: this user may not operate it.
    pub fn operate(&mut self, ctx: &mut Context, by: ConnId, request: &Request) -> Result<Answer, Errno> {
        let operator = ctx.clients.get(by).ok_or(Errno::BADF)?.uid;
        let is_for_all = operator == 0 || ctx.config.private;
        if matches!(request.target, Target::Unit(_)) && !is_for_all {
            // (Checked before reading /proc for each process.)
            return Err(Errno::PERM);
        }
        let is_meant = |pid: u32| match &request.target {
            Target::Process(wanted) => *wanted == pid,
            Target::Unit(unit) => is_of_unit(pid, unit),
        };
        // The number may be a false claim of a process. If a process of another user claims it,
        // that is no reason to refuse the request.
        let (ids, others): (Vec<_>, Vec<_>) = ctx
            .clients
            .iter()
            .filter(|(_, c)| c.is_process() && is_meant(c.pid))
            .map(|(id, c)| (id, is_for_all || c.uid == operator))
            .partition(|(_, may)| *may);
        if let Target::Unit(unit) = &request.target {
            let was = ctx.off.contains(unit);
            match request.off {
                true if ids.is_empty() && !was => return Err(Errno::NOENT),
                true => _ = ctx.off.insert(unit.clone()),
                false => _ = ctx.off.remove(unit),
            }
            if ids.is_empty() && was {
                return Ok(Answer::default());
            }
        }
        if ids.is_empty() {
            return Err(if others.is_empty() { Errno::NOENT } else { Errno::PERM });
        }
        let processes = ids.into_iter().map(|(id, _)| self.turn(ctx, id, request.off)).collect();
        Ok(Answer { processes })
    }

    fn turn(&mut self, ctx: &mut Context, id: ConnId, off: bool) -> Process {
        let connections = self.connections_of(ctx, id);
        let is_new = ctx.is_off(id) != off;
        let Some(client) = ctx.clients.get_mut(id) else { return Process::default() };
        client.off = Some(off);
        let (pid, uid, nonce, family) = (client.pid, client.uid, client.nonce, client.family);
        if is_new {
            tracing::info!(process = %ctx.clients.name(id), off, "by an operator");
            self.have_ask_again(uid, uid == 0 || ctx.config.private);
        }
        // (Also if it was off already: a connection may have been accepted meanwhile.)
        if is_new || off && connections > 0 {
            ctx.tell_off(id, off);
            self.wake_holder(ctx, id, nonce, family);
        }
        let client = ctx.clients.get(id);
        let comm = client.map(|c| ctx.arenas.of(id).map_or(c.name.clone(), |a| a.mem.comm())).unwrap_or_default();
        Process { pid, comm, connections }
    }

    fn connections_of(&self, ctx: &Context, id: ConnId) -> u32 {
        let Some(nonce) = ctx.clients.get(id).map(|c| c.nonce) else { return 0 };
        let holds = |s: &&Sock| s.is_held_by(nonce);
        ctx.arenas.used_by(id).iter().map(|mem| mem.open_socks().filter(holds).count() as u32).sum()
    }
}
