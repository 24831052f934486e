#!/usr/bin/env bash
# Runs a command on a machine that does not exist: Debian's kernel under QEMU,
# with as many CPUs as wanted and this machine's root file system read-only
# beneath an overlay. Shows that things are right on many cores, never how fast
# they are: the CPUs are emulated, one after the other.
set -euo pipefail

usage() {
    cat >&2 <<'TEXT'
usage: tools/guest.sh [-c CPUS] [-m MEMORY] [-t SECONDS] [-M "MODULE ..."] [-a "KERNEL ARGS"] [-x "QEMU ARGS"] -- COMMAND...

The command runs in this directory, as root, in an empty network with `lo` up; what
it writes outside /run/out is lost. Exit status: the command's; 98 if the guest died
before it ended, 99 if QEMU failed or took longer than SECONDS (default 300).

FASTSOCKET_GUEST_KERNEL: directory of an unpacked linux-image package
(default ~/.cache/fastsocket/guest-kernel; filled on first use, 70 MB from Debian).
TEXT
    exit 2
}

cpus=2 memory=2G limit=300 modules='' append='' extra=()
while getopts c:m:t:M:a:x: option; do
    case $option in
        c) cpus=$OPTARG ;;
        m) memory=$OPTARG ;;
        t) limit=$OPTARG ;;
        M) modules=$OPTARG ;;
        a) append=$OPTARG ;;
        x) read -ra extra <<<"$OPTARG" ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
if [ "${1:-}" = -- ]; then shift; fi
if [ $# -eq 0 ]; then usage; fi

PATH="$PATH:/usr/sbin:/sbin"
for program in qemu-system-x86_64 busybox cpio modprobe depmod xz; do
    command -v "$program" >/dev/null || { echo "guest: $program is not installed (scripts/deps.sh manycore)" >&2; exit 99; }
done

tree=${FASTSOCKET_GUEST_KERNEL:-${XDG_CACHE_HOME:-$HOME/.cache}/fastsocket/guest-kernel}
# Not the cloud kernel: it lacks 9p. Unpacked, not installed.
if [ ! -e "$tree/.complete" ]; then
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ { print $2; exit }')
    echo "guest: fetching $package, once" >&2
    mkdir -p "$(dirname "$tree")"
    fresh=$(mktemp -d "$tree.XXXXXX")
    (
        cd "$fresh"
        apt-get -q -o APT::Sandbox::User=root download "$package" >&2
        dpkg-deb -x ./*.deb .
        rm -f ./*.deb
        depmod -b . "$(ls lib/modules)"
        touch .complete
    ) || { rm -rf "$fresh"; echo "guest: no kernel" >&2; exit 99; }
    chmod 755 "$fresh"
    # Somebody else may have been faster.
    mv -T "$fresh" "$tree" 2>/dev/null || rm -rf "$fresh"
fi
version=$(ls "$tree/lib/modules")

work=$(mktemp -d /tmp/fastsocket-guest.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/initrd/{bin,proc,sys,dev,modules,ro,rw,new} "$work/out"
cp "$(command -v busybox)" "$work/initrd/bin/busybox"

# What the root file system needs, and what was asked for, in loading order.
for module in virtio_pci 9pnet_virtio 9p overlay $modules; do
    modprobe -d "$tree" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
done | awk '!seen[$0]++' | while read -r file; do
    name=$(basename "${file%.xz}")
    case $file in
        *.xz) xz -dc "$file" >"$work/initrd/modules/$name" ;;
        *) cp "$file" "$work/initrd/modules/$name" ;;
    esac
    echo "$name"
done >"$work/list"
mv "$work/list" "$work/initrd/modules/list"

sed -e "s|@TREE@|$tree|g" -e "s|@VERSION@|$version|g" >"$work/initrd/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sysfs /sys; $b mount -t devtmpfs dev /dev
while read -r module; do $b insmod /modules/$module || echo "guest: insmod $module failed"; done </modules/list
$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose root /ro || $b poweroff -f
$b mount -t tmpfs rw /rw; $b mkdir /rw/upper /rw/work
$b mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work root /new
for d in proc sys dev; do $b mount --move /$d /new/$d; done
$b mount -t tmpfs run /new/run; $b mkdir -p /new/dev/pts /new/dev/shm /new/run/out
$b mount -t devpts pts /new/dev/pts; $b mount -t tmpfs shm /new/dev/shm
$b mount -t bpf bpf /new/sys/fs/bpf; $b mount -t cgroup2 cgroup /new/sys/fs/cgroup
$b mount -t debugfs debug /new/sys/kernel/debug; $b mount -t tracefs trace /new/sys/kernel/tracing
$b mount -t 9p -o rw,trans=virtio,version=9p2000.L,msize=262144 out /new/run/out
$b mkdir -p /new/lib/modules; $b ln -sfn @TREE@/lib/modules/@VERSION@ /new/lib/modules/@VERSION@
# Not chroot: in a changed root the kernel makes no user namespaces.
exec $b switch_root /new /bin/bash /run/out/init
INIT
chmod +x "$work/initrd/init"
(cd "$work/initrd" && find . | cpio -o -H newc --quiet) >"$work/initrd.cpio"

# A clock that counts instructions (icount): while the kernel boots its tick is periodic, and QEMU then gives all
# instructions between two ticks to the first CPU, which waits for the second one for ever. Later the tick is one-shot.
case ${extra[*]} in *icount*) append="maxcpus=1 $append" ;; esac

{
    echo "export PATH=$(printf %q "$PATH") HOME=$(printf %q "$HOME") LC_ALL=C"
    # The environment that our own tests read, and cargo's, which names files.
    env | grep -E '^(FASTSOCKET_|CARGO_|RUST_)[A-Z_]*=' | while IFS='=' read -r name value; do
        echo "export $name=$(printf %q "$value")"
    done
    echo 'ip link set lo up'
    echo 'for c in /sys/devices/system/cpu/cpu*/online; do [ "$(cat $c)" = 1 ] || echo 1 >$c; done'
    echo "cd $(printf %q "$PWD") || exit 98"
    printf '%s\n' "$*"
} >"$work/out/command"
cat >"$work/out/init" <<'INIT'
/bin/bash /run/out/command >/dev/ttyS0 2>&1 </dev/null
echo $? >/run/out/status
sync
echo o >/proc/sysrq-trigger
sleep 60
INIT

# One emulating thread: with several, emulated guests die at random.
result=0
timeout "$limit" qemu-system-x86_64 -machine q35 -accel tcg,thread=single,tb-size=512 -cpu max \
    -smp "$cpus" -m "$memory" -nodefaults -nic none -display none -serial stdio -no-reboot "${extra[@]}" \
    -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=root,mount_tag=root \
    -fsdev local,id=out,path="$work/out",security_model=none -device virtio-9p-pci,fsdev=out,mount_tag=out \
    -kernel "$tree/boot/vmlinuz-$version" -initrd "$work/initrd.cpio" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off audit=0 lpj=8000000 tsc=reliable $append" </dev/null || result=$?
if [ "$result" -ne 0 ]; then
    echo "guest: QEMU ended with $result (124: longer than $limit s)" >&2
    exit 99
fi
exit "$(cat "$work/out/status" 2>/dev/null || echo 98)"
