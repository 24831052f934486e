#!/usr/bin/env bash
# test-systemd.sh [deb|rpm OLD NEW]: installs what is built into a copy of this machine's root file system (an overlay that goes
# away), boots it with its own systemd (systemd-nspawn), and has redis, nginx, two clients and, where it is installed,
# PostgreSQL with a psql enabled there: other users' units, hardened as Debian has them. With two builds of different ABI
# numbers (packages for deb, directories for rpm): upgrades under load. Needs root, systemd-container, redis-server, nginx, curl.
# ARTIFACTS= and PAGES= as of install.sh; KEEP=1 prints the whole log.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
for program in systemd-nspawn redis-server nginx curl redis-benchmark; do
    command -v "$program" >/dev/null || { echo "systemd: not tested ($program is not installed)"; exit 0; }
done
[ "$(id -u)" = 0 ] || { echo "systemd: not tested (needs root)"; exit 0; }

work=$(mktemp -d)
clean_up() {
    umount -l "$work/root" 2>/dev/null || true
    umount -l "$work" 2>/dev/null || true
    rmdir "$work" 2>/dev/null || true
}
trap clean_up EXIT
# (An overlay's upper directory cannot be on another overlay.)
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
root=$work/root

how=${1:-}
if [ -n "$how" ]; then
    check="/usr/local/bin/check-upgrade $how"
    install -m 755 "$here/check-upgrade.sh" "$root/usr/local/bin/check-upgrade"
    mkdir -p "$root/opt/old" "$root/opt/new" "$root/opt/apps"
    cp -a "$here" "$root/opt/packaging"
    cp "$here"/../tests/apps/{restarts,streams}.py "$root/opt/apps"
    for version in old new; do
        case $how in
            deb) cp "$2" "$root/opt/$version/fastsocket.deb" ;;
            rpm) cp "$2"/{fastsocket,fastsocketd,libfsocket.so} "$root/opt/$version" ;;
        esac
        shift
    done
    # (An .rpm has pages; here they are not looked at.)
    mkdir "$root/opt/pages"
    touch "$root"/opt/pages/{fastsocket.1,fastsocketd.8,fastsocket.bash,_fastsocket,fastsocket.fish}
    # Maintainer scripts start services there.
    rm -f "$root/usr/sbin/policy-rc.d"
else
    check=/usr/local/bin/check-systemd
    DESTDIR=$root PREFIX=/usr "$here/install.sh" install
    install -m 755 "$here/check-systemd.sh" "$root/usr/local/bin/check-systemd"
    cp "$here/install.sh" "$root/usr/local/bin/install-fastsocket"
fi
units=$root/etc/systemd/system
# What a machine has and a container must not touch.
for unit in systemd-udevd.service systemd-sysctl.service systemd-modules-load.service systemd-binfmt.service \
    systemd-random-seed.service systemd-udevd-kernel.socket systemd-udevd-control.socket; do
    ln -sf /dev/null "$units/$unit"
done
cat >"$units/check.service" <<UNIT
[Unit]
Description=check of Fastsocket
After=basic.target
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
ExecStart=$check
StandardOutput=file:/var/log/check
StandardError=inherit
TimeoutStartSec=400
UNIT
# Two clients, each another user than its server.
cat >"$units/load.service" <<'UNIT'
[Service]
Type=oneshot
User=nobody
ExecStart=/usr/bin/redis-benchmark -n 2000 -c 20 -q -t get,set
UNIT
cat >"$units/page.service" <<'UNIT'
[Service]
Type=oneshot
User=daemon
ExecStart=/usr/bin/curl -sf -o /dev/null http://127.0.0.1/ http://127.0.0.1/
UNIT
cat >"$units/sql.service" <<'UNIT'
[Service]
Type=oneshot
User=postgres
ExecStart=/usr/bin/psql -h /var/run/postgresql -At -v ON_ERROR_STOP=1 -f /tmp/sql -o /tmp/answers postgres
UNIT

log=$(timeout -k 5 460 systemd-nspawn --quiet --register=no --keep-unit -D "$root" --private-network \
    --capability=CAP_BPF,CAP_PERFMON,CAP_NET_ADMIN --system-call-filter="bpf perf_event_open" \
    /usr/lib/systemd/systemd --unit=check.service --log-target=console 2>&1 </dev/null) || true
[ -z "${KEEP:-}" ] || echo "$log"
cat "$root/var/log/check" 2>/dev/null || { echo "$log" | tail -40; echo "systemd: FAILED: it did not boot" >&2; exit 1; }
grep -qx "check: ok" "$root/var/log/check" || { echo "systemd: FAILED" >&2; exit 1; }
# What it did to files other than those of the units.
left=$(cd "$work/upper" && find etc/fastsocket etc/systemd/system/*.d run/fastsocket usr/bin/fastsocket usr/sbin/fastsocketd \
    usr/lib/fastsocket 2>/dev/null | xargs -r -I{} sh -c 'test -c "{}" || echo "{}"') || true
[ -z "$left" ] || { echo "systemd: FAILED: left: $left" >&2; exit 1; }
[ -z "$how" ] || { echo "systemd: ok: upgrades by the scripts of the .$how leave programs on shared memory, and nothing is left"; exit 0; }
echo "systemd: ok: enabled units share memory, and nothing is left"
