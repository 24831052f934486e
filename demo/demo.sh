#!/usr/bin/env bash
# nginx, redis and haproxy, unchanged: stock and ours in turn, then the proof
# from the counters that shared memory carried the bytes. Leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh
fastsocket=$PWD/target/release/fastsocket

dir=$(mktemp -d /tmp/fastsocket-demo-XXXXXX)
chmod 755 "$dir"
server=
cleanup() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

echo
echo "=== 1/2  Stock and ours in turn (medians; about a minute)"
"$fastsocket" bench --quick --layout two-cpus \
    --only rtt-8,redis-1,redis-50,nginx-keepalive,nginx-close-ab,haproxy-nginx

echo
echo "=== 2/2  Proof of the path: nginx and ab under \`fastsocket run\`"
# The first port that nobody listens on.
port=28080
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
mkdir -p "$dir/www"
head -c 64 /dev/zero | tr '\0' x >"$dir/www/index.html"
cat >"$dir/nginx.conf" <<CONF
daemon off;
worker_processes 2;
pid $dir/pid;
error_log $dir/error.log;
events { worker_connections 512; }
http {
    access_log off;
    client_body_temp_path $dir/body; proxy_temp_path $dir/proxy; fastcgi_temp_path $dir/fastcgi;
    uwsgi_temp_path $dir/uwsgi; scgi_temp_path $dir/scgi;
    server { listen 127.0.0.1:$port; root $dir/www; }
}
CONF
"$fastsocket" run -v -- nginx -p "$dir" -c "$dir/nginx.conf" &
server=$!
for _ in $(seq 100); do
    if [ -s "$dir/pid" ]; then break; fi
    sleep 0.05
done
sleep 0.2
echo "\$ fastsocket run -- ab -n 20000 -c 20 http://127.0.0.1:$port/index.html"
"$fastsocket" run -- ab -q -n 20000 -c 20 "http://127.0.0.1:$port/index.html" >"$dir/ab.txt"
grep -E '^(Complete requests|Failed requests|Requests per second)' "$dir/ab.txt"
echo
echo "\$ fastsocket stat"
"$fastsocket" stat
echo
echo "\$ fastsocket ss"
"$fastsocket" ss
shm=$("$fastsocket" stat --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["totals"].get("connect_shm", 0))')
echo
if [ "$shm" -ge 20000 ]; then
    echo "demo result: ok. $shm connections went through shared memory, none needed a change to a program"
else
    echo "demo result: FAILED. only $shm of 20000 connections went through shared memory (see the fallback reasons above)"
    exit 1
fi
