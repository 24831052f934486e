#!/usr/bin/env bash
# test-upgrade.sh ROOT OLD NEW: in a root file system redis and nginx run with the library of one package under load; the
# other one is installed over it, as dpkg does it, and the monitor is restarted, as the package has systemd do it; and
# back, ROUNDS= times (3). No request may fail, and new connections are over shared memory again.
set -euo pipefail
root=$1
old=$2
new=$3
here=$(cd "$(dirname "$0")/.." && pwd)

inside() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "${with[@]}" "$@"; }
with=()

# A network and processes of its own: no port is in the way, and nothing stays. Packages come from outside, before.
if [ "${4:-}" != inside ]; then
    inside sh -c 'command -v redis-server && command -v nginx && command -v python3' >/dev/null ||
        inside sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            redis-server nginx-light python3-minimal libpython3-stdlib' >/dev/null
    exec unshare --net --pid --mount-proc --fork --kill-child "$0" "$root" "$old" "$new" inside
fi
ip link set lo up
mount -t proc proc "$root/proc"
# The program that such a call in the background has become.
program() { pgrep -P "$1"; }
fail() {
    echo "packages: FAILED: $*" >&2
    exit 1
}

mkdir -p "$root/tmp/upgrade/www"
cp "$old" "$root/tmp/upgrade/old.deb"
cp "$new" "$root/tmp/upgrade/new.deb"
cp "$here"/tests/apps/{restarts,streams}.py "$root/tmp/upgrade/"
head -c 3000 /dev/urandom >"$root/tmp/upgrade/www/page"
cat >"$root/tmp/upgrade/nginx.conf" <<'CONF'
daemon off; worker_processes 2; pid /tmp/upgrade/nginx.pid; error_log /tmp/upgrade/nginx.log;
events { }
http { access_log off; keepalive_requests 1000000; server { listen 127.0.0.1:8080; root /tmp/upgrade/www; } }
CONF
# Three users share memory.
config='share = [["root", "www-data"]]'

monitor() {
    mkdir -p "$root/run/fastsocket"
    inside fastsocketd --config /tmp/upgrade/fastsocketd.toml 2>>"$root/tmp/upgrade/monitor.log" &
    monitor=$!
    for _ in $(seq 100); do
        inside fastsocket metrics >/dev/null 2>&1 && return
        sleep 0.05
    done
    fail "the monitor does not start"
}
# Connections that were opened over shared memory, by the counters.
opened() {
    inside fastsocket metrics | awk '/^fastsocket_connections_total.*path="shm"/ {n += $2} END {print n + 0}'
}
# More than so many.
accelerated() {
    for _ in $(seq 40); do
        sleep 0.25
        [ "$(opened)" -gt "$1" ] && return
    done
    inside fastsocket stat >&2
    cat "$root/tmp/upgrade/monitor.log" "$root/tmp/upgrade/load" >&2 || true
    fail "not over shared memory $2"
}

echo "$config" >"$root/tmp/upgrade/fastsocketd.toml"
inside dpkg -i /tmp/upgrade/old.deb >/dev/null
monitor
with=(LD_PRELOAD=/usr/lib/fastsocket/libfsocket.so)
inside redis-server --port 6380 --bind 127.0.0.1 --save '' --appendonly no --dir /tmp/upgrade >/dev/null &
inside nginx -c /tmp/upgrade/nginx.conf -p /tmp/upgrade &
sleep 1
inside python3 /tmp/upgrade/restarts.py 6380 8080 /tmp/upgrade/www/page >"$root/tmp/upgrade/load" 2>&1 &
load=$!
with=()
accelerated 0 "at first"
for round in $(seq "${ROUNDS:-3}"); do
    for package in new old; do
        inside dpkg -i "/tmp/upgrade/$package.deb" >/dev/null
        kill "$(program "$monitor")"
        wait "$monitor" || fail "round $round: the monitor ended with $?"
        monitor
        accelerated "$(opened)" "after $package.deb"
        kill -0 "$load" || fail "round $round: $(tail -3 "$root/tmp/upgrade/load")"
    done
done
kill "$(program "$load")"
wait "$load" || fail "$(tail -3 "$root/tmp/upgrade/load")"
cat "$root/tmp/upgrade/load"
inside dpkg --purge fastsocket >/dev/null
rm -rf "$root/tmp/upgrade"
umount "$root/proc"
echo "packages: ok: upgraded $((2 * ${ROUNDS:-3})) times under load"
