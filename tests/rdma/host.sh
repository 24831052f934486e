#!/usr/bin/env bash
# One of two hosts with a soft-RoCE device each, in an emulated machine (scripts/rdma.sh): host.sh serve | ask.
# A monitor, an agent, and a program with the library; `ask` says what it has seen of the paths. FASTSOCKET_MANY: how many
# connections at once (1,000).
set -euo pipefail
what=$1
ulimit -n 65536
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
    "${ours[@]}" redis-server --port 7010 --bind 0.0.0.0 --protected-mode no --save '' --dir $dir >$dir/redis.log &
    servers="$servers $!"
    mkdir -p $dir/www; head -c 100000 /usr/bin/python3 >$dir/www/page
    cat >$dir/nginx.conf <<CONF
user root; daemon off; worker_processes 1; pid $dir/nginx.pid; error_log $dir/nginx.err;
events {}
http {
    access_log off; keepalive_requests 1000000; client_body_temp_path $dir; proxy_temp_path $dir;
    fastcgi_temp_path $dir; uwsgi_temp_path $dir; scgi_temp_path $dir;
    server { listen 7011; root $dir/www; }
}
CONF
    "${ours[@]}" nginx -p $dir -c $dir/nginx.conf &
    servers="$servers $!"
    # The other host sees the counters.
    FASTSOCKET_SOCKET=$socket /usr/bin/python3 -c 'import socket, subprocess, sys
listener = socket.create_server(("0.0.0.0", 7998))
while True:
    with listener.accept()[0] as conn: conn.sendall(subprocess.run(sys.argv[1:], stdout=subprocess.PIPE).stdout)
' "$artifacts/fastsocket" stat --json &
    servers="$servers $!"
    # Until the other one says that it is done.
    /usr/bin/python3 -c 'import socket; l = socket.create_server(("0.0.0.0", 7999)); l.settimeout(1700); l.accept()'
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

# Real programs: the same answers as on stock, and how many connections have gone over. (`least`: an emulated machine is late
# at times, and a connection that was late stays where it is.)
least() { if [ "$2" -ge "$3" ]; then echo "ok: $1 is $2"; else echo "FAILED: $1 is $2, not $3 or more"; exit 1; fi; }
# went WHAT LEAST COMMAND...: of so many connections at least so many go over.
went() {
    local name=$1 least=$2 before; shift 2
    before=$(count path_upgrade)
    "$@"
    least "path_upgrade of $name" $(($(count path_upgrade) - before)) $((2 * least))
}
same() {
    local stock
    stock=$(/usr/bin/python3 tests/rdma/programs.py "$@")
    "${ours[@]}" /usr/bin/python3 tests/rdma/programs.py "$@" >$dir/said
    expect "of $1, stock" "$stock" "$(cat $dir/said)"
}
went redis 1 same redis 7010 $other 60
went redis-benchmark 10 "${ours[@]}" redis-benchmark -h $other -p 7010 -c 10 -n 5000 -t set,get -d 100 -q
went nginx 1 same http 7011 $other 60
cat >$dir/haproxy.cfg <<CONF
defaults
    mode http
    timeout connect 60s
    timeout client 60s
    timeout server 60s
    http-reuse always
listen front
    bind 127.0.0.1:7020
    server there $other:7011
CONF
"${ours[@]}" haproxy -db -f $dir/haproxy.cfg &
proxy=$!
for _ in $(seq 100); do /usr/bin/python3 -c "import socket; socket.create_connection(('127.0.0.1', 7020), 2)" 2>/dev/null && break; sleep 0.5; done
direct=$(/usr/bin/python3 tests/rdma/programs.py http 7011 $other 60)
proxied() { /usr/bin/python3 tests/rdma/programs.py http 7020 127.0.0.1 60 >$dir/said; }
went "haproxy to nginx" 1 proxied
expect "by haproxy" "$(cat $dir/said)" "$direct"
kill $proxy

# A thousand connections to redis, held together: all go over. The link is cut in the middle of them, TCP is not.
many=${FASTSOCKET_MANY:-1000} stop=$dir/stop
counted() { /usr/bin/python3 -c 'import json, sys; totals = json.load(sys.stdin)["totals"]; print(*[totals.get(n, 0) for n in sys.argv[1:]])' "$@"; }
there() { /usr/bin/python3 -c 'import socket, sys; sys.stdout.write(socket.create_connection((sys.argv[1], 7998), 60).makefile().read())' $other; }
# Here and on the other host: how many have gone over, how many have come back, and who was hostile.
counts() { echo "$(stat | counted path_upgrade path_switch hostile_peer) $(there | counted path_upgrade path_switch hostile_peer)"; }
packets() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }
# until_is WHAT CONDITION: of what was counted since `from`, the six numbers as `n`; as long as some of them grow.
until_is() {
    local now='' before='' same=0 i a n
    while [ $same -lt 15 ]; do
        now=$(counts)
        read -ra a <<<"$from"; read -ra n <<<"$now"
        for i in "${!a[@]}"; do n[i]=$((n[i] - a[i])); done
        if (($2)); then echo "ok: $1: ${n[*]}"; return; fi
        if [ "$now" = "$before" ]; then same=$((same + 1)); else same=0; echo "$(date +%T) ${n[*]}"; fi
        before=$now
        if ! kill -0 $asks 2>/dev/null; then break; fi
        sleep 0.5
    done
    echo "FAILED: $1: ${n[*]}, not $2"
    exit 1
}
peaceful='n[2] + n[5] == 0'
# For each two of path_upgrade, the program's and the stand-in's, one switch of the program's and two of the stand-in's. (On the
# other host also of ends that had gone over alone, as the opener was late.)
back="n[0] > 0 && 2 * n[1] == 3 * n[0] && 2 * n[4] == 3 * n[3] && $peaceful"
date +%T
touch $stop
stock=$(/usr/bin/python3 tests/rdma/programs.py many 7010 $other "$many" $stop)
rm $stop
date +%T
from=$(counts) packets=$(packets)
"${ours[@]}" /usr/bin/python3 tests/rdma/programs.py many 7010 $other "$many" $stop >$dir/said &
asks=$!
# (An emulated machine is late at times.)
least=$((many * 95 / 100))
until_is "$least of $many connections over" "n[0] >= 2 * $least && n[3] >= 2 * $least && $peaceful"
date +%T
packets=$(($(packets) - packets))
least "RDMA packets for them" $packets $((2 * least))
nft 'table inet cut { chain in { type filter hook input priority 0; udp dport 4791 drop; }; }'
until_is "all back" "$back"
date +%T
kill -0 $asks
touch $stop
wait $asks
date +%T
expect "of $many connections, stock" "$stock" "$(cat $dir/said)"

# When the link is there again, new connections go over. It is cut once more, in the middle of long messages.
is_up() { grep -c "up=true known=true" $dir/agent.log; }
ups=$(is_up)
nft delete table inet cut
for _ in $(seq 600); do [ "$(is_up)" -gt "$ups" ] && break; sleep 0.2; done
from=$(counts)
"${ours[@]}" /usr/bin/python3 tests/apps/containers.py ask 7000 $other 1200 3 &
asks=$!
until_is "three connections over" "n[0] == 6 && n[3] >= 6"
nft 'table inet cut { chain in { type filter hook input priority 0; udp dport 4791 drop; }; }'
wait $asks
until_is "three connections back" "$back"
