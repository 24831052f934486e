#!/bin/bash
# report: programs in a chroot without the library complain on standard error: "cannot be preloaded"
# kind: processes of bystanders
# stock: chroot: \[hi\]
# path: any
root=$(mktemp -d)
mkdir -p "$root"/bin "$root"/lib64 "$root"/lib/x86_64-linux-gnu
cp /bin/cat /bin/true "$root/bin"
cp /lib/x86_64-linux-gnu/libc.so.6 "$root/lib/x86_64-linux-gnu/"
cp /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
echo hi >"$root/f"
echo "chroot: [$(chroot "$root" /bin/cat /f 2>&1)]"
echo "in Python: [$(python3 -c 'import os, sys; os.chroot(sys.argv[1]); os.execv("/bin/cat", ["cat", "/f"])' "$root" 2>&1)]"
echo "setpriv: [$(setpriv --reuid 65534 --clear-groups /bin/echo ok 2>&1)]"
echo "env -i: [$(env -i /bin/echo ok 2>&1)]"
cp /bin/cat "$root/set-uid"
chmod 755 "$root" && chmod u+s "$root/set-uid"
echo "set-uid: [$(setpriv --reuid 65534 --clear-groups "$root/set-uid" "$root/f" 2>&1)]"
