#!/usr/bin/env bash
# Runs groups of tests (unit, loom, e2e, differential) and ends with one line that adds up
# what the test runners said. Exit status 0 only if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
started=$SECONDS

group() {
    local name=$1
    shift
    printf '\n=== %s\n' "$name"
    "$@" 2>&1 | tee -a "$log"
    local result=${PIPESTATUS[0]}
    if [ "$result" -ne 0 ]; then
        status=1
        printf '=== %s FAILED (exit %s)\n' "$name" "$result"
    fi
}

total() { grep -oE "test result: .*" "$log" | grep -oE "[0-9]+ $1" | awk '{n += $1} END {print n + 0}'; }

unit() {
    group "unit and integration tests" cargo test --workspace --exclude fsocket-e2e --exclude fsocket-differential --exclude fsocket-faults --locked --no-fail-fast -q
}

loom() {
    local before
    before=$(total passed)
    # A target directory of its own: the cfg would rebuild everything twice.
    # Link-time optimisation only costs time here; one code generation unit saves more of the models' time than it costs.
    group "loom models" env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom" \
        CARGO_PROFILE_RELEASE_LTO=off \
        cargo test --release --locked --no-fail-fast -q -p fsocket-sync -p fsocket-ring --lib --tests
    if [ "$(total passed)" -eq "$before" ]; then
        status=1
        echo "=== loom models FAILED: no model ran"
    fi
}

e2e() {
    # One at a time: they measure descriptors and use both cores as it is.
    group "end-to-end tests with real programs" \
        cargo test --locked --no-fail-fast -p fsocket-e2e -p fsocket-faults -- --test-threads=1 --nocapture
}

differential() {
    group "random programs, on kernel TCP and on shared memory" \
        cargo test --locked --no-fail-fast -p fsocket-differential -- --test-threads=1 --nocapture
}

for name in "$@"; do
    case $name in
        unit | loom | e2e | differential) "$name" ;;
        *) echo "usage: test.sh [unit] [loom] [e2e] [differential]" >&2; exit 2 ;;
    esac
done

passed=$(total passed) failed=$(total failed) ignored=$(total ignored)
skipped=$(grep -c '^SKIPPED:' "$log")
unasserted=$(grep -c 'PATH NOT ASSERTED' "$log")

printf '\n'
grep -E '^SKIPPED:|^test .* FAILED$' "$log" | sort | uniq -c
[ "$unasserted" -gt 0 ] && printf 'PATH NOT ASSERTED %s times (stock mode)\n' "$unasserted"
if [ "$passed" -eq 0 ]; then status=1; fi
verdict=ok
[ "$status" -eq 0 ] || verdict=FAILED
printf 'fastsocket test result: %s. %s passed; %s failed; %s ignored; %s skipped; finished in %s s\n' \
    "$verdict" "$passed" "$failed" "$ignored" "$skipped" "$((SECONDS - started))"
exit "$status"
