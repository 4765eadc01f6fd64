#!/bin/sh
# Build the rpm packages of this checkout: on Fedora with its own macros, elsewhere with `macros.debian`.
#
# usage: build.sh FOLDER
# Where the build dependencies are Debian's, those that are missing are installed if we are root.
set -eu

mkdir -p "$1"
results=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM # for dash, in which a signal alone ends without that
umask 022
unset PYTHONPATH PIP_CONFIG_FILE
# The distribution's own interpreter, not a version manager's or a virtual environment's.
PATH=/usr/sbin:/usr/bin:/sbin:/bin

version=$(sed -n 's/^Version: *//p' "$here/cdi-courier.spec")
mkdir "$work/SOURCES"
SOURCE_DATE_EPOCH=$(sh "$here/../tree.sh" "$work/cdi-courier-$version")
export SOURCE_DATE_EPOCH
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
    --directory="$work" "cdi-courier-$version" | gzip --no-name >"$work/SOURCES/cdi-courier-$version.tar.gz"

if [ -f /etc/debian_version ]; then
    needed="rpm pybuild-plugin-pyproject python3-hatchling python3-attr python3-click python3-grpcio
        python3-platformdirs python3-pluggy python3-protobuf python3-rich python3-tomlkit python3-yaml"
    # shellcheck disable=SC2086 # one word a package
    if ! dpkg-query --show $needed >/dev/null 2>&1; then
        if [ "$(id -u)" != 0 ]; then
            echo "build.sh: needed to build:" $needed >&2
            exit 1
        fi
        export DEBIAN_FRONTEND=noninteractive
        apt-get -qq update
        apt-get -qq install -y --no-install-recommends $needed >/dev/null
    fi
    set -- --nodeps --load="$here/macros.debian"
else
    set --
fi

if ! rpmbuild -ba "$@" --define "_topdir $work" --define "_tmppath $work" --define "_buildhost localhost" \
    --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
    "$work/cdi-courier-$version/packaging/rpm/cdi-courier.spec" >"$work/log" 2>&1; then
    cat "$work/log" >&2
    exit 1
fi
for file in "$work"/RPMS/noarch/*.rpm "$work"/SRPMS/*.rpm; do
    mv -f "$file" "$results"
    echo "$results/${file##*/}"
done
