#!/usr/bin/env bash
# `make packages`: target/debian/fastsocket_*.deb, the debug symbols beside it, and target/rpm/fastsocket-*.rpm. Then, as root, the package is
# installed in a clean Debian, used and purged; what is left is an error. SUITE= MIRROR= choose that Debian.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh
PATH="$PWD/target/tools/bin:$PATH"

command -v cargo-deb >/dev/null || cargo install cargo-deb --locked --root target/tools
rm -f target/debian/fastsocket*.deb target/debian/fastsocket*.ddeb
cargo deb --no-build --dbgsym -p fsocket-cli --output target/debian/
ls -l target/debian/

if command -v cargo-generate-rpm >/dev/null; then
    rm -rf target/rpm
    mkdir -p target/rpm/bin
    for file in fastsocket fastsocketd libfsocket.so; do
        strip --strip-unneeded -o "target/rpm/bin/$file" "target/release/$file"
    done
    cargo generate-rpm -p crates/cli --output target/rpm/
    ls -l target/rpm/*.rpm
else
    echo "packages: no .rpm (cargo install cargo-generate-rpm)"
fi

[ "$(id -u)" = 0 ] || { echo "packages: not tested (needs root)"; exit 0; }
command -v debootstrap >/dev/null || { echo "packages: not tested (debootstrap is not installed)"; exit 0; }
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
debootstrap --variant=minbase --include=libelf1,zlib1g "${SUITE:-bookworm}" "$root" \
    "${MIRROR:-http://deb.debian.org/debian}" >"$root.log" 2>&1 || { tail -5 "$root.log"; exit 1; }
rm -f "$root.log"
packaging/test-deb.sh "$root" target/debian/fastsocket_*.deb
[ -d target/rpm ] || exit 0
command -v rpm >/dev/null || { echo "packages: the .rpm is not tested (rpm is not installed)"; exit 0; }
packaging/test-rpm.sh "$root" target/rpm/fastsocket-*.rpm
