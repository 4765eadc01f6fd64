#!/bin/sh
# cdi-courier gate: stands where a container runtime looks for its OCI runtime, and becomes the real one.
#
# Made by cdi-courier, which also says when it can go (`cdi-courier uninstall`). It starts Python only for containers
# whose config may ask for devices and for an exec in those that got some. Everything else reaches the real
# runtime with the same arguments, stdin and process. It needs nothing but what is written below: no PATH, no
# variable of the environment and, on most calls, no other program.
#
# What a pod's author writes only ever reaches grep, as a file's content. Who hides an annotation from it gets
# no device; whatever it finds, Python decides for itself. The tables of options are those of calls.py.

# What most calls need comes first: a shell reads no further than it runs.

@real@
# --- what is called ---

verb='' want='' dashes='' lost='' log='' format='' before=0
for word do
    before=$((before + 1))
    case $want in
    '') ;;
    log) log=$word want=''; continue ;;
    format) format=$word want=''; continue ;;
    *) want=''; continue ;;
    esac
    if [ -n "$lost" ]; then
        # After an option that is not known anything may be the verb, and a create must not be missed.
        case $word in create | run | exec | delete) verb=$word; break ;; esac
        continue
    fi
    case $dashes$word in
    --) dashes=after- ;;
    --log | -log) want=log ;;
    --log=* | -log=*) log=${word#*=} ;;
    --log-format | -log-format) want=format ;;
    --log-format=* | -log-format=*) format=${word#*=} ;;
    --root | -root | --criu | -criu | --rootless | -rootless) want=value ;;
    --log-level | -log-level | --cgroup-manager | -cgroup-manager) want=value ;;
    --root=* | -root=* | --criu=* | -criu=* | --rootless=* | -rootless=*) ;;
    --log-level=* | -log-level=* | --cgroup-manager=* | -cgroup-manager=*) ;;
    --debug | -debug | --systemd-cgroup | -systemd-cgroup | --help | -help | --version | -version) ;;
    --debug=* | -debug=* | --systemd-cgroup=* | -systemd-cgroup=*) ;;
    --help=* | -help=* | --version=* | -version=* | --usage=* | -usage=*) ;;
    --usage | -usage | -h | --h | -v | --v | -V | --V | '-?' | '--?') ;;
    -h=* | --h=* | -v=* | --v=* | -V=* | --V=* | '-?='* | '--?='*) ;;
    -?*) lost=yes ;;
    *) verb=$word; break ;;
    esac
done

# The real runtime takes this process over: a gate that finds its own number here was called by itself.
case ${CDI_COURIER_GATE_PID-} in "$$" | "child of $PPID") looped=yes ;; *) looped='' ;; esac

case $verb in
create | run | exec | delete) ;;
*)
    if [ -z "$looped" ]; then
        export CDI_COURIER_GATE_PID="$$"
        exec "$real" "$@"
    fi
    ;;
esac

# --- what else there is to know ---

@baked@
# The container is not created, or nothing at all is done. Words: for stderr, and as JSON for the runtime's log.
refuse() {
    printf '%s\n' "cdi-courier: $1" >&2
    case $log in
    '' | /dev/* | journald:* | syslog:*) exit 1 ;;
    file:*) log=${log#file:} ;;
    esac
    if [ "$format" = json ]; then
        { printf '{"level":"error","msg":%s}\n' "$2" >>"$log"; } 2>/dev/null
    else
        { printf 'level=error msg=%s\n' "$2" >>"$log"; } 2>/dev/null
    fi
    exit 1
}

[ -z "$looped" ] || refuse "$recursion" "$recursion_json"

# Does a file have one of these texts? 0 yes, 1 no, more: it cannot be told.
has() {
    LC_ALL=C GREP_OPTIONS='' "$grep" -qF "$@" 2>/dev/null
}

# Does the container ask, as far as can be told from what was looked for at installation and what is now?
asks() {
    if [ -n "$asked" ] && has -e "$asked" -- "$config"; then return 0; fi
    [ -r "$patterns" ] && has -f "$patterns" -- "$config"
}

# May the patterns be others than what the settings now say? They are not there, not ours, or older.
stale() {
    { IFS= read -r first <"$patterns"; } 2>/dev/null || return 0
    [ "$first" = "$header" ] || return 0
    for file in @watched@; do
        [ "$file" -nt "$patterns" ] && return 0
    done
    return 1
}

# Options of create and run. What runtimes read differently, or may one day, is left to Python; without it the
# likeliest has to do.
read_create() {
    shift "$before"
    while [ $# -gt 0 ]; do
        case $1 in
        --)
            shift
            [ $# = 0 ] || id=$1
            return
            ;;
        --bundle | -b) shift; bundle=${1-} ;;
        --bundle=*) bundle=${1#*=} ;;
        --console-socket | --pidfd-socket | --pid-file | --preserve-fds) shift ;;
        --console-socket=* | --pidfd-socket=* | --pid-file=* | --preserve-fds=*) ;;
        --no-pivot | --no-new-keyring | --no-subreaper | --detach | -d | --keep) ;;
        -b=*) bundle=${1#*=} unsure=yes ;;
        -b?*) bundle=${1#-b} unsure=yes ;;
        -?*) unsure=yes ;;
        *) id=$1 ;;
        esac
        [ $# = 0 ] || shift
    done
}

# Only an id has a record, so it need not be told from other words.
read_id() {
    shift "$before"
    for word do
        case $word in
        '' | . | .. | */*) ;;
        *) [ -e "$records/$word" ] && noted=$word && return ;;
        esac
    done
}

# A rootless user's records are in a folder of their own.
IFS=' '
{ read -r inside outside length </proc/self/uid_map; } 2>/dev/null || length=4294967295
[ "$length" = 4294967295 ] || [ ! -O "/run/user/$outside" ] || records=/run/user/$outside/cdi-courier/exec

bundle='' id='' noted='' unsure='' way=pass present=yes
for file in "$python" @needed@; do
    [ -f "$file" ] || present=''
done

case $verb in
create | run)
    read_create "$@"
    case $id in '' | . | .. | */*) ;; *) [ -e "$records/$id" ] && noted=$id ;; esac
    config=${bundle:-.}/config.json
    if [ -z "$present" ]; then
        # Nobody is left who could give devices.
        asks && way=missing
    elif [ -n "$unsure" ]; then
        way=unsure
    elif [ -n "$noted" ]; then
        way=noted
    elif stale; then
        # Nor who could read the settings, if only the one interpreter went: then who does not ask must not wait.
        if [ -f "$interpreter" ] || asks; then way=stale; fi
    else
        has -f "$patterns" -- "$config"
        case $? in 1) ;; *) way=asks ;; esac
    fi
    if [ "$way" = asks ] || [ "$way" = missing ]; then
        [ -n "$sandbox" ] && has -e "$sandbox" -- "$config" && way=pass
    fi
    ;;
exec)
    read_id "$@"
    [ -n "$present" ] && [ -n "$noted" ] && way=noted
    ;;
delete)
    read_id "$@"
    [ -n "$noted" ] && way=delete
    ;;
esac

case $way in
pass)
    export CDI_COURIER_GATE_PID="$$"
    exec "$real" "$@"
    ;;
missing) refuse "$missing" "$missing_json" ;;
delete)
    # Not before: a container that cannot be deleted keeps its variables.
    CDI_COURIER_GATE_PID="child of $$" "$real" "$@" || exit
    "$rm" -f -- "$records/$noted"
    ;;
*)
    export CDI_COURIER_GATE_PID="$$"
    exec "$python" -I -S -c "$command" "$way" "$@"
    ;;
esac
