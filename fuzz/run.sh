#!/usr/bin/env bash
# Runs each fuzzer of tests/fuzz for TIME seconds (60), or those named, and ends with a table.
# New inputs go to target/fuzz/found/NAME, findings to target/fuzz/artifacts/NAME.
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

time=${TIME:-60}
out=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
host=$(rustc -vV | sed -n 's/^host: //p')
# What `cargo fuzz` passes, without a sanitizer: those need nightly's -Zsanitizer.
cover="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
cover+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
cover+=" -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=16"
# With --target the flags do not reach build scripts, which have no libFuzzer.
RUSTFLAGS=$cover CARGO_TARGET_DIR=$out cargo build -q --release --target "$host" --manifest-path fuzz/Cargo.toml || exit 1

status=0 table=
for corpus in fuzz/corpus/*/; do
    name=$(basename "$corpus")
    if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
    mkdir -p "$out/found/$name" "$out/artifacts/$name"
    log=$out/$name.log
    result=ok
    FUZZ_TARGET=$name "$out/$host/release/fuzz" "$out/found/$name" "$corpus" -max_total_time="$time" \
        -max_len=4096 -timeout=25 -print_final_stats=1 -artifact_prefix="$out/artifacts/$name/" >"$log" 2>&1 || {
        result=FOUND status=1
        tail -40 "$log"
    }
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    covered=$(grep -oE 'cov: [0-9]+ ft: [0-9]+' "$log" | tail -1)
    table+=$(printf '%-10s %-6s runs: %-10s %s' "$name" "$result" "${runs:-?}" "$covered")$'\n'
done
printf '\n%s' "$table"
exit "$status"
