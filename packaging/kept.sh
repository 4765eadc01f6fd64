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

named_by_runtimes() { # STATE: one line a configuration file of a runtime that names a wrapper
    for file in /etc/containerd/*.toml /etc/containerd/*/*.toml /etc/docker/daemon.json \
        /etc/crio/crio.conf /etc/crio/crio.conf.d/* \
        /var/lib/rancher/*/agent/etc/containerd/* /etc/k0s/containerd.toml /etc/k0s/containerd.d/* \
        /var/snap/microk8s/current/args/containerd*.toml; do
        if grep -qsF "$1/bin/" "$file"; then echo "$file"; fi
    done
}

used_by_containers() { # STATE: one line a thing that runs, or will run, a wrapper (see host/gate_users.py)
    # A monitor, such as conmon, has the runtime's path among its arguments. Those of others say nothing.
    for process in /proc/[0-9]*; do
        if grep -qsF "$1/bin/" "$process/cmdline" &&
            grep -qs '^Uid:[[:blank:]]0[[:blank:]]' "$process/status"; then
            echo "process ${process#/proc/}"
        fi
    done
    # A shim of containerd has it beside the container's bundle. Its state folder is a usual one, or is seen in
    # the mounts of what runs, or as the folder of its first container in which a shim works.
    tasks=io.containerd.runtime.v2.task
    {
        for state in /run/containerd /run/docker/containerd/daemon /run/k3s/containerd /run/k0s/containerd \
            /var/snap/microk8s/common/run/containerd; do
            ls -d "$state/$tasks"/*/* 2>/dev/null || true # not there
        done
        sed -n "s|^[^ ]* \\([^ ]*/$tasks/[^/ ]*/[^/ ]*\\)/.*|\\1|p" /proc/self/mounts
        readlink /proc/[0-9]*/cwd 2>/dev/null | grep "/$tasks/[^/]*/[^/]*\$" || true # nobody works there
    } | sort -u | while read -r bundle; do
        # Anybody may work in a folder that looks like a shim's; root's are ours.
        if [ -O "$(dirname "$(dirname "$bundle")")" ] &&
            grep -qsF "$1/bin/" "$bundle/options.json" "$bundle/runtime"; then
            echo "container ${bundle##*/}"
        fi
    done
}

why_kept() { # STATE: one line a reason to keep wrappers and manifests; nothing if all may go
    installed_into "$1" | sed 's/^/installed into /'
    for manifest in "$1"/unit/*.json; do
        if [ -e "$manifest" ]; then echo "a unit that \`cdi-courier install --systemd\` has written"; fi
    done
    [ -n "$(ls -A "$1/bin" 2>/dev/null)" ] || return 0
    named_by_runtimes "$1" | sed 's/^/named in /'
    used_by_containers "$1" | sed 's/^/used by /'
}

remove_unless_kept() { # STATE: also says why, if it is kept
    reasons=$(why_kept "$1")
    if [ -z "$reasons" ]; then
        rm -rf "$1" /run/cdi-courier
        return 0
    fi
    echo "cdi-courier: $1/bin and $1/changes are kept, because they are still needed:"
    echo "$reasons" | sed 's/^/  /'
    echo "cdi-courier: Containers that ask for devices are refused until it is installed again. To take back what"
    echo "cdi-courier: was installed: install the packages again, run \`cdi-courier uninstall --apply\`, remove them."
}

remove_generated() { # what the refresh service has written, unless somebody else writes it now
    spec=/run/cdi/management.nvidia.com-gpu.yaml
    if head -n 1 "$spec" 2>/dev/null | grep -q '^# Made by cdi-courier generate nvidia'; then
        rm -f "$spec"
        rmdir --ignore-fail-on-non-empty /run/cdi
    fi
}
