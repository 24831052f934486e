//! Rows of RPC libraries: SocksDirect, section 5.3.3.

use super::experiment::{Claim, Experiment, Measure};
use crate::apps;
use crate::child::Child;
use crate::scenario::Unit;
use crate::step::{Step, Values, READY_LIMIT};
use anyhow::{Context, Result};
use fsocket_bench_args::{Paper as Args, Role};
use std::process::{Command, Stdio};

/// Calls of 1 KiB.
pub fn calls(_: &Args) -> Vec<Experiment> {
    let claim = Claim::Values { linux: 45_000.0, system: 21_000.0, source: "section 5.3.3, RPClib" };
    let row =
        |name: &str, server: &'static str, client: &'static str| {
            Experiment::new(name, move |step| call(step, server, client))
                .programs(&["python3"])
                .measures([Measure::lower("p50", "", Unit::Nanoseconds).claims(claim)])
        };
    let skip = (!has_grpc()).then(|| "Python's grpc is not installed".to_owned());
    vec![
        row("Python's managers", SERVER, CLIENT),
        row("gRPC, unary", GRPC_SERVER, GRPC_CLIENT).skip(skip).limit("TCP_INQ leaves shared memory"),
    ]
}

fn has_grpc() -> bool {
    let Some(python) = apps::find_program("python3") else { return false };
    let mut command = Command::new(python);
    command.args(["-c", "import grpc"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

const SERVER: &str = "
from multiprocessing.managers import BaseManager
class Echo:
    def echo(self, x): return x
class Calls(BaseManager): pass
Calls.register('Echo', Echo)
server = Calls(('127.0.0.1', 0), b'key').get_server()
print(server.address[1], flush=True)
server.serve_forever()
";

const CLIENT: &str = "
import statistics, sys, time
from multiprocessing.managers import BaseManager
class Calls(BaseManager): pass
Calls.register('Echo')
calls = Calls(('127.0.0.1', int(sys.argv[1])), b'key')
calls.connect()
remote, message, times = calls.Echo(), b'x' * 1024, []
remote.echo(message)
end = time.perf_counter_ns() + float(sys.argv[2]) * 1e9
while time.perf_counter_ns() < end:
    began = time.perf_counter_ns()
    assert remote.echo(message) == message
    times.append(time.perf_counter_ns() - began)
print(statistics.median(times))
";

const GRPC_SERVER: &str = "
from concurrent import futures
import grpc
echo = grpc.unary_unary_rpc_method_handler(lambda message, context: message)
server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler('bench', {'Echo': echo})])
port = server.add_insecure_port('127.0.0.1:0')
server.start()
print(port, flush=True)
server.wait_for_termination()
";

const GRPC_CLIENT: &str = "
import statistics, sys, time, grpc
channel = grpc.insecure_channel('127.0.0.1:' + sys.argv[1])
echo, message, times = channel.unary_unary('/bench/Echo'), b'x' * 1024, []
echo(message)
end = time.perf_counter_ns() + float(sys.argv[2]) * 1e9
while time.perf_counter_ns() < end:
    began = time.perf_counter_ns()
    assert echo(message) == message
    times.append(time.perf_counter_ns() - began)
channel.close()
print(statistics.median(times))
";

/// The median of a call between two scripts.
fn call(step: &Step, server: &str, client: &str) -> Result<Values> {
    let python = apps::find_program("python3").context("python3 is not installed")?;
    let mut command = step.command(Role::Server, &python);
    command.args(["-c", server]);
    let mut server = Child::spawn(command, Some(step.server_cpu()))?;
    let port = server.line(READY_LIMIT)?;
    let mut command = step.command(Role::Client, &python);
    command.args(["-c", client, &port, &step.seconds().to_string()]);
    let output = Child::spawn(command, Some(step.client_cpu()))?.finish(READY_LIMIT * 2)?;
    Ok(Values::from([("p50", output.trim().parse()?)]))
}
