#!/usr/bin/env bash
# release.sh TAG: builds the packages of a signed tag in a clone, signs them, and checks the signatures. KEY= names the
# key of gpg (else git's user.signingkey). The files are then in target/release-TAG. packaging/RELEASE.md has the steps
# before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'release: %s\n' "$*"; }
die() { say "FAILED: $*" >&2; exit 1; }

tag=${1:?usage: KEY=… packaging/release.sh TAG}
version=${tag#v}
key=${KEY:-$(git config user.signingkey || true)}
[ -n "$key" ] || die "no key: set KEY or git's user.signingkey"
gpg --list-secret-keys "$key" >/dev/null 2>&1 || die "gpg has no secret key $key"
git verify-tag "$tag" 2>/dev/null || die "$tag is not a tag with a good signature"

# A clone has nothing but what is committed. Tools that are here already need not be built again.
PATH="$PWD/target/tools/bin:$PATH"
top=$PWD/target/release-$tag
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git -c advice.detachedHead=false clone --quiet --branch "$tag" . "$source"
cd "$source"
grep -qx "version = \"$version\"" Cargo.toml || die "Cargo.toml does not have version $version"
grep -q "^## \[$version\]" CHANGELOG.md || die "CHANGELOG.md has no section [$version]"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
make packages

rm -rf "$top"
mkdir -p "$top"
shopt -s nullglob
packages=(target/debian/*.deb target/debian/*.ddeb target/rpm/*.rpm)
[ ${#packages[@]} -gt 0 ] || die "make packages has left no package"
cp "${packages[@]}" "$top"
git archive --prefix="fastsocket-$version/" -o "$top/fastsocket-$version.tar.gz" "$tag"
cd "$top"
for package in *.rpm; do
    rpmsign --define "_gpg_name $key" --addsign "$package" >/dev/null
done
sha256sum -- * >SHA256SUMS
gpg --batch --yes --local-user "$key" --armor --detach-sign SHA256SUMS

gpg --verify SHA256SUMS.asc SHA256SUMS 2>/dev/null || die "the signature of SHA256SUMS"
sha256sum --quiet --check SHA256SUMS
for package in *.rpm; do
    rpm --query --package --queryformat '%{RSAHEADER:pgpsig}%{DSAHEADER:pgpsig}' "$package" 2>/dev/null | grep -q 'Key ID' ||
        die "$package is not signed"
done
say "ok: $(ls | wc -l) files in $top"
