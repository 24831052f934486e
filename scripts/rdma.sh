#!/usr/bin/env bash
# Tests of crates/rdma over soft-RoCE, in an emulated machine. A guest that dies or hangs (that is
# the emulator's, see tools/guest.sh) is started once more, and said so; a test that fails has failed.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

scripts/deps.sh rdma

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
