//! `fastsocket tune`: calls the crate `tune`, and prints its plan and its results.

mod args;
mod show;

pub use args::Tune;

use fsocket_client::EXIT_OWN;
use fsocket_tune::{Device, Error, Machine, Root, Store};

/// Runs the command and returns its exit status.
pub fn run(args: &Tune) -> i32 {
    match tune(args) {
        Ok(complete) => i32::from(!complete),
        Err(e) => {
            eprintln!("fastsocket tune: {e}");
            match e {
                Error::BadName(_) => EXIT_OWN,
                _ => 1,
            }
        }
    }
}

/// Returns whether everything was done.
fn tune(args: &Tune) -> Result<bool, Error> {
    let root = Root::new(&args.root);
    let system = fsocket_tune::system(&root, &args.device)?;
    let dir = args.state_dir.as_deref();
    if !args.apply && !args.revert {
        let device = Device::inspect(&root, &*system.nic, &args.device)?;
        let machine = Machine::inspect(&root);
        let plan = fsocket_tune::plan(&machine, &device, &args.options());
        let store = Store::look(&root, dir, &args.device);
        show::plan(args, &machine, &device, &plan, &store);
        return Ok(true);
    }
    if root.is_live() && !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot(if args.apply { "--apply" } else { "--revert" }));
    }
    if args.apply {
        // Fail early for a device that does not exist, before the command makes a directory in
        // /var/lib.
        Device::inspect(&root, &*system.nic, &args.device)?;
        let store = Store::lock(&root, dir, &args.device)?;
        let outcome = fsocket_tune::apply(&system, &store, &args.options())?;
        show::outcome(args, &outcome, &store);
        return Ok(outcome.is_complete());
    }
    let store = Store::lock(&root, dir, &args.device)?;
    let reverted = fsocket_tune::revert(system, &store, args.force)?;
    show::reverted(args, &reverted, &store);
    Ok(reverted.is_complete())
}
