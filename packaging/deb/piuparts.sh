#!/bin/sh
# Install, upgrade, remove and purge the Debian packages in a bare Debian, and look for what is left: piuparts.
#
# usage: piuparts.sh FOLDER
# FOLDER holds the packages. The Debian is the machine's own suite, from its own archive. Needs root.
set -eu

folder=$(realpath "$1")
if ! command -v piuparts >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends piuparts >/dev/null
fi
# shellcheck source=/dev/null
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
mirror=$(apt-get indextargets --format '$(REPO_URI)' "Created-By: Packages" "Codename: $suite" | head -n 1)
if [ -z "$mirror" ]; then
    echo "piuparts.sh: apt knows no archive of $suite: run apt-get update, or see /etc/apt/sources.list.d" >&2
    exit 1
fi
exec piuparts --distribution="$suite" --mirror="$mirror main" --scriptsdir=/etc/piuparts/scripts \
    --no-eatmydata "$folder"/*.deb
