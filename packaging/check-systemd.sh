#!/usr/bin/env bash
# Runs as a unit under the systemd that test-systemd.sh boots.
set -euo pipefail
trap 'echo "check: FAILED in line $LINENO"; journalctl -q --no-pager -n 40 || true' ERR

fail() { echo "check: FAILED: $*"; exit 1; }
counter() { fastsocket stat --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["totals"][sys.argv[1]])' "$1"; }

ip link set lo up 2>/dev/null || true
# (Lines with fields: what listens.)
mkdir -p /run/systemd/system/fastsocketd.service.d
printf '[Service]\nEnvironment=FASTSOCKET_LOG=info\n' >/run/systemd/system/fastsocketd.service.d/log.conf
systemctl daemon-reload
systemctl start fastsocketd
[ "$(systemctl show -p ActiveState --value fastsocketd)" = active ] || fail "the monitor is not active"
[ "$(systemctl show -p TasksMax --value fastsocketd)" = 128 ] || fail "the monitor may have any number of threads"
[ "$(systemctl show -p MemoryMax --value fastsocketd)" != infinity ] || fail "the monitor may have all memory"
journalctl -q --no-pager -u fastsocketd | grep -o "fastsocketd .*capabilities.*" || true

# Bad input changes nothing.
if fastsocket enable redis-server no-such-unit 2>/tmp/said; then fail "an unknown unit was enabled"; fi
grep -q "no unit no-such-unit.service" /tmp/said || fail "$(cat /tmp/said)"
[ ! -e /etc/systemd/system/redis-server.service.d ] || fail "half enabled"
# A wrong configuration is reported, and the monitor goes on.
mkdir -p /etc/fastsocket
echo nonsense >/etc/fastsocket/fastsocketd.toml
if fastsocketd --check 2>/tmp/said; then fail "a wrong configuration was accepted"; fi
systemctl reload fastsocketd
sleep 1
[ "$(systemctl show -p ActiveState --value fastsocketd)" = active ] || fail "the monitor has ended of a wrong configuration"
journalctl -q --no-pager -u fastsocketd | grep -q "not reloaded" || fail "a wrong configuration was not reported"
rm /etc/fastsocket/fastsocketd.toml

fastsocket enable redis-server nginx load page
systemctl restart fastsocketd
systemctl restart redis-server nginx
systemctl start load page
shm=$(counter connect_shm) kernel=$(($(counter connect_kernel) + $(counter accept_kernel))) said=$(fastsocket stat)
echo "connections: connect_shm $shm, accept_shm $(counter accept_shm), connect_kernel and accept_kernel $kernel"
for unit in redis-server nginx; do
    fastsocket explain "$(systemctl show -p MainPID --value $unit)" || fail "$unit is not accelerated"
done
fastsocket metrics | grep -x fastsocket_up\ 1

# Debian's postgresql.service stands for its clusters. A local psql over the socket directory, of another unit.
if command -v pg_createcluster >/dev/null; then
    [ -e /etc/postgresql/15/main ] || pg_createcluster 15 main >/dev/null
    fastsocket enable postgresql sql
    systemctl reload fastsocketd
    systemctl restart postgresql@15-main
    fastsocket explain "$(systemctl show -p MainPID --value postgresql@15-main)" | grep -q libfsocket || fail "no library in postgres"
    before=$(counter path_upgrade)
    for i in $(seq 1 400); do echo "SELECT $i;"; done >/tmp/sql
    systemctl start sql
    [ "$(sort -n /tmp/answers | tr '\n' ' ')" = "$(seq 1 400 | tr '\n' ' ')" ] || fail "answers of postgres: $(tail -3 /tmp/answers)"
    echo "postgres: path_upgrade $(($(counter path_upgrade) - before))"
    [ "$(($(counter path_upgrade) - before))" -ge 2 ] || fail "psql stays in the kernel"
    fastsocket disable postgresql
    [ ! -e /etc/systemd/system/postgresql@.service.d ] || fail "the template is still enabled"
    ! grep LD_PRELOAD /etc/postgresql/15/main/environment || fail "the cluster is still enabled"
    systemctl stop postgresql@15-main
fi
[ "$shm" -ge 42 ] && [ "$kernel" = 0 ] || fail "some over the kernel: $said"
# In the journal with their fields, from the part of the monitor that has given up all rights.
journalctl -q --no-pager -u fastsocketd -o json | python3 -c '
import json, sys
lines = [json.loads(line) for line in sys.stdin]
for line in lines:
    if line["MESSAGE"] == "listens" and line["F_ADDRESS"].endswith(":6379"):
        assert line["_TRANSPORT"] == "journal" and line["SYSLOG_IDENTIFIER"] == "fastsocketd", line
        assert line["PRIORITY"] == "5" and "redis-server" in line["F_PROCESS"], line
        break
else:
    sys.exit(f"no line with fields in the journal: {lines}")
' || fail "the fields of the journal"

rm -r /run/systemd/system/fastsocketd.service.d
systemctl daemon-reload
systemctl stop fastsocketd
[ "$(systemctl show -p Result --value fastsocketd)" = success ] || fail "the monitor ends by $(systemctl show -p Result --value fastsocketd)"
fastsocket disable --all
systemctl restart redis-server nginx
PREFIX=/usr /usr/local/bin/install-fastsocket uninstall
[ ! -e /run/fastsocket ] || fail "/run/fastsocket is left"
pgrep fastsocketd && fail "a monitor is left"
echo "check: ok"
