#!/bin/sh
# Build a virtual environment with the four distributions installed editable, and the development tools.
#
# usage: venv.sh DIR [CONSTRAINTS]
# With CONSTRAINTS (a pip constraints file) the packages come at those versions: tests/floors.
# PYTHON chooses the interpreter; the default is Debian's own, else the newest one on PATH.
set -eu

dir=$1
constraints=${2:-}

new_enough() {
    "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-} /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            # A name on PATH can be a version manager's shim: take what it starts.
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    echo "venv.sh: no Python 3.11 or newer found; install one or set PYTHON" >&2
    exit 1
}

python=$(find_python)
rm -rf "$dir"
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "venv.sh: $python has no ensurepip; installing Debian's python3-venv" >&2
        apt-get -qq update && apt-get -qq install -y python3-venv >/dev/null
    else
        echo "venv.sh: $python has no ensurepip; install python3-venv" >&2
        exit 1
    fi
fi
"$python" -m venv "$dir"
pip() {
    "$dir/bin/python" -m pip --quiet --disable-pip-version-check "$@"
}
pip install --upgrade pip
if [ -n "$constraints" ]; then
    pip install --constraint "$constraints" editables hatchling pytest hypothesis
else
    pip install --group dev
fi
# Build isolation would fetch hatchling once a distribution.
pip install ${constraints:+--constraint "$constraints"} --no-build-isolation \
    --editable 'core[metrics]' --editable backends/nri --editable backends/oci_hook --editable backends/cri_o_drop_in
