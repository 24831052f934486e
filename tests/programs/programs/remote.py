"""Servers to which people log in."""

import hashlib
import signal

from lab import noise
from program import Program


class Openssh(Program):
    """Each connection goes through fork, exec, a chroot and a seccomp sandbox."""

    name = "openssh"
    version = ("ssh", "-V")
    path = "learned"
    stop_status = (0, 255)
    threads = 2

    def prepare(self):
        self.lab.directory("../sshd")
        d = self.lab.directory("ssh", mode=0o700)
        self.lab.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", d / "host"], side="stock")
        self.lab.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", d / "user"], side="stock")
        self.lab.file("ssh/authorized", (d / "user.pub").read_bytes(), 0o600)
        self.lab.file("blob", noise(3, 20_000_000))
        self.conf = self.lab.file(
            "ssh/config",
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {d}/host\nAuthorizedKeysFile {d}/authorized\nStrictModes no\n"
            f"PermitRootLogin yes\nUsePAM no\nPidFile {d}/pid\nMaxStartups 100\nSubsystem sftp internal-sftp\nLogLevel VERBOSE\n",
        )
        key = f"IdentityFile={d}/user"
        options = ["BatchMode=yes", key, "IdentitiesOnly=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        self.options = [w for o in options for w in ("-o", o)]

    def argv(self):
        return ["/usr/sbin/sshd", "-D", "-e", "-f", self.conf]

    def ssh(self, *words):
        return ["ssh", "-F", "none", *self.options, "-p", str(self.port), "root@127.0.0.1", *words]

    def serve(self):
        blob = (self.lab.path / "blob").read_bytes()
        self.lab.same(self.lab.run(self.ssh("cat /run/lab/blob")), blob, "cat over ssh")
        self.lab.same(self.lab.run(self.ssh("cat"), data=blob), blob, "cat over ssh, there and back")
        copy = self.lab.path / "copy"
        self.lab.run(["scp", "-F", "none", *self.options, "-P", self.port, "root@127.0.0.1:/run/lab/blob", copy])
        self.lab.same(copy.read_bytes(), blob, "scp")
        self.lab.run(["scp", "-F", "none", *self.options, "-P", self.port, self.lab.path / "blob", "root@127.0.0.1:/run/lab/copy2"])
        self.lab.same((self.lab.path / "copy2").read_bytes(), blob, "scp to there")
        return 4

    def load(self):
        argv = self.ssh("head -c 300000 /run/lab/blob")
        return {"kind": "run", "argv": argv, "sha": hashlib.sha256(noise(3, 20_000_000)[:300000]).hexdigest()}

    def reload(self):
        self.process.send_signal(signal.SIGHUP)


class Vsftpd(Program):
    """Each session has namespaces of its own, a chroot and seccomp. Data connections are passed between processes."""

    name = "vsftpd"
    version = ("sh", "-c", "vsftpd -v 0>&1")
    path = "learned"
    kernel_too = "passive data connections: their listener is made under RLIMIT_AS and seccomp"
    stop_status = (0, -15)
    threads = 3

    def prepare(self):
        self.lab.directory("empty")
        self.lab.directory("ftp")
        self.blob = noise(4, 5_000_000)
        self.lab.file("ftp/blob", self.blob)
        self.lab.file("ftp/small", self.blob[:30000])
        self.conf = self.lab.file(
            "vsftpd.conf",
            f"listen=YES\nlisten_address=127.0.0.1\nlisten_port={self.port}\nbackground=NO\nanonymous_enable=YES\nlocal_enable=NO\n"
            f"anon_root=/run/lab/ftp\nsecure_chroot_dir=/run/lab/empty\nno_anon_password=YES\nxferlog_enable=NO\n",
        )

    def argv(self):
        return ["vsftpd", self.conf]

    def curl(self, name, *more):
        return ["curl", "-sS", "--max-time", "20", *more, f"ftp://127.0.0.1:{self.port}/{name}"]

    def serve(self):
        self.lab.same(self.lab.run(self.curl("blob")), self.blob, "passive")
        self.lab.same(self.lab.run(self.curl("blob", "--ftp-port", "127.0.0.1")), self.blob, "active")
        target = self.lab.path / "mirror"
        script = f"set net:timeout 10; set net:max-retries 1; mirror / {target}; bye"
        self.lab.run(["lftp", "-e", script, "-p", self.port, "127.0.0.1"])
        self.lab.same((target / "blob").read_bytes(), self.blob, "lftp mirror")
        for f in target.iterdir():
            f.unlink()
        return 3

    def load(self):
        return {"kind": "run", "argv": self.curl("small"), "sha": hashlib.sha256(noise(4, 5_000_000)[:30000]).hexdigest()}

    def reload(self):
        self.process.send_signal(signal.SIGHUP)
