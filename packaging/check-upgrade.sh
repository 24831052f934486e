#!/usr/bin/env bash
# check-upgrade.sh deb|rpm: runs as a unit under the systemd that test-systemd.sh boots. Two builds, with different ABI numbers or
# one (/opt/old, /opt/new), are installed over each other under load, and removed, by dpkg, or with the scripts of the .rpm in
# rpm's order. Programs that run stay on shared memory; no request fails.
set -euo pipefail
trap 'echo "check: FAILED in line $LINENO"; journalctl -q --no-pager -n 40 || true' ERR
how=$1

fail() { echo "check: FAILED: $*"; journalctl -q --no-pager -n 40 || true; exit 1; }
property() { systemctl show -p "$2" --value "$1"; }
eventually() {
    for _ in $(seq 300); do
        if "${@:2}"; then return 0; fi
        sleep 0.2
    done
    fastsocket stat 2>&1 || true
    cat /var/log/load || true
    fail "not within a minute: $1"
}

# rpm runs these with the number of packages that are there afterwards.
script() { sh "/opt/packaging/rpm/$1" "$2"; }
put() { ARTIFACTS=$1 PAGES=/opt/pages AGENT=/none PREFIX=/usr NO_STRIP=1 /opt/packaging/install.sh install; }
install_package() { # old|new 1|2
    case $how in
        deb) dpkg -i "/opt/$1/fastsocket.deb" ;;
        rpm)
            put "/opt/$1"
            script post "$2"
            [ "$2" = 1 ] || { script preun 1; script postun 1; }
            ;;
    esac
}
remove_package() {
    case $how in
        deb) dpkg --remove fastsocket ;;
        rpm)
            script preun 0
            (DESTDIR=/opt/list put /opt/old && cd /opt/list && find . -type f) | sed 's,^\.,,' | xargs rm -f
            script postun 0
            ;;
    esac
}

# The number of connections over shared memory that the load has opened, as one of the two monitors counts them.
opened() {
    fastsocket stat --json | python3 -c '
import json, sys
report, pid = json.load(sys.stdin), int(sys.argv[2])
if sys.argv[1] == "old":
    report = next((o for o in report["others"] if o["retired"]), {"processes": []})
print(next((p["counters"]["connect_shm"] for p in report["processes"] if p["pid"] == pid), 0))
' "$1" "$(property load MainPID)"
}
more() { [ "$(opened "$1")" -gt "$2" ]; }
goes_on() { # old|new WHAT
    [ "$(property load ActiveState)" = active ] || fail "$2: the load has ended: $(cat /var/log/load)"
    eventually "$2: programs over shared memory of the $1 monitor" more "$1" 0
    eventually "$2: more of them" more "$1" "$(opened "$1")"
    echo "check: $2: the load has $(opened "$1") connections over shared memory of the $1 monitor"
}
stays() { fastsocket stat --json | python3 -c 'import json, sys; sys.exit(not any(o["retired"] for o in json.load(sys.stdin)["others"]))'; }
is_alone() { ! stays; }
counter() { fastsocket stat --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["totals"][sys.argv[1]])' "$1"; }
active() {
    [ "$(property fastsocketd ActiveState)" = active ] || fail "$1: the monitor is not active"
    [ "$(property fastsocketd NRestarts)" = 0 ] || fail "$1: the monitor was restarted by its unit"
}
end_load() {
    systemctl stop load
    [ "$(property load Result)" = success ] || fail "the load: $(cat /var/log/load)"
    tail -1 /var/log/load | grep -q "http-new=.* redis-new=" || fail "the load: $(cat /var/log/load)"
    tail -1 /var/log/load
}

ip link set lo up 2>/dev/null || true
head -c 3000 /dev/urandom >/var/www/html/page
echo "keepalive_requests 1000000000;" >/etc/nginx/conf.d/kept.conf
unit() { printf '[Service]\n%s\n' "$2" >"/etc/systemd/system/$1.service"; }
unit load "User=nobody
ExecStart=/usr/bin/python3 /opt/apps/restarts.py 6379 80 /var/www/html/page
StandardOutput=append:/var/log/load
StandardError=append:/var/log/load"
unit later "User=nobody
ExecStart=/usr/bin/redis-server --port 6380 --save '' --dir /tmp"
unit ask "Type=oneshot
User=nobody
ExecStart=/usr/bin/redis-benchmark -p 6380 -n 2000 -c 20 -q -t get,set"
systemctl daemon-reload

install_package old 1
# (As on these distributions: a .deb starts its services, an .rpm does not.)
[ "$how" = deb ] || systemctl start fastsocketd
[ "$(systemctl is-enabled fastsocketd.service)" = enabled ] || fail "the unit is not enabled"
[ "$(systemctl is-enabled fastsocketd.socket)" = disabled ] || fail "the socket is enabled"
active "installed"
units=(redis-server nginx load later ask)
fastsocket enable "${units[@]}"
systemctl restart fastsocketd redis-server nginx
systemctl start load
goes_on new "before"

old=$(property fastsocketd MainPID)
abi=$(readlink /run/fastsocket/monitor.sock)
install_package new 2
# Without another ABI programs go over to the new monitor.
stayed=old
[ "$(readlink /run/fastsocket/monitor.sock)" != "$abi" ] || stayed=new
echo "check: $abi, then $(readlink /run/fastsocket/monitor.sock)"
active "upgraded"
[ "$(property fastsocketd MainPID)" != "$old" ] || fail "the monitor was not restarted"
[ "$(systemctl is-enabled fastsocketd.socket)" = disabled ] || fail "the socket is enabled by an upgrade"
goes_on $stayed "upgraded"
# New programs use the new monitor.
systemctl start later
eventually "redis listens" redis-cli -p 6380 ping
systemctl start ask
[ "$(counter connect_shm)" -ge 40 ] || fail "new programs: $(fastsocket stat)"
systemctl restart fastsocketd
active "restarted"
goes_on $stayed "restarted beside it"
[ -e /etc/systemd/system/nginx.service.d/fastsocket.conf ] || fail "an upgrade disables units"
end_load
systemctl restart redis-server nginx
eventually "the old monitor ends with its last program" is_alone
[ "$(counter hostile_peer)" = 0 ] || fail "$(fastsocket stat)"

# Removed while a monitor stays for programs that run.
systemctl start load
goes_on new "after restarts"
install_package old 2
active "and back"
goes_on $stayed "and back"
remove_package
! pgrep fastsocketd || fail "removed, but a monitor is left"
[ ! -e /etc/systemd/system/nginx.service.d ] || fail "removed, but units are enabled"
# Programs that run still have the library, and go on.
sleep 2
end_load
systemctl stop later
systemctl restart redis-server nginx
eventually "redis listens" redis-cli ping
! grep -q libfsocket "/proc/$(property redis-server MainPID)/maps" || fail "removed, but a program has the library"
[ "$how" = rpm ] || dpkg --purge fastsocket
left=$(ls -d /run/fastsocket* /etc/fastsocket /sys/fs/bpf/fastsocket /usr/lib/fastsocket /usr/sbin/fastsocketd /etc/systemd/system/*fastsocket* \
    /etc/systemd/system/*/*fastsocket* /var/lib/systemd/deb-systemd-helper-enabled/*fastsocket* 2>/dev/null) || true
[ -z "$left" ] || fail "left: $left"
echo "check: ok"
