#!/usr/bin/env bash
# Installs what a fresh Debian 12 lacks: `deps.sh build` for building,
# `deps.sh test` for building, tests and the demo, `deps.sh manycore` also for
# emulated machines, `deps.sh rdma` also for RDMA in those,
# `deps.sh agent` for building the agent with RDMA,
# `deps.sh suites` also for the published suites, `deps.sh musl` also for tests/musl, `deps.sh paper` also for `make bench-paper`, `deps.sh programs` also for the servers of tests/programs. Does nothing when all is there. Needs root (or sudo) only
# when something is missing. Services that the packages bring are neither
# started nor left running.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/env.sh
. "$here/env.sh"

what=${1:-test}
min_rust=1.88

say() { printf 'deps: %s\n' "$*"; }
die() { printf 'deps: %s\n' "$*" >&2; exit 1; }

# What proves presence (a command or a file) -> the package that brings it.
build_needs=(
    "cc gcc"
    "make make"
    "/usr/include/x86_64-linux-gnu/sys/socket.h|/usr/include/aarch64-linux-gnu/sys/socket.h libc6-dev"
    "pkg-config pkg-config"
    "clang-19 clang-19"
    "/usr/include/libelf.h libelf-dev"
    "/usr/include/zlib.h zlib1g-dev"
)
test_needs=(
    "nginx nginx-light"
    "redis-server redis-server"
    "redis-cli redis-tools"
    "haproxy haproxy"
    "wrk wrk"
    "ab apache2-utils"
    "memcached memcached"
    "/usr/include/liburing.h liburing-dev"
    "lighttpd lighttpd"
    "curl curl"
    "/usr/bin/python3 python3"
    "gpg gnupg"
    "node nodejs"
    "ss iproute2"
    "ethtool ethtool"
    "nft nftables"
    "taskset util-linux"
    "ps procps"
    "valgrind valgrind"
    "musl-gcc musl-tools"
    "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2|/usr/lib/aarch64-linux-gnu/libjemalloc.so.2 libjemalloc2"
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4|/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4 libtcmalloc-minimal4"
    "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2.0|/usr/lib/aarch64-linux-gnu/libmimalloc.so.2.0 libmimalloc2.0"
)

manycore_needs=(
    "qemu-system-x86_64 qemu-system-x86"
    # Not the dynamic one of the same path: an initial root file system has no libraries.
    "/var/lib/dpkg/info/busybox-static.list busybox-static"
    "cpio cpio"
    "modprobe kmod"
    "xz xz-utils"
)

# For RDMA. (bindgen looks for libclang; clang-19 brings it.)
agent_needs=(
    "cmake cmake"
)

# Beyond those for emulated machines, for the tests of crates/rdma.
rdma_needs=(
    "${agent_needs[@]}"
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1|/usr/lib/aarch64-linux-gnu/libibverbs.so.1 libibverbs1"
    "/etc/libibverbs.d/rxe.driver ibverbs-providers"
    "rdma iproute2"
)

# Beyond the above, for tests/suites.
suites_needs=(
    "cmake cmake"
    "dpkg-source dpkg-dev"
    "prove perl"
    "tclsh tcl"
    "/usr/include/event2/event.h libevent-dev"
    "ip iproute2"
    "unshare util-linux"
)

# Beyond the above, for tests/musl.
musl_needs=(
    "dpkg-source dpkg-dev"
    "ip iproute2"
    "unshare util-linux"
)

# Beyond the above, for `make bench-paper`.
paper_needs=(
    "dpkg-source dpkg-dev"
    "g++ g++"
    "/usr/include/grpcpp/grpcpp.h libgrpc++-dev"
    "/usr/include/google/protobuf/port_def.inc libprotobuf-dev"
    "protoc protobuf-compiler"
    "grpc_cpp_plugin protobuf-compiler-grpc"
    "/usr/lib/python3/dist-packages/grpc python3-grpcio"
)

# Beyond the above, for tests/programs.
programs_needs=(
    "apache2 apache2"
    "php-fpm8.2 php8.2-fpm"
    "mariadbd mariadb-server"
    "mariadb mariadb-client"
    "sysbench sysbench"
    "/usr/lib/postgresql/15/bin/postgres postgresql-15"
    "psql postgresql-client-15"
    "memccat libmemcached-tools"
    "/usr/bin/gunicorn gunicorn"
    "/usr/bin/uvicorn uvicorn"
    "/usr/bin/uwsgi uwsgi"
    "/usr/lib/uwsgi/plugins/python3_plugin.so uwsgi-plugin-python3"
    "dbus-daemon dbus"
    "systemd-socket-activate systemd"
    "sshd openssh-server"
    "ssh openssh-client"
    "vsftpd vsftpd"
    "strace strace"
    "lftp lftp"
    "javac openjdk-17-jdk-headless"
    "go golang-go"
    "unshare util-linux"
)

have() {
    local alternative
    for alternative in ${1//|/ }; do
        case $alternative in
            /*) [ -e "$alternative" ] && return 0 ;;
            *) command -v "$alternative" >/dev/null 2>&1 && return 0 ;;
        esac
    done
    return 1
}

collect_missing() {
    missing=()
    local need
    for need in "$@"; do
        have "${need%% *}" || missing+=("${need#* }")
    done
}

check_cargo() {
    if ! command -v cargo >/dev/null 2>&1 || ! command -v rustc >/dev/null 2>&1; then
        die "no cargo found (looked in PATH and ~/.cargo/bin). Rust $min_rust or later is needed;
      Debian 12's own rustc is 1.63, too old. Install a current toolchain
      (https://rustup.rs, or Debian's newer suites) and run this again."
    fi
    local version
    version=$(rustc --version | sed -E 's/^rustc ([0-9]+\.[0-9]+).*/\1/')
    if [ "$(printf '%s\n%s\n' "$min_rust" "$version" | sort -V | head -1)" != "$min_rust" ]; then
        die "rustc $version is too old: Rust $min_rust or later is needed (Debian 12 packages 1.63).
      Install a current toolchain (https://rustup.rs) and put ~/.cargo/bin first in PATH."
    fi
}

install_missing() {
    local sudo=
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null 2>&1 ||
            die "missing: ${missing[*]}. Not root and no sudo; run as root: apt-get install ${missing[*]}"
        sudo=sudo
    fi
    command -v apt-get >/dev/null 2>&1 ||
        die "missing: ${missing[*]}. Not a Debian-like system: install them by hand."

    # Maintainer scripts ask policy-rc.d before they start a service.
    policy=/usr/sbin/policy-rc.d
    made_policy=
    if [ ! -e $policy ]; then
        made_policy=1
        printf '#!/bin/sh\nexit 101\n' | $sudo tee $policy >/dev/null
        $sudo chmod 755 $policy
        # shellcheck disable=SC2064
        trap "$sudo rm -f $policy" EXIT
    fi

    local log
    log=$(mktemp)
    say "installing ${#missing[@]} package(s): ${missing[*]}"
    say "1/2 reading package lists"
    $sudo apt-get update -qq >"$log" 2>&1 || say "apt-get update failed; trying with the lists at hand"
    local package failed=() done=0
    say "2/2 installing"
    if ! DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >>"$log" 2>&1; then
        # One package that cannot be had must not take the others with it.
        for package in "${missing[@]}"; do
            done=$((done + 1))
            say "  $done/${#missing[@]} $package"
            DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "$package" >>"$log" 2>&1 ||
                failed+=("$package")
        done
    fi
    if [ -n "$made_policy" ]; then
        $sudo rm -f $policy
        trap - EXIT
    fi
    if [ ${#failed[@]} -gt 0 ]; then
        say "COULD NOT INSTALL: ${failed[*]} (last lines of apt-get:)"
        tail -5 "$log" | sed 's/^/deps:   /'
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

case $what in
    build) needs=("${build_needs[@]}") ;;
    test) needs=("${build_needs[@]}" "${test_needs[@]}") ;;
    manycore) needs=("${build_needs[@]}" "${test_needs[@]}" "${manycore_needs[@]}") ;;
    rdma) needs=("${build_needs[@]}" "${test_needs[@]}" "${manycore_needs[@]}" "${rdma_needs[@]}") ;;
    agent) needs=("${build_needs[@]}" "${agent_needs[@]}") ;;
    suites) needs=("${build_needs[@]}" "${test_needs[@]}" "${suites_needs[@]}") ;;
    programs) needs=("${build_needs[@]}" "${test_needs[@]}" "${programs_needs[@]}") ;;
    musl) needs=("${build_needs[@]}" "${test_needs[@]}" "${musl_needs[@]}") ;;
    paper) needs=("${build_needs[@]}" "${test_needs[@]}" "${paper_needs[@]}") ;;
    *) die "usage: deps.sh [build|test|manycore|rdma|agent|suites|programs|musl|paper]" ;;
esac

collect_missing "${needs[@]}"
if [ ${#missing[@]} -gt 0 ]; then
    # Tests of a program that is not there are skipped loudly by the tests
    # themselves; only a missing compiler stops us here.
    install_missing || { collect_missing "${build_needs[@]}"; [ ${#missing[@]} -eq 0 ] || exit 1; }
fi
check_cargo
say "all there ($what)"
