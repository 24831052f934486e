#!/usr/bin/env bash
# Tests in emulated machines: many CPUs (crates/e2e/tests/e2e/manycore.rs), by
# default 8 and 24, and cards (cards.rs): manycore.sh [CPUS...]. With `containers`
# instead: the tests of containers on the kernel of the guest (6.1). A guest that dies
# or hangs (that is the emulator's, see tools/guest.sh) is started once more, and
# said so; a test that fails has failed.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

scripts/deps.sh manycore

# program TEST [PACKAGE]: path of a test program, built.
program() {
    local build path
    build=$(cargo test --locked -p "${2:-fsocket-e2e}" --test "$1" --no-run 2>&1) || { echo "$build" >&2; return 1; }
    path=$(sed -nE 's/.*Executable .*\((.*)\)/\1/p' <<<"$build")
    [ -x "$path" ] || { echo "manycore: no test program in: $build" >&2; return 1; }
    echo "$path"
}

# guest WHAT COMMAND GUEST-ARGUMENT...
guest() {
    local what=$1 command=$2 attempt result=0
    shift 2
    for attempt in 1 2; do
        printf '\n=== %s (attempt %s)\n' "$what" "$attempt"
        result=0
        tools/guest.sh "$@" -- "$command" --nocapture --test-threads=1 || result=$?
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
if [ "${1:-}" = containers ]; then
    # What bridges, and translated and balanced addresses need.
    modules="veth bridge br_netfilter nf_nat nf_tables nft_chain_nat nft_masq nft_ct nft_hash nft_numgen nft_reject_inet nft_redir"
    export FASTSOCKET_TEST_STRICT=1
    # The guest's clock counts instructions (2 ns each): tests wait and measure seconds, which are no longer where emulation
    # is slow or the machine busy. So the guests run beside each other. The one with two CPUs has packets that another CPU
    # receives (RPS).
    began=$SECONDS
    logs=$(mktemp -d)
    trap 'rm -rf "$logs"' EXIT
    guests=()
    for test in "pairs 1 fsocket-bpf" "announce 1 fsocket-bpf" "containers 2" "containers_policy 1"; do
        read -r name cpus package <<<"$test"
        # (The end-to-end tests are modules of one program.)
        if [ -n "$package" ]; then
            run=$(program "$name" "$package")
        else
            run="$(program e2e) ${name}::"
        fi
        (
            guest "$name, kernel of the guest" "uname -r; $run" -c "$cpus" -m 4G -t 3600 -M "$modules" -x "-icount shift=1"
            exit $status
        ) >"$logs/$name" 2>&1 &
        guests+=("$! $name")
    done
    for pid_name in "${guests[@]}"; do
        wait "${pid_name% *}" || status=1
        cat "$logs/${pid_name#* }"
    done
    passed=$(cat "$logs"/* | awk '/^test result:/ { n += $4 } END { print n + 0 }')
    printf '\n=== kernel of the guest: %s tests passed, %s s\n' "$passed" $((SECONDS - began))
    exit $status
fi
e2e=$(program e2e)
[ $# -gt 0 ] || set -- 8 24
for cpus in "$@"; do
    guest "$cpus emulated CPUs" "$e2e manycore:: --ignored" -c "$cpus" -m 4G -t 600 -M veth
done
devices=(vmxnet3 e1000 e1000e rtl8139 pcnet tulip virtio-net-pci)
guest "emulated cards" "$e2e cards:: --ignored" -c 4 -M "vmxnet3 e1000 e1000e 8139cp pcnet32 tulip virtio_net" -x "${devices[*]/#/-device }"
exit $status
