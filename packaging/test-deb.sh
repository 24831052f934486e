#!/usr/bin/env bash
# test-deb.sh ROOT PACKAGE: installs the package in a clean root file system, uses it, purges it, and compares.
set -euo pipefail
root=$1
package=$2

inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" "$@"; }
# Without what dpkg itself writes down.
state() { (cd "$root" && find . -xdev -not -path './var/lib/dpkg*' -not -path './var/log/*' -not -path './proc/*' | sort); }

cp "$package" "$root/tmp/fastsocket.deb"
mkdir -p "$root/etc/systemd/system"
state >"$root.before"
inside dpkg -i /tmp/fastsocket.deb
mount -t proc proc "$root/proc"
trap 'umount -l "$root/proc" 2>/dev/null || true; rm -f "$root.before"' EXIT
inside fastsocket --version
inside fastsocketd --check
inside fastsocket bench --list | grep -q rtt-8
# (Without rdma-core.)
inside fastsocket-agent --version
[ ! -e "$root/etc/systemd/system/multi-user.target.wants/fastsocket-agent.service" ] || { echo "packages: FAILED: the agent is on" >&2; exit 1; }
inside fastsocket run --require -v -- /bin/echo ran | grep -x ran
[ -L "$root/etc/systemd/system/multi-user.target.wants/fastsocketd.service" ] || echo "note: the unit is not enabled (no systemctl)"
printf '[Service]\nExecStart=/bin/true\n' >"$root/etc/systemd/system/a.service"
cp "$root/etc/systemd/system/a.service" "$root/etc/systemd/system/b.service"
inside fastsocket enable a b
inside fastsocketd --check
[ -e "$root/etc/systemd/system/a.service.d/fastsocket.conf" ] && [ -e "$root/etc/fastsocket/fastsocketd.d/enabled-units.toml" ]
# The private monitor that `run` has started ends by itself.
for _ in $(seq 100); do
    fuser -s "$root/usr/sbin/fastsocketd" 2>/dev/null || break
    sleep 0.1
done
inside dpkg --purge fastsocket
rm "$root/etc/systemd/system/a.service" "$root/etc/systemd/system/b.service"
umount "$root/proc"
state | diff "$root.before" - || { echo "packages: FAILED: purge leaves something" >&2; exit 1; }
echo "packages: ok: installed, used and purged in a clean root"
