//! `fastsocket-bench worker`: one end of a measurement. It makes plain blocking libc calls, like the programs that
//! it stands for. `LD_PRELOAD` alone decides whether the library or the kernel handles them.

mod args;
pub mod futex;
pub mod link;
mod ops;
mod samples;
mod simple;
mod stage;
mod turns;

pub use args::{Op, Outcome, Role, Transport, Worker, OPEN, READY};

use link::{Listener, Socket};
use std::path::PathBuf;

/// Runs one end, and returns the exit status.
pub fn run(args: &Worker) -> i32 {
    match work(args) {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("fastsocket-bench worker ({:?} {:?} {:?}): {e}", args.role, args.transport, args.op);
            1
        }
    }
}

fn work(args: &Worker) -> std::io::Result<()> {
    if let Some(cpu) = args.cpu {
        crate::child::pin_self(cpu)?;
    }
    raise_descriptor_limit();
    match args.op {
        Op::Pump => return stage::pump(args),
        Op::Filter => return stage::pass(&mut stage::Standard, &mut stage::Standard, args).map(drop),
        Op::Drain => return print_outcome(&stage::drain(args)?),
        _ => {}
    }
    let path = PathBuf::from(&args.addr);
    match (args.role, args.transport) {
        (Role::Server, Transport::Queue) => {
            let mut queue = crate::queue::Queue::open(&path, true)?;
            println!("{READY}{}", args.addr);
            ops::serve(&mut queue, args)
        }
        (Role::Client, Transport::Queue) => {
            let outcome = ops::measure(&mut crate::queue::Queue::open(&path, false)?, args)?;
            print_outcome(&outcome)
        }
        (Role::Server, Transport::Futex) => {
            let mut pair = futex::Pair::open(&path, true)?;
            println!("{READY}{}", args.addr);
            ops::serve(&mut pair, args)
        }
        (Role::Client, Transport::Futex) => {
            let mut pair = futex::Pair::open(&path, false)?;
            gate(args)?;
            print_outcome(&ops::measure(&mut pair, args)?)
        }
        (Role::Server, transport) => {
            let listener = if transport == Transport::Tcp { Listener::tcp()? } else { Listener::unix(&path)? };
            println!("{READY}{}", listener.address);
            match args.op {
                Op::Conn => ops::serve_connections(&listener),
                Op::Idle => ops::serve_idle(&listener, args.max_ops),
                Op::Stage => stage::stage(&listener, args),
                _ => ops::serve(&mut listener.accept()?, args),
            }
        }
        (Role::Client, transport) => {
            let unix = transport == Transport::Unix;
            match args.op {
                Op::Conn => print_outcome(&ops::connections(unix, args)?),
                Op::Idle => ops::idle(unix, args),
                Op::Turns | Op::TurnsRate | Op::BothRate => {
                    print_outcome(&turns::measure(Socket::connect(unix, &args.addr)?, args)?)
                }
                Op::Fcntl | Op::Open => print_outcome(&simple::calls(Socket::connect(unix, &args.addr)?, args)?),
                Op::Redis => print_outcome(&simple::redis(&mut Socket::connect(unix, &args.addr)?, args)?),
                _ => {
                    let mut socket = Socket::connect(unix, &args.addr)?;
                    gate(args)?;
                    print_outcome(&ops::measure(&mut socket, args)?)
                }
            }
        }
    }
}

/// With `--gate`: prints that the connection is open, and waits for a line of input.
fn gate(args: &Worker) -> std::io::Result<()> {
    if args.gate {
        println!("{OPEN}");
        std::io::stdin().read_line(&mut String::new())?;
    }
    Ok(())
}

fn print_outcome(outcome: &Outcome) -> std::io::Result<()> {
    println!("{}", serde_json::to_string(outcome)?);
    Ok(())
}

/// Raises the limit of open files: a thousand connections need more than the usual soft limit of 1024.
fn raise_descriptor_limit() {
    use rustix::process::{getrlimit, setrlimit, Resource};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
