//! The ways in which shapes are measured.

use super::plan::Shape;
use crate::accel::{clean_environment, Accel};
use crate::ends::Server;
use anyhow::Result;
use fsocket_bench_args::{Path, Role, ShapePath, Shapes};
use fsocket_client::locate::Pieces;
use fsocket_proto::paths::ENV_DISABLE;
use fsocket_proto::report::Counters;
use std::process::Command;
use std::rc::Rc;

/// The way with which all others are compared.
pub const STOCK: &str = "stock";
pub const OURS: &str = "ours";
/// Stock a second time.
pub const CONTROL: &str = "control";
/// The ways whose connections stay in the kernel.
pub const KERNEL: [&str; 3] = ["kernel-server", "kernel-server-no-zones", "kernel-client"];

/// One way to carry the bytes.
pub struct Way {
    pub name: &'static str,
    pub path: Path,
    /// Servers may make zone-local listen sockets.
    pub has_zones: bool,
    pub accel: Option<Rc<Accel>>,
}

/// The ways that the command line selects; stock is the first.
pub fn all(args: &Shapes, dir: &std::path::Path) -> Result<Vec<Way>> {
    let wants = |path| if args.paths.is_empty() { path == ShapePath::Ours } else { args.paths.contains(&path) };
    let stock = |name| Way { name, path: Path::Stock, has_zones: false, accel: None };
    let mut ways = vec![stock(STOCK)];
    if let Some(at) = &args.before {
        let pieces = Pieces { library: Some(at.join("libfsocket.so")), monitor: Some(at.join("fastsocketd")) };
        let own = dir.join("before");
        std::fs::create_dir(&own)?;
        let accel = Some(Rc::new(Accel::start(&pieces, &own)?));
        ways.push(Way { name: "before", path: Path::Ours, has_zones: true, accel });
    }
    if !wants(ShapePath::Ours) && !wants(ShapePath::Kernel) {
        return Ok(ways);
    }
    let accel = Rc::new(Accel::start(&args.pieces, dir)?);
    let with = |name, path, has_zones| Way { name, path, has_zones, accel: Some(accel.clone()) };
    if wants(ShapePath::Ours) {
        ways.push(with(OURS, Path::Ours, true));
    }
    if wants(ShapePath::Kernel) {
        let [server, no_zones, client] = KERNEL;
        ways.push(with(server, Path::KernelServer, true));
        ways.push(with(no_zones, Path::KernelServer, false));
        ways.push(with(client, Path::KernelClient, true));
        ways.push(stock(CONTROL));
    }
    Ok(ways)
}

impl Way {
    /// Does this way differ for the shape? Zones exist only where several processes accept.
    pub fn is_for(&self, shape: &Shape) -> bool {
        self.path != Path::KernelServer || self.has_zones || shape.server == Server::Pool
    }

    /// Sets the environment for an end of this role.
    pub fn environment(&self, role: Role, command: &mut Command) {
        clean_environment(command);
        if let (true, Some(accel)) = (self.path.has_library(role), &self.accel) {
            accel.environment(command);
            if !self.has_zones {
                command.env(ENV_DISABLE, "zones");
            }
        }
    }

    /// Returns the share of accepts from a zone's own socket. An error if the connections since `before` took
    /// another path.
    pub fn check(&self, before: &Counters) -> Result<f64> {
        let Some(accel) = &self.accel else { return Ok(0.0) };
        if !self.path.is_kernel() {
            return accel.check(before).map(|()| 0.0);
        }
        accel.check_kernel(before, self.path)?;
        let after = accel.report()?.totals;
        let grown = |name: &str| {
            let value = |c: &Counters| c.get(name).copied().unwrap_or(0);
            value(&after).saturating_sub(value(before)) as f64
        };
        Ok(grown("accept_local") / grown("accept_kernel").max(1.0))
    }
}
