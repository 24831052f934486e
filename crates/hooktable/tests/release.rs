//! `packaging/release.sh` on a small repository: what it refuses, and what it signs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Repository(PathBuf);

impl Drop for Repository {
    fn drop(&mut self) {
        let _ = self.run("gpgconf", &["--kill", "all"]);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Repository {
    /// A repository with a signing key, whose `make packages` leaves one file.
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("fs-release-{}-{name}", std::process::id()));
        let r = Self(dir);
        for folder in ["packaging", "keys"] {
            std::fs::create_dir_all(r.0.join(folder)).expect("a folder");
        }
        r.done("chmod", &["700", "keys"]);
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../packaging/release.sh");
        std::fs::copy(script, r.0.join("packaging/release.sh")).expect("the script");
        r.write("Cargo.toml", "version = \"1.2.3\"\n");
        r.write("CHANGELOG.md", "## [1.2.3] - today\n");
        r.write(
            "Makefile",
            "packages:\n\tmkdir -p target/debian && echo a package > target/debian/fastsocket_1.2.3-1_amd64.deb\n",
        );
        r.write(".gitignore", "target\nkeys\n");
        r.done(
            "gpg",
            &["--batch", "--passphrase", "", "--quick-generate-key", "release@test", "ed25519", "sign", "never"],
        );
        r.done("git", &["init", "-q"]);
        r.commit();
        r
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).expect(file);
    }

    fn run(&self, program: &str, args: &[&str]) -> Output {
        let mut c = Command::new(program);
        c.args(args).current_dir(&self.0).env("GNUPGHOME", self.0.join("keys")).env("KEY", "release@test");
        for (name, value) in [("NAME", "A Tester"), ("EMAIL", "release@test")] {
            c.env(format!("GIT_AUTHOR_{name}"), value).env(format!("GIT_COMMITTER_{name}"), value);
        }
        c.env("GIT_CONFIG_GLOBAL", "/dev/null").output().unwrap_or_else(|e| panic!("{program}: {e}"))
    }

    fn done(&self, program: &str, args: &[&str]) {
        let out = self.run(program, args);
        assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn commit(&self) {
        self.done("git", &["add", "-A"]);
        self.done("git", &["commit", "-q", "-m", "A release"]);
    }

    fn tag(&self, how: &str) {
        self.done("git", &["-c", "user.signingkey=release@test", "tag", "-f", how, "v1.2.3", "-m", "1.2.3"]);
    }

    fn release(&self) -> Output {
        self.run("packaging/release.sh", &["v1.2.3"])
    }

    fn refused(&self, why: &str) {
        let out = self.release();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && text.contains(why), "{why}: {text}");
        assert!(!self.0.join("target/release-v1.2.3").exists(), "{why}");
    }
}

fn has(dir: &Path, file: &str) -> bool {
    dir.join(file).metadata().is_ok_and(|m| m.len() > 0)
}

#[test]
fn packages_of_a_signed_tag_are_signed() {
    let r = Repository::new("signed");
    r.tag("-s");
    // (What is not committed is not released.)
    r.write("Makefile", "packages:\n\tfalse\n");
    let out = r.release();
    assert!(out.status.success(), "{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let files = r.0.join("target/release-v1.2.3");
    let expected = ["fastsocket_1.2.3-1_amd64.deb", "fastsocket-1.2.3.tar.gz", "SHA256SUMS", "SHA256SUMS.asc"];
    assert!(expected.iter().all(|f| has(&files, f)), "{}", String::from_utf8_lossy(&out.stdout));
    let check = ["--verify", "target/release-v1.2.3/SHA256SUMS.asc", "target/release-v1.2.3/SHA256SUMS"];
    r.done("gpg", &check);
    r.write("target/release-v1.2.3/SHA256SUMS", "other sums\n");
    assert!(!r.run("gpg", &check).status.success());
}

#[test]
fn a_tag_that_is_no_release_is_refused() {
    let r = Repository::new("refused");
    r.tag("-a");
    r.refused("not a tag with a good signature");
    for (file, bad, why) in [
        ("Cargo.toml", "version = \"1.2.4\"\n", "Cargo.toml does not have version 1.2.3"),
        ("CHANGELOG.md", "## [Unreleased]\n", "CHANGELOG.md has no section [1.2.3]"),
    ] {
        let good = std::fs::read_to_string(r.0.join(file)).expect(file);
        r.write(file, bad);
        r.commit();
        r.tag("-s");
        r.refused(why);
        r.write(file, &good);
        r.commit();
    }
}
