#!/bin/sh
# Copy what packages are built from into a new folder: the product, its documents and the packaging.
#
# usage: tree.sh FOLDER
# What git knows or would take counts, but for files that are not there any more.
# All files get the time of the last commit (or SOURCE_DATE_EPOCH), so that packages are reproducible.
# Prints that time.
set -eu

mkdir -p "$1"
target=$(realpath "$1")
cd "$(dirname "$0")/.."
when=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM # for dash, in which a signal alone ends without that

# By files, not by pipes: of these only the last command's failure would be seen.
set -- core backends docs packaging tools LICENSE README.md CHANGELOG.md
git ls-files -z --cached --others --exclude-standard -- "$@" >"$work/names"
git ls-files -z --deleted -- "$@" >>"$work/names"
sort -z "$work/names" >"$work/sorted"
uniq -zu "$work/sorted" >"$work/there" # what is gone is named twice
tar --create --null --files-from="$work/there" --file="$work/tree.tar"
tar --extract --file="$work/tree.tar" --directory="$target"
# umask and checkout must not show in the result.
find "$target" -type f -perm /111 -exec chmod 0755 {} +
find "$target" -type f ! -perm /111 -exec chmod 0644 {} +
find "$target" -type d -exec chmod 0755 {} +
find "$target" -exec touch --no-dereference --date="@$when" {} +
echo "$when"
