#!/usr/bin/env bash
# Runs as a unit under the systemd that test-systemd.sh boots.
set -euo pipefail
trap 'echo "check: FAILED in line $LINENO"; journalctl -q --no-pager -n 40 || true' ERR

fail() { echo "check: FAILED: $*"; exit 1; }
counter() { fastsocket stat --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["totals"][sys.argv[1]])' "$1"; }

ip link set lo up 2>/dev/null || true
systemctl start fastsocketd
[ "$(systemctl show -p ActiveState --value fastsocketd)" = active ] || fail "the monitor is not active"
journalctl -q --no-pager -u fastsocketd | grep -o "fastsocketd .*capabilities.*" || true

# Bad input changes nothing.
if fastsocket enable redis-server no-such-unit 2>/tmp/said; then fail "an unknown unit was enabled"; fi
grep -q "no unit no-such-unit.service" /tmp/said || fail "$(cat /tmp/said)"
[ ! -e /etc/systemd/system/redis-server.service.d ] || fail "half enabled"

fastsocket enable redis-server nginx load page
systemctl restart fastsocketd
systemctl restart redis-server nginx
systemctl start load page
echo "connections: connect_shm $(counter connect_shm), connect_kernel $(counter connect_kernel)," \
    "accept_shm $(counter accept_shm), accept_kernel $(counter accept_kernel)"
[ "$(counter connect_shm)" -ge 42 ] || fail "too few over shared memory"
[ "$(counter connect_kernel)" = 0 ] && [ "$(counter accept_kernel)" = 0 ] || fail "some over the kernel"
for unit in redis-server nginx; do
    fastsocket explain "$(systemctl show -p MainPID --value $unit)" || fail "$unit is not accelerated"
done
fastsocket metrics | grep -x fastsocket_up\ 1

systemctl stop fastsocketd
[ "$(systemctl show -p Result --value fastsocketd)" = success ] || fail "the monitor ends by $(systemctl show -p Result --value fastsocketd)"
fastsocket disable --all
systemctl restart redis-server nginx
PREFIX=/usr /usr/local/bin/install-fastsocket uninstall
[ ! -e /run/fastsocket ] || fail "/run/fastsocket is left"
pgrep fastsocketd && fail "a monitor is left"
echo "check: ok"
