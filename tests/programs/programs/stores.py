"""Stores and databases."""

import hashlib
import signal

from lab import Wrong, noise
from program import Program


class Redis(Program):
    name = "redis"
    version = ("redis-server", "--version")

    def argv(self):
        d = self.lab.directory("redis")
        return ["redis-server", "--port", self.port, "--bind", "127.0.0.1", "--save", "", "--dir", d, "--daemonize", "no"]

    def cli(self, *words, data=None):
        return self.lab.run(["redis-cli", "-p", self.port, *words], data=data)

    def serve(self):
        value = noise(1, 3_000_000).hex().encode()
        self.cli("-x", "SET", "large", data=value)
        self.lab.same(self.cli("--raw", "GET", "large"), value + b"\n", "GET large")
        said = self.lab.run(["redis-benchmark", "-p", self.port, "-n", "5000", "-c", "20", "-t", "set,get,lrange_100", "--csv"])
        if said.count(b"\n") < 4:
            raise Wrong(f"redis-benchmark: {said.decode()}")
        return 22

    def load(self):
        return {"kind": "redis", "port": self.port}


class Memcached(Program):
    name = "memcached"
    version = ("memcached", "--version")

    def argv(self):
        return ["memcached", "-u", "nobody", "-l", "127.0.0.1", "-p", self.port, "-t", "2", "-I", "8m"]

    def serve(self):
        value = noise(2, 700_000)
        self.lab.file("value", value)
        servers = f"--servers=127.0.0.1:{self.port}"
        self.lab.run(["memccp", servers, self.lab.path / "value"])
        # memccat adds a newline.
        self.lab.same(self.lab.run(["memccat", servers, "value"]), value + b"\n", "memccat")
        self.lab.run(["memccapable", "-h", "127.0.0.1", "-p", self.port, "-a"], timeout=120)
        return 3

    def load(self):
        return {"kind": "memcached", "port": self.port}


class Postgres(Program):
    name = "postgresql"
    version = ("/usr/lib/postgresql/15/bin/postgres", "--version")
    # A "fast" shutdown: the server ends sessions instead of waiting for them.
    stop_signal = signal.SIGINT
    threads = 3
    BIN = "/usr/lib/postgresql/15/bin"
    QUERY = "select string_agg(md5(i::text), ',' order by i) from generate_series(1, {}) i"

    def answer(self, n):
        return ",".join(hashlib.md5(str(i).encode()).hexdigest() for i in range(1, n + 1)).encode() + b"\n"

    def prepare(self):
        self.data = self.lab.directory("postgres", user="postgres", mode=0o700)
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        self.lab.run([*as_user, f"{self.BIN}/initdb", "-D", self.data, "-A", "trust", "-N", "-E", "UTF8"], side="stock", timeout=120)

    def argv(self):
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        settings = [f"listen_addresses=127.0.0.1", f"port={self.port}", f"unix_socket_directories={self.data}", "fsync=off",
                    # With another type, a killed server would leave files in /dev/shm.
                    "dynamic_shared_memory_type=mmap"]  # fmt: skip
        return [*as_user, f"{self.BIN}/postgres", "-D", self.data, *[w for s in settings for w in ("-c", s)]]

    def psql(self, query):
        return ["psql", "-XAt", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-c", query]

    def ready(self):
        def up():
            return self.lab.run(self.psql("select 1"), side="stock", status=None) == b"1\n"

        self.lab.until(up, 30, "answers no query")

    def serve(self):
        self.lab.same(self.lab.run(self.psql(self.QUERY.format(200000))), self.answer(200000), "a query")
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "postgres"]
        self.lab.run([f"{self.BIN}/pgbench", "-q", "-i", "-s", "1", *where])
        said = self.lab.run([f"{self.BIN}/pgbench", "-c", "4", "-j", "2", "-t", "200", *where]).decode()
        if "number of transactions actually processed: 800/800" not in said or "failed transactions: 0 " not in said:
            raise Wrong(f"pgbench: {said}")
        return 6

    def load(self):
        return {"kind": "run", "argv": self.psql(self.QUERY.format(3000)), "sha": hashlib.sha256(self.answer(3000)).hexdigest()}

    def reload(self):
        self.process.send_signal(signal.SIGHUP)


class Mariadb(Program):
    name = "mariadb"
    version = ("mariadbd", "--version")
    threads = 3
    QUERY = "select repeat('0123456789abcdef', {})"

    def answer(self, n):
        return b"0123456789abcdef" * n + b"\n"

    def prepare(self):
        self.data = self.lab.directory("mysql", user="mysql", mode=0o700)
        self.lab.run(
            ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={self.data}", "--skip-test-db",
             "--auth-root-authentication-method=normal"], side="stock", timeout=180,
        )  # fmt: skip

    def argv(self):
        return [
            "mariadbd", "--no-defaults", "--user=mysql", f"--datadir={self.data}", f"--port={self.port}", "--bind-address=127.0.0.1",
            f"--socket={self.data}/sock", "--skip-name-resolve", "--max-allowed-packet=64M", "--skip-log-bin", "--innodb-flush-log-at-trx-commit=0",
        ]  # fmt: skip

    def client(self, *words):
        return ["mariadb", "--no-defaults", "-h", "127.0.0.1", "-P", str(self.port), "-u", "root", "--max-allowed-packet=64M",
                "--quick", "-N", "-r", *words]  # fmt: skip

    def ready(self):
        self.lab.until(lambda: self.lab.run(self.client("-e", "select 1"), side="stock", status=None) == b"1\n", 30, "answers no query")

    def serve(self):
        self.lab.same(self.lab.run(self.client("-e", self.QUERY.format(500000))), self.answer(500000), "a query")
        rows = b"".join(b"insert into t values (%d, repeat('%d', 500));\n" % (i, i) for i in range(2000))
        script = b"drop database if exists d; create database d; use d; create table t (i int primary key, s text);\nbegin;\n" + rows + b"commit;\n"
        self.lab.run(self.client(), data=script)
        want = b"".join(b"%d\t%s\n" % (i, str(i).encode() * 500) for i in range(2000))
        self.lab.same(self.lab.run(self.client("-e", "select * from d.t order by i")), want, "a table")
        return 3

    def load(self):
        query = self.client("-e", self.QUERY.format(5000))
        return {"kind": "run", "argv": query, "sha": hashlib.sha256(self.answer(5000)).hexdigest()}

    def reload(self):
        self.process.send_signal(signal.SIGHUP)
