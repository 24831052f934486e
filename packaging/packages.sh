#!/usr/bin/env bash
# `make packages`: target/debian/fastsocket_*.deb, the debug symbols beside it, and target/rpm/fastsocket-*.rpm. Then, as root, the package is
# installed in a clean Debian, used and purged; what is left is an error. SUITE= MIRROR= choose that Debian.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh
PATH="$PWD/target/tools/bin:$PATH"

make --no-print-directory agent

command -v cargo-deb >/dev/null || cargo install cargo-deb --locked --root target/tools
rm -f target/debian/fastsocket*.deb target/debian/fastsocket*.ddeb
# One of an older version, to upgrade from. (First: cargo-deb removes what lies in target/debian.)
cargo deb --quiet --no-build -p fsocket-cli --deb-version 0.0.1-1 --output target/before/fastsocket.deb
cargo deb --no-build --dbgsym -p fsocket-cli --output target/debian/
ls -l target/debian/

# (Its compression libraries take minutes to build with optimisation, and a package takes seconds without.)
command -v cargo-generate-rpm >/dev/null ||
    CARGO_PROFILE_RELEASE_OPT_LEVEL=1 cargo install cargo-generate-rpm --locked --root target/tools
rm -rf target/rpm
mkdir -p target/rpm/bin
for file in fastsocket fastsocketd libfsocket.so fastsocket-bench; do
    strip --strip-unneeded -o "target/rpm/bin/$file" "target/release/$file"
done
cargo generate-rpm -p crates/cli --output target/rpm/
ls -l target/rpm/*.rpm

[ "$(id -u)" = 0 ] || { echo "packages: not tested (needs root)"; exit 0; }
for tool in debootstrap rpm; do
    command -v $tool >/dev/null || { command -v apt-get >/dev/null && apt-get install -y -qq $tool >/dev/null; } ||
        { echo "packages: not tested ($tool is not installed)"; exit 0; }
done
root=$(mktemp -d)
# Other users live in it, too.
chmod 755 "$root"
trap 'rm -rf --one-file-system "$root"' EXIT
debootstrap --variant=minbase --include=libelf1,zlib1g "${SUITE:-bookworm}" "$root" \
    "${MIRROR:-http://deb.debian.org/debian}" >"$root.log" 2>&1 || { tail -5 "$root.log"; exit 1; }
rm -f "$root.log"
packaging/test-deb.sh "$root" target/debian/fastsocket_*.deb
packaging/test-upgrade.sh "$root" target/before/fastsocket.deb target/debian/fastsocket_*.deb
packaging/test-rpm.sh "$root" target/rpm/fastsocket-*.rpm
