#!/bin/sh
# Build the Debian packages of this checkout.
#
# usage: build.sh FOLDER
# DEB_VERSION sets another version than the one in core/pyproject.toml. Build dependencies that are missing are
# installed if we are root; the build itself uses no network.
set -eu

mkdir -p "$1"
results=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
root=$(realpath "$here/../..")
version=${DEB_VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/core/pyproject.toml")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM # for dash, in which a signal alone ends without that
umask 022

tree=$work/cdi-courier-$version
SOURCE_DATE_EPOCH=$(sh "$here/../tree.sh" "$tree")
export SOURCE_DATE_EPOCH
# A user's settings for Python's installers must not reach into a package.
unset PYTHONPATH PIP_CONFIG_FILE DEB_VERSION
# Debian's own interpreter, not a version manager's or a virtual environment's.
PATH=/usr/sbin:/usr/bin:/sbin:/bin

cp -a "$here/debian" "$tree/debian"
cat >"$tree/debian/changelog" <<END
cdi-courier ($version) unstable; urgency=medium

  * See /usr/share/doc/cdi-courier/changelog.gz.

 -- cdi-courier maintainers <maintainers@cdi-courier.io>  $(LC_ALL=C date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")
END

missing() {
    (cd "$tree" && dpkg-checkbuilddeps 2>&1 >/dev/null) || true
}
if ! command -v dpkg-buildpackage >/dev/null || [ -n "$(missing)" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "build.sh: needed to build: dpkg-dev$(missing | sed 's/.*dependencies:/,/')" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends dpkg-dev >/dev/null
    apt-get -qq build-dep -y --no-install-recommends "$tree" >/dev/null
fi

if ! (cd "$tree" && dpkg-buildpackage --build=full --unsigned-source --unsigned-changes) >"$work/log" 2>&1; then
    cat "$work/log" >&2
    exit 1
fi
rm -f "$results"/cdi-courier*_"$version"*
for file in "$work"/*"_$version"*; do
    mv "$file" "$results"
    echo "$results/${file##*/}"
done
