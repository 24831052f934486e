#!/usr/bin/env bash
# The many-core tests (crates/e2e/tests/manycore.rs) in emulated machines:
# manycore.sh [CPUS...], by default 8 and 24. A guest that dies or hangs (that
# is the emulator's, see tools/guest.sh) is started once more, and said so; a
# test that fails has failed.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

scripts/deps.sh manycore
build=$(cargo test --locked -p fsocket-e2e --test manycore --no-run 2>&1) || { echo "$build"; exit 1; }
program=$(sed -nE 's/.*Executable .*\((.*)\)/\1/p' <<<"$build")
[ -x "$program" ] || { echo "manycore: no test program in: $build" >&2; exit 1; }

status=0
[ $# -gt 0 ] || set -- 8 24
for cpus in "$@"; do
    for attempt in 1 2; do
        printf '\n=== %s emulated CPUs (attempt %s)\n' "$cpus" "$attempt"
        result=0
        tools/guest.sh -c "$cpus" -m 4G -t 600 -M veth -- \
            "$program" --ignored --nocapture --test-threads=1 || result=$?
        case $result in 98 | 99) ;; *) break ;; esac
    done
    if [ "$result" -eq 0 ]; then verdict=ok; else verdict="FAILED ($result)" status=1; fi
    printf '=== %s emulated CPUs: %s\n' "$cpus" "$verdict"
done
exit $status
