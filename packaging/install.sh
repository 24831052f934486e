#!/bin/sh
# install.sh install|uninstall: what `make` and `make pages` left, and of `make benchmark` and `make agent` what is there, below
# $DESTDIR$PREFIX. (The agent that `make` builds has no RDMA: it is for tests.) `uninstall` also removes what the monitor
# left in /run and /sys/fs/bpf, unless there is a DESTDIR; the configuration stays.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
prefix=${PREFIX:-/usr/local}
root=${DESTDIR:-}$prefix
etc=${DESTDIR:-}/etc/fastsocket
built=${ARTIFACTS:-$here/target/release}
pages=${PAGES:-$here/target/pages}
agent=${AGENT:-$here/target/agent/fastsocket-agent}
unit=$root/lib/systemd/system/fastsocketd.service
agent_unit=$root/lib/systemd/system/fastsocket-agent.service

put() { # MODE FILE DIRECTORY [NAME]
    mkdir -p "$3"
    # A new file in its place: programs that run have the old one.
    install -m "$1" "$2" "$3/.fastsocket-new"
    mv -f "$3/.fastsocket-new" "$3/${4:-$(basename "$2")}"
}

do_install() {
    for file in "$built/fastsocket" "$built/fastsocketd" "$built/libfsocket.so" "$pages/fastsocketd.8"; do
        [ -e "$file" ] || { echo "install: $file is not there: run 'make' and 'make pages' first" >&2; exit 1; }
    done
    put 755 "$built/fastsocket" "$root/bin"
    put 755 "$built/fastsocketd" "$root/sbin"
    put 644 "$built/libfsocket.so" "$root/lib/fastsocket"
    [ ! -e "$built/fastsocket-bench" ] || put 755 "$built/fastsocket-bench" "$root/lib/fastsocket"
    if [ -z "${NO_STRIP:-}" ]; then
        for file in bin/fastsocket sbin/fastsocketd lib/fastsocket/libfsocket.so lib/fastsocket/fastsocket-bench; do
            [ -e "$root/$file" ] || continue
            strip --strip-unneeded -o "$root/$file.new" "$root/$file"
            chmod --reference="$root/$file" "$root/$file.new"
            mv -f "$root/$file.new" "$root/$file"
        done
    fi
    for page in "$pages"/*.1; do put 644 "$page" "$root/share/man/man1"; done
    put 644 "$pages/fastsocketd.8" "$root/share/man/man8"
    put 644 "$here/packaging/fastsocketd.toml.5" "$root/share/man/man5"
    put 644 "$pages/fastsocket.bash" "$root/share/bash-completion/completions" fastsocket
    put 644 "$pages/_fastsocket" "$root/share/zsh/site-functions"
    put 644 "$pages/fastsocket.fish" "$root/share/fish/vendor_completions.d"
    put 644 "$here/packaging/fastsocketd.service" "$(dirname "$unit")"
    put 644 "$here/packaging/fastsocketd.socket" "$(dirname "$unit")"
    if [ -e "$agent" ]; then
        put 755 "$agent" "$root/sbin"
        put 644 "$here/packaging/fastsocket-agent.service" "$(dirname "$unit")"
    fi
    for file in "$unit" "$agent_unit"; do
        [ ! -e "$file" ] || sed -i "s,/usr/\(sbin\|lib/fastsocket\)/,$prefix/\1/," "$file"
    done
    [ -e "$etc/fastsocketd.toml" ] || put 644 "$here/packaging/fastsocketd.toml" "$etc"
}

do_uninstall() {
    if [ -z "${DESTDIR:-}" ] && [ -d /run/systemd/system ]; then
        for name in fastsocket-agent.service fastsocketd.socket fastsocketd.service; do
            systemctl disable --now $name 2>/dev/null || true
        done
    fi
    [ -n "${DESTDIR:-}" ] || "$root/sbin/fastsocketd" --end-retired >/dev/null 2>&1 || true
    # They would name a library that is gone.
    [ ! -x "$root/bin/fastsocket" ] || "$root/bin/fastsocket" disable --all --root "${DESTDIR:-/}" || true
    rm -f "$root/bin/fastsocket" "$root/sbin/fastsocketd" "$root/lib/fastsocket/libfsocket.so" "$root/lib/fastsocket/fastsocket-bench" "$unit" "${unit%.service}.socket" \
        "$root/sbin/fastsocket-agent" "$agent_unit" \
        "$root/share/man/man1/fastsocket.1" "$root"/share/man/man1/fastsocket-*.1 \
        "$root/share/man/man8/fastsocketd.8" "$root/share/man/man5/fastsocketd.toml.5" "$root/share/bash-completion/completions/fastsocket" \
        "$root/share/zsh/site-functions/_fastsocket" "$root/share/fish/vendor_completions.d/fastsocket.fish"
    rmdir "$root/lib/fastsocket" 2>/dev/null || true
    # A configuration that nobody has changed was ours.
    if cmp -s "$here/packaging/fastsocketd.toml" "$etc/fastsocketd.toml"; then
        rm -f "$etc/fastsocketd.toml"
    fi
    rmdir "$etc" 2>/dev/null || true
    [ -n "${DESTDIR:-}" ] || rm -rf /run/fastsocket /run/fastsocket-private /sys/fs/bpf/fastsocket
}

case ${1:-} in
    install) do_install ;;
    uninstall) do_uninstall ;;
    *) echo "usage: install.sh install|uninstall" >&2; exit 2 ;;
esac
