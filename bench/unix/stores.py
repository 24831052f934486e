"""MariaDB over its socket file: sysbench, and answers that are compared."""

import re
import subprocess
import time

from side import Figure, Row, Wrong, same

ROWS = 2000


class Mariadb:
    def __init__(self, sides):
        for s in sides:
            data = s.place / "mysql"
            data.mkdir()
            install = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db",
                       "--auth-root-authentication-method=normal"]  # fmt: skip
            subprocess.run(install, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            server = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-networking", f"--socket={data}/sock",
                      "--max-allowed-packet=64M", "--skip-log-bin", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M",
                      "--max-connections=200"]  # fmt: skip
            s.start(server, (data / "sock").exists)
            time.sleep(0.5)
            self.client(s, "-e", "create database rates; create database d")
            s.ask(self.sysbench(s, "oltp_point_select", "prepare"))
            self.compare(s)

    def client(self, s, *words, data=None):
        return s.ask(["mariadb", "--no-defaults", f"--socket={s.place}/mysql/sock", "-u", "root", "--max-allowed-packet=64M",
                      "--quick", "-N", "-r", *words], data=data)  # fmt: skip

    def compare(self, s):
        """Compares a large answer, and the answers on a connection with many statements."""
        same(self.client(s, "-e", "select repeat('0123456789abcdef', 500000)"), "0123456789abcdef" * 500000 + "\n", f"{s.name}: a large answer")
        insert = "".join(f"insert into t values ({i}, repeat('{i}', 500));\nselect s from t where i = {i};\n" for i in range(ROWS))
        said = self.client(s, data=f"use d; drop table if exists t; create table t (i int primary key, s text);\nbegin;\n{insert}commit;\n")
        want = [str(i) * 500 + "\n" for i in range(ROWS)]
        same(said, "".join(want), f"{s.name}: an answer for each of {ROWS}")
        table = self.client(s, "-e", "select s from d.t order by i")
        same(table, "".join(want), f"{s.name}: a table")

    def sysbench(self, s, test, *words):
        return ["sysbench", test, "--db-driver=mysql", f"--mysql-socket={s.place}/mysql/sock", "--mysql-user=root", "--mysql-db=rates",
                "--table-size=10000", *words]  # fmt: skip

    def rows(self, quick):
        seconds = 2 if quick else 4
        for clients in (1, 8):
            measure = lambda s, c=clients: self.rate(s, seconds, "oltp_point_select", c, 60)  # noqa: E731
            yield Row(f"MariaDB prepared select, {clients} clients", measure, bar=1.1)
        yield Row("MariaDB read and write, 8 clients", lambda s: self.rate(s, seconds, "oltp_read_write", 8, 60))
        yield Row("MariaDB a connection a query", lambda s: self.short(s, 4000 if quick else 8000), "any", 0.97)

    def rate(self, s, seconds, test, clients, size):
        said = s.ask(self.sysbench(s, test, f"--threads={clients}", f"--time={seconds}", "--db-ps-mode=auto", "run"))
        n = int(re.search(r"transactions:\s+(\d+)", said)[1])
        if not re.search(r"ignored errors:\s+0 ", said) and test == "oltp_point_select":
            raise Wrong(f"{s.name}: sysbench: {said[-600:]}")
        return Figure(float(re.search(r"transactions:\s+\d+\s+\(([\d.]+) per sec", said)[1]), n, size * n)

    def short(self, s, n):
        clients = 4
        began = time.monotonic()
        s.ask(["mariadb-slap", "--no-defaults", f"--socket={s.place}/mysql/sock", "-u", "root", "--create-schema=rates", "--no-drop",
               "--detach=1", f"--concurrency={clients}", f"--number-of-queries={n}", "--query=select c from sbtest1 where id=500"])  # fmt: skip
        return Figure(n / (time.monotonic() - began), n)
