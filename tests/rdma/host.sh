#!/usr/bin/env bash
# One of two hosts with a soft-RoCE device each, in an emulated machine (scripts/rdma.sh): host.sh serve | ask.
# A monitor, an agent, and a program with the library; `ask` says what it has seen of the paths.
set -euo pipefail
what=$1
case $what in serve) own=10.9.7.2 other=10.9.7.1 ;; ask) own=10.9.7.1 other=10.9.7.2 ;; esac
artifacts=$(realpath "${FASTSOCKET_ARTIFACTS:-target/release}")
agent_program=${FASTSOCKET_AGENT:-target/verbs/release/fastsocket-agent}
dir=/run/fastsocket-hosts; mkdir -m 700 -p $dir
device=$(ls /sys/class/net | grep -v '^lo$' | head -1)
ip addr add $own/24 dev "$device"; ip link set "$device" up
rdma link add rxe0 type rxe netdev "$device"
head -c 32 /dev/zero | tr '\0' k >$dir/key
cat >$dir/f.toml <<TOML
[hosts.rdma]
address = "$own:4700"
peers = ["$other:4700"]
key = "$dir/key"
[[rule]]
action = "allow"
TOML
socket=$dir/monitor.sock
"$artifacts/fastsocketd" --private --linger 600 --socket $socket --config $dir/f.toml &
monitor=$!
for _ in $(seq 300); do [ -S $socket ] && break; sleep 0.1; done
ours=(env LD_PRELOAD="$artifacts/libfsocket.so" FASTSOCKET_SOCKET=$socket)
stat() { FASTSOCKET_SOCKET=$socket "$artifacts/fastsocket" stat --json; }
"${ours[@]}" "$agent_program" -vv 2>$dir/agent.log &
agent=$!
ends() {
    # The other host may end, too.
    if [ "$what" = ask ]; then /usr/bin/python3 -c "import socket; socket.create_connection(('$other', 7999), 10)" || true; fi
    echo "--- agent of $what"; cat $dir/agent.log
    stat | /usr/bin/python3 -c 'import json, sys; print({k: v for k, v in json.load(sys.stdin)["totals"].items() if v})'
    kill $agent $monitor 2>/dev/null || true
}
trap ends EXIT
count() { stat | /usr/bin/python3 -c 'import json,sys; print(json.load(sys.stdin)["totals"].get(sys.argv[1], 0))' "$1"; }

if [ "$what" = serve ]; then
    "${ours[@]}" /usr/bin/python3 tests/apps/containers.py serve 7000 0.0.0.0 &
    servers=$!
    "${ours[@]}" /usr/bin/python3 tests/apps/hosts.py serve 7001 0.0.0.0 &
    servers="$servers $!"
    # Until the other one says that it is done.
    /usr/bin/python3 -c 'import socket; l = socket.create_server(("0.0.0.0", 7999)); l.settimeout(900); l.accept()'
    echo "serve: path_upgrade $(count path_upgrade) path_switch $(count path_switch)"
    # shellcheck disable=SC2086
    kill $servers
    exit 0
fi

for _ in $(seq 600); do grep -q known=true $dir/agent.log && break; sleep 0.2; done
grep known=true $dir/agent.log
expect() { if [ "$2" = "$3" ]; then echo "ok: $1 is $2"; else echo "FAILED: $1 is $2, not $3"; exit 1; fi; }
for _ in $(seq 300); do /usr/bin/python3 -c "import socket; socket.create_connection(('$other', 7001), 2)" 2>/dev/null && break; sleep 0.5; done

"${ours[@]}" /usr/bin/python3 tests/apps/containers.py ask 7000 $other 300 3
expect "path_upgrade after three connections" "$(count path_upgrade)" 6
for end in half large closed; do "${ours[@]}" /usr/bin/python3 tests/apps/hosts.py ask 7001 $other $end; done
expect "path_upgrade after three more" "$(count path_upgrade)" 12
expect "path_switch" "$(count path_switch)" 0

# The link is cut in the middle, TCP is not.
"${ours[@]}" /usr/bin/python3 tests/apps/containers.py ask 7000 $other 1200 3 &
asks=$!
for _ in $(seq 300); do [ "$(count path_upgrade)" -ge 18 ] && break; sleep 0.2; done
expect "path_upgrade before the cut" "$(count path_upgrade)" 18
kill -0 $asks
nft 'table inet cut { chain in { type filter hook input priority 0; udp dport 4791 drop; }; }'
wait $asks
expect "path_switch after the cut" "$(count path_switch)" 9
