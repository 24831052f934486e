"""Fetches what the suites are made of: Debian sources, crates, Python packages.

Everything lies in one cache directory and is fetched once.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def cargo():
    own = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo")) / "bin" / "cargo"
    return str(own) if own.exists() else "cargo"


class Cache:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def done(self, name):
        return (self.root / f".done-{name}").exists()

    def mark(self, name):
        (self.root / f".done-{name}").touch()

    def sh(self, argv, cwd=None, env=None, timeout=1800):
        """Runs a step of a build; its output is in build.log."""
        with open(self.root / "build.log", "ab") as log:
            log.write(f"\n$ {' '.join(map(str, argv))}\n".encode())
            log.flush()
            done = subprocess.run(
                list(map(str, argv)), cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout
            )
        if done.returncode != 0:
            raise RuntimeError(f"{argv[0]} failed ({done.returncode}); see {self.root}/build.log")

    # Debian -------------------------------------------------------------

    def apt_conf(self):
        """Writes deb-src lines to a source list in the cache, and leaves the machine's lists alone."""
        apt = self.root / "apt"
        conf = apt / "apt.conf"
        if not self.done("apt"):
            for sub in ("lists/partial", "cache/archives/partial"):
                (apt / sub).mkdir(parents=True, exist_ok=True)
            signed = f"[signed-by={KEYRING}]"
            (apt / "sources.list").write_text(
                f"deb-src {signed} http://deb.debian.org/debian bookworm main\n"
                f"deb-src {signed} http://deb.debian.org/debian-security bookworm-security main\n"
            )
            conf.write_text(
                f'Dir::Etc::sourcelist "{apt}/sources.list";\nDir::Etc::sourceparts "-";\n'
                f'Dir::State::lists "{apt}/lists";\nDir::Cache "{apt}/cache";\nAPT::Sandbox::User "root";\n'
            )
            self.sh(["apt-get", "update"], env=self.apt_env(conf), timeout=600)
            self.mark("apt")
        return conf

    def apt_env(self, conf):
        return {**os.environ, "APT_CONFIG": str(conf), "LC_ALL": "C"}

    def debian_source(self, package):
        """Returns the unpacked source tree of a package, and its version."""
        place = self.root / "debian" / package
        if not self.done(f"source-{package}"):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            env = self.apt_env(self.apt_conf())
            self.newest_there(package, place, env)
            dsc = next(place.glob("*.dsc"))
            self.sh(["dpkg-source", "-x", dsc.name, "tree"], cwd=place)
            self.mark(f"source-{package}")
        dsc = next(place.glob("*.dsc")).read_text(errors="replace")
        return place / "tree", re.search(r"^Version: (.*)$", dsc, re.M).group(1)

    def newest_there(self, package, place, env):
        """Downloads the newest version that the mirror still (or already) has."""
        argv = ["apt-cache", "madison", package]
        text = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        lines = [[f.strip() for f in line.split("|")] for line in text.splitlines()]
        versions = dict.fromkeys(f[1] for f in lines if len(f) == 3 and f[2].endswith("Sources"))
        for version in versions:
            try:
                return self.sh(["apt-get", "source", "--download-only", f"{package}={version}"], cwd=place, env=env)
            except RuntimeError as error:
                last = error
        raise last if versions else RuntimeError(f"no source of {package}")

    # crates.io ----------------------------------------------------------

    def crate(self, name, version):
        """Returns the unpacked, writable source of a crate, which cargo has fetched."""
        place = self.root / "crates" / f"{name}-{version}"
        if not self.done(f"crate-{name}-{version}"):
            fetch = self.root / "crates" / f"fetch-{name}"
            shutil.rmtree(place, ignore_errors=True)
            (fetch / "src").mkdir(parents=True, exist_ok=True)
            (fetch / "src/lib.rs").touch()
            (fetch / "Cargo.toml").write_text(
                f'[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2021"\n'
                f'[dependencies]\n{name} = "={version}"\n[workspace]\n'
            )
            self.sh([cargo(), "fetch"], cwd=fetch)
            home = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
            source = next(home.glob(f"registry/src/*/{name}-{version}"))
            shutil.copytree(source, place)
            with open(place / "Cargo.toml", "a") as manifest:
                # If its tests use other crates that depend on it, these must use this very copy.
                manifest.write(f'\n[workspace]\n[patch.crates-io]\n{name} = {{ path = "." }}\n')
            (place / "Cargo.lock").unlink(missing_ok=True)
            self.mark(f"crate-{name}-{version}")
        return place

    def copy(self, tree):
        """Copies a crate of this repository to the cache, so that its build leaves nothing behind."""
        place = self.root / "crates" / tree.name
        shutil.copytree(tree, place, dirs_exist_ok=True)
        return place

    def cargo_tests(self, place, args):
        """Builds tests. Returns the paths of their executables by target name."""
        argv = [cargo(), "test", "--no-run", "--message-format=json", *args]
        with open(self.root / "build.log", "ab") as log:
            done = subprocess.run(argv, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, timeout=3600)
        if done.returncode != 0:
            raise RuntimeError(f"{place.name}: its tests do not build; see {self.root}/build.log")
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        made = [m for m in messages if m.get("executable") and m["profile"]["test"]]
        return {m["target"]["name"]: m["executable"] for m in made}

    # PyPI ---------------------------------------------------------------

    def venv(self, name, packages):
        place = self.root / "venv" / name
        if not self.done(f"venv-{name}"):
            shutil.rmtree(place, ignore_errors=True)
            self.sh([sys.executable, "-m", "venv", place])
            self.sh([place / "bin" / "pip", "install", "-q", *packages])
            self.mark(f"venv-{name}")
        return place / "bin" / "python"
