#!/usr/bin/env bash
# Tests of crates/rdma over soft-RoCE, in an emulated machine; with `hosts` instead, of agents on two hosts, in two
# (tests/rdma/host.sh). A guest that dies or hangs (that is
# the emulator's, see tools/guest.sh) is started once more, and said so; a test that fails has failed.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

scripts/deps.sh rdma

if [ "${1:-}" = hosts ]; then
    # (FASTSOCKET_AGENT: an agent built before.) In a directory of its own: the end-to-end tests have an agent without RDMA.
    if [ -z "${FASTSOCKET_AGENT:-}" ]; then
        cargo build --release --locked -p fsocket-preload -p fsocket-monitor -p fsocket-cli
        cargo build --release --locked -p fsocket-agent --features verbs --target-dir target/verbs
    fi
    logs=$(mktemp -d)
    trap 'rm -rf "$logs"' EXIT
    # host WHAT NETWORK NUMBER: starts it, in the background.
    host() {
        tools/guest.sh -c 1 -m 2G -t 1800 -M "e1000 rdma_rxe rdma_ucm ib_uverbs nf_tables" \
            -x "-netdev socket,id=n0,$2=127.0.0.1:$port -device e1000,netdev=n0,mac=52:54:00:00:07:$3" -- \
            tests/rdma/host.sh "$1" >"$logs/$1" 2>&1 &
    }
    for attempt in 1 2; do
        printf '\n=== two hosts with soft-RoCE (attempt %s)\n' "$attempt"
        port=$((20000 + RANDOM % 10000))
        host serve listen 02
        serve=$!
        sleep 2
        host ask connect 01
        ask=$!
        result=0 served=0
        wait $ask || result=$?
        wait $serve || served=$?
        for what in ask serve; do printf '\n=== %s\n' $what; cat "$logs/$what"; done
        case $served in 98 | 99) continue ;; esac
        case $result in 98 | 99) ;; *) break ;; esac
    done
    exit $((result > served ? result : served))
fi

cargo clippy --locked -p fsocket-rdma --features verbs --all-targets -- -D warnings
build=$(cargo test --locked -p fsocket-rdma --features verbs --test soft_roce --no-run 2>&1) || { echo "$build" >&2; exit 1; }
program=$(sed -nE 's/.*Executable .*\((.*)\)/\1/p' <<<"$build")
[ -x "$program" ] || { echo "rdma: no test program in: $build" >&2; exit 1; }
for attempt in 1 2; do
    printf '\n=== soft-RoCE (attempt %s)\n' "$attempt"
    result=0
    # Two of the tests are what other processes of the tests run.
    tools/guest.sh -c 2 -t 600 -M "veth rdma_rxe rdma_ucm ib_uverbs sch_netem" -- \
        "$program" --ignored --nocapture --test-threads=1 --skip the_other_agent --skip the_libraries_are_not_there "$@" || result=$?
    case $result in 98 | 99) ;; *) break ;; esac
done
exit "$result"
