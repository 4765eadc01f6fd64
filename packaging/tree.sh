#!/bin/sh
# Copy what packages are built from into a new folder: the product, its documents and the packaging.
#
# usage: tree.sh FOLDER
# All files get the time of the last commit (or SOURCE_DATE_EPOCH), so that packages are reproducible.
# Prints that time.
set -eu

target=$1
cd "$(dirname "$0")/.."
when=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
mkdir -p "$target"
git ls-files -z --cached --others --exclude-standard -- \
    core backends docs packaging tools LICENSE README.md CHANGELOG.md |
    tar --create --null --files-from=- | tar --extract --directory="$target"
# umask and checkout must not show in the result.
find "$target" -type f -perm /111 -exec chmod 0755 {} +
find "$target" -type f ! -perm /111 -exec chmod 0644 {} +
find "$target" -type d -exec chmod 0755 {} +
find "$target" -exec touch --no-dereference --date="@$when" {} +
echo "$when"
