#!/bin/sh
# Build sdist and wheel of the four Python distributions, each wheel from its sdist alone.
#
# usage: wheels.sh FOLDER
# PYTHON is an interpreter that has hatchling; it is not fetched.
set -eu

mkdir -p "$1"
results=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM # for dash, in which a signal alone ends without that
umask 022

SOURCE_DATE_EPOCH=$(sh "$here/tree.sh" "$work/tree")
export SOURCE_DATE_EPOCH
mkdir "$work/made"
build() { # FOLDER TARGET
    (cd "$1" && "$python" -m hatchling build --target "$2" --directory "$work/made") >"$work/log" 2>&1 ||
        { cat "$work/log" >&2 && exit 1; }
}
for folder in core backends/nri backends/oci_hook backends/cri_o_drop_in; do
    build "$work/tree/$folder" sdist
done
for sdist in "$work/made"/*.tar.gz; do
    tar --extract --file="$sdist" --directory="$work"
    name=${sdist##*/}
    build "$work/${name%.tar.gz}" wheel
done
for file in "$work/made"/*; do
    mv -f "$file" "$results"
    echo "$results/${file##*/}"
done
