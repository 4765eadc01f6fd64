# What outlives the package. A wrapper that a runtime has noted for a container is run for that container as
# long as it lives, whatever is installed; and what `cdi-courier install` changed can only be put back by its
# manifests. Put into the packages' scripts, so it needs nothing but a POSIX shell and the essential tools, and
# holds no sign that rpm takes for a macro's.

installed_into() { # STATE: one line a runtime into which something is installed
    for manifest in "$1"/changes/*.json; do
        [ -e "$manifest" ] || continue
        basename "$manifest" .json | sed 's/^\(.*\)--\(.*\)$/\2 (by backend \1)/'
    done
}

used_by_containers() { # STATE: one line a thing that runs, or will run, the wrapper
    [ -n "$(ls -A "$1/bin" 2>/dev/null)" ] || return 0
    # A monitor, such as conmon, has the runtime's path among its arguments.
    for process in /proc/[0-9]*; do
        grep -qsF "$1/bin/" "$process/cmdline" && echo "process ${process#/proc/}"
    done
    # A shim of containerd has it beside the container's bundle.
    for bundle in /run/containerd/io.containerd.runtime.v2.task/*/* /run/docker/containerd/daemon/io.containerd.runtime.v2.task/*/*; do
        grep -qsF "$1/bin/" "$bundle/options.json" "$bundle/runtime" && echo "container ${bundle##*/}"
    done
    return 0
}

why_kept() { # STATE: says what is kept and why; nothing if all may go
    runtimes=$(installed_into "$1")
    users=$(used_by_containers "$1")
    [ -n "$runtimes$users" ] || return 0
    echo "cdi-courier: $1/bin and $1/changes are kept, because they are still needed:"
    [ -z "$runtimes" ] || echo "$runtimes" | sed 's/^/  installed into /'
    [ -z "$users" ] || echo "$users" | sed 's/^/  used by /'
    echo "cdi-courier: Containers that ask for devices are refused until it is installed again."
    [ -z "$runtimes" ] || echo "cdi-courier: To undo: install it again, run \`cdi-courier uninstall --apply\`, then remove it."
}

remove_unless_kept() { # STATE: also says so if it is kept
    if [ -n "$(installed_into "$1")$(used_by_containers "$1")" ]; then
        why_kept "$1"
        return 0
    fi
    rm -rf "$1" /run/cdi-courier
}

remove_generated() { # what the refresh service has written, unless somebody else writes it now
    spec=/run/cdi/management.nvidia.com-gpu.yaml
    if head -n 1 "$spec" 2>/dev/null | grep -q '^# Made by cdi-courier generate nvidia'; then
        rm -f "$spec"
        rmdir --ignore-fail-on-non-empty /run/cdi
    fi
}
