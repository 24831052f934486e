#!/usr/bin/env bash
# test-rpm.sh ROOT PACKAGE: installs the package in a root file system by the rpm of this machine, uses it, upgrades to
# the same, removes it, and compares. (The root is a Debian's: what the package requires is not in its rpm database.)
set -euo pipefail
root=$1
package=$2

inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" "$@"; }
state() { (cd "$root" && find . -xdev -not -path './var/lib/rpm*' -not -path './proc/*' | sort); }

# Each file of the list is in the archive, and what the .deb has is there.
listed=$(rpm -qpl "$package" | sort)
[ "$listed" = "$(rpm2cpio "$package" | cpio -t --quiet | sed 's/^\.//' | sort)" ] ||
    { echo "packages: FAILED: the list of the .rpm and its archive differ" >&2; exit 1; }
for file in /usr/bin/fastsocket /usr/sbin/fastsocketd /usr/lib/fastsocket/libfsocket.so \
    /usr/lib/systemd/system/fastsocketd.service /etc/fastsocket/fastsocketd.toml /usr/share/man/man8/fastsocketd.8; do
    grep -qx "$file" <<<"$listed" || { echo "packages: FAILED: no $file in the .rpm" >&2; exit 1; }
done

rpm --root "$root" --initdb
# (Where rpm is at home these belong to the file system's own package.)
mkdir -p "$root/etc/systemd/system" "$root/usr/share/fish/vendor_completions.d" "$root/usr/share/zsh/site-functions"
state >"$root.before"
trap 'umount -l "$root/proc" 2>/dev/null || true; rm -f "$root.before"' EXIT
rpm --root "$root" --nodeps -i "$package"
mount -t proc proc "$root/proc"
inside fastsocket --version
inside fastsocketd --check
inside fastsocket bench --list | grep -q rtt-8
inside fastsocket run --require -v -- /bin/echo ran | grep -x ran
printf '[Service]\nExecStart=/bin/true\n' >"$root/etc/systemd/system/a.service"
inside fastsocket enable a
[ -e "$root/etc/systemd/system/a.service.d/fastsocket.conf" ]
rpm --root "$root" --nodeps --force -U "$package"
[ -e "$root/etc/systemd/system/a.service.d/fastsocket.conf" ] || { echo "packages: an upgrade disables units" >&2; exit 1; }
for _ in $(seq 100); do
    fuser -s "$root/usr/sbin/fastsocketd" 2>/dev/null || break
    sleep 0.1
done
rpm --root "$root" -e fastsocket
rm "$root/etc/systemd/system/a.service"
umount "$root/proc"
state | diff "$root.before" - || { echo "packages: FAILED: removing the .rpm leaves something" >&2; exit 1; }
echo "packages: ok: .rpm installed, used, upgraded and removed"
