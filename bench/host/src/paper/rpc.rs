//! Rows of RPC libraries: SocksDirect, section 5.3.3.

use super::experiment::{Claim, Experiment, Measure};
use crate::apps;
use crate::child::Child;
use crate::scenario::Unit;
use crate::step::{Step, Values, READY_LIMIT};
use anyhow::{Context, Result};
use fsocket_bench_args::{Paper as Args, Role};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A build that takes longer has failed.
const BUILD_LIMIT: Duration = Duration::from_secs(300);

/// Calls of 1 KiB.
pub fn calls(_: &Args) -> Vec<Experiment> {
    let claim = Claim::Values { linux: 45_000.0, system: 21_000.0, source: "section 5.3.3, RPClib" };
    let row = |name: &str, run: fn(&Step) -> Result<Values>| {
        Experiment::new(name, run).measures([Measure::lower("p50", "", Unit::Nanoseconds).claims(claim)])
    };
    let missing = |of: &str| Some(format!("gRPC for {of} is not installed"));
    vec![
        row("Python's managers", |step| python(step, apps::find_program("python3"), SERVER, CLIENT))
            .programs(&["python3"]),
        row("gRPC of Python, unary", |step| python(step, python_with_grpc(), GRPC_SERVER, GRPC_CLIENT))
            .skip(missing("Python").filter(|_| python_with_grpc().is_none())),
        row("gRPC of C++, unary", cpp)
            .programs(&["g++", "protoc", "grpc_cpp_plugin"])
            .skip(missing("C++").filter(|_| !Path::new("/usr/include/grpcpp/grpcpp.h").exists())),
    ]
}

/// The first Python that has gRPC. The Python in PATH may not be the distribution's.
fn python_with_grpc() -> Option<PathBuf> {
    let has_it = |python: &PathBuf| {
        let mut command = Command::new(python);
        command.args(["-c", "import grpc"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    apps::find_program("python3").into_iter().chain([PathBuf::from("/usr/bin/python3")]).find(has_it)
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

fn python(step: &Step, python: Option<PathBuf>, server: &str, client: &str) -> Result<Values> {
    call(step, &python.context("no python3")?, &["-c", server], &["-c", client])
}

fn cpp(step: &Step) -> Result<Values> {
    call(step, &built(&step.context.dir)?, &["serve"], &["ask"])
}

/// Path of the C++ program. The first step builds it.
fn built(dir: &Path) -> Result<PathBuf> {
    let place = dir.join("grpc");
    let program = place.join("echo");
    if program.exists() {
        return Ok(program);
    }
    std::fs::create_dir_all(&place)?;
    std::fs::write(place.join("echo.proto"), include_str!("grpc/echo.proto"))?;
    std::fs::write(place.join("echo.cc"), include_str!("grpc/echo.cc"))?;
    let script =
        "protoc --cpp_out=. --grpc_out=. --plugin=protoc-gen-grpc=$(command -v grpc_cpp_plugin) echo.proto && \
                  g++ -O2 -w -o built echo.cc -lgrpc++ -lgrpc -lgpr -labsl_synchronization -lprotobuf && mv built echo";
    let mut command = Command::new("sh");
    crate::accel::clean_environment(&mut command);
    command.args(["-c", script]).current_dir(&place).stdin(Stdio::null());
    Child::spawn(command, None)?.finish(BUILD_LIMIT).context("building gRPC's echo")?;
    Ok(program)
}

/// Median time of a call, in nanoseconds. The server prints its port. The client gets the port and the seconds as
/// arguments, and prints the median.
fn call(step: &Step, program: &Path, server: &[&str], client: &[&str]) -> Result<Values> {
    let mut command = step.command(Role::Server, program);
    command.args(server);
    let mut server = Child::spawn(command, Some(step.server_cpu()))?;
    let port = server.line(READY_LIMIT)?;
    let mut command = step.command(Role::Client, program);
    command.args(client).args([&port, &step.seconds().to_string()]);
    let output = Child::spawn(command, Some(step.client_cpu()))?.finish(READY_LIMIT * 2)?;
    Ok(Values::from([("p50", output.trim().parse()?)]))
}
