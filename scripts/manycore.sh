#!/usr/bin/env bash
# Tests in emulated machines: many CPUs (crates/e2e/tests/manycore.rs), by
# default 8 and 24, and cards (cards.rs): manycore.sh [CPUS...]. A guest that dies
# or hangs (that is the emulator's, see tools/guest.sh) is started once more, and
# said so; a test that fails has failed.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

scripts/deps.sh manycore

# Path of a test program, built.
program() {
    local build path
    build=$(cargo test --locked -p fsocket-e2e --test "$1" --no-run 2>&1) || { echo "$build" >&2; return 1; }
    path=$(sed -nE 's/.*Executable .*\((.*)\)/\1/p' <<<"$build")
    [ -x "$path" ] || { echo "manycore: no test program in: $build" >&2; return 1; }
    echo "$path"
}

# guest WHAT PROGRAM GUEST-ARGUMENT...
guest() {
    local what=$1 program=$2 attempt result=0
    shift 2
    for attempt in 1 2; do
        printf '\n=== %s (attempt %s)\n' "$what" "$attempt"
        result=0
        tools/guest.sh "$@" -- "$program" --ignored --nocapture --test-threads=1 || result=$?
        case $result in 98 | 99) ;; *) break ;; esac
    done
    if [ "$result" -eq 0 ]; then
        printf '=== %s: ok\n' "$what"
    else
        printf '=== %s: FAILED (%s)\n' "$what" "$result"
        status=1
    fi
}

status=0
manycore=$(program manycore)
cards=$(program cards)
[ $# -gt 0 ] || set -- 8 24
for cpus in "$@"; do
    guest "$cpus emulated CPUs" "$manycore" -c "$cpus" -m 4G -t 600 -M veth
done
devices=(vmxnet3 e1000 e1000e rtl8139 pcnet tulip virtio-net-pci)
guest "emulated cards" "$cards" -c 4 -M "vmxnet3 e1000 e1000e 8139cp pcnet32 tulip virtio_net" -x "${devices[*]/#/-device }"
exit $status
