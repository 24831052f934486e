#!/usr/bin/env bash
# Builds the differential tester for musl and runs it: musl.sh [ARGUMENTS OF `fsocket-differential run`]
#
# The tester's processes, those with the library and those without, are programs of musl then; library and monitor are
# those of FASTSOCKET_ARTIFACTS. Needs musl-gcc, and rustup for Rust's own library for musl.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
target=x86_64-unknown-linux-musl
[ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || rustup target add $target
build=$root/target/musl-rust
# musl-gcc has no dynamic libgcc_s: the unwinder of Rust's musl takes its place.
mkdir -p "$build/lib"
echo "GROUP ( $(rustc --print sysroot)/lib/rustlib/$target/lib/self-contained/libunwind.a )" > "$build/lib/libgcc_s.so"
CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_LINKER=musl-gcc CARGO_TARGET_DIR=$build \
    RUSTFLAGS="-C target-feature=-crt-static -C link-self-contained=no -L native=$build/lib" \
    cargo build -q --manifest-path "$root/Cargo.toml" --profile quick --locked --target $target -p fsocket-differential
exec "$build/$target/quick/fsocket-differential" run "$@"
