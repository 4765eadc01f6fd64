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

#@baked@

# Why the patterns cannot be relied on, by the status 0: they are not there, not those of our settings, or older.
stale() {
    { IFS= read -r first <"$patterns"; } 2>/dev/null || return 0
    [ "$first" = "$header" ] || return 0
    for file in @watched@; do
        [ "$file" -nt "$patterns" ] && return 0
    done
    return 1
}

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

# Does a file have one of these texts? 0 yes, 1 no, more: it cannot be told.
has() {
    LC_ALL=C GREP_OPTIONS='' "$grep" -qF "$@" 2>/dev/null
}

# --- what is called ---

IFS=' 	
'
verb='' want='' dashes='' lost='' log='' format='' bundle='' id='' noted='' unsure='' ended='' way=pass
for word do
    case $want in
    '') ;;
    log) log=$word want=''; continue ;;
    format) format=$word want=''; continue ;;
    bundle) bundle=$word want=''; continue ;;
    value) want=''; continue ;;
    esac
    if [ -z "$verb" ]; then
        if [ -n "$lost" ]; then
            # After an option that is not known anything may be the verb, and a create must not be missed.
            case $word in create | run | exec | delete) verb=$word ;; esac
        elif [ -n "$dashes" ]; then
            verb=$word
        else
            case $word in
            --) dashes=yes ;;
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
            *) verb=$word ;;
            esac
        fi
        case $verb in
        '') [ -n "$dashes" ] && [ "$word" != -- ] && break ;;
        create | run | exec | delete)
            # A rootless user's records are in a folder of their own.
            { read -r inside outside length </proc/self/uid_map; } 2>/dev/null || length=4294967295
            [ "$length" = 4294967295 ] || [ ! -O "/run/user/$outside" ] ||
                records=/run/user/$outside/cdi-courier/exec
            ;;
        *) break ;;
        esac
        continue
    fi
    case $verb in
    create | run)
        if [ -n "$ended" ]; then
            id=$word
            continue
        fi
        case $word in
        --) ended=yes ;;
        --bundle | -b) want=bundle ;;
        --bundle=*) bundle=${word#*=} ;;
        --console-socket | --pidfd-socket | --pid-file | --preserve-fds) want=value ;;
        --console-socket=* | --pidfd-socket=* | --pid-file=* | --preserve-fds=*) ;;
        --no-pivot | --no-new-keyring | --no-subreaper | --detach | -d | --keep) ;;
        # What runtimes read differently, or may one day, is Python's; without it the likeliest has to do.
        -b=*) bundle=${word#*=} unsure=yes ;;
        -b?*) bundle=${word#-b} unsure=yes ;;
        -?*) unsure=yes ;;
        *) id=$word ;;
        esac
        ;;
    *)
        # Only an id has a record, so it need not be told from other words.
        case $word in
        '' | . | .. | */*) ;;
        *) if [ -e "$records/$word" ]; then noted=$word; break; fi ;;
        esac
        ;;
    esac
done

# --- what to do about it ---

present=yes
case $verb in
create | run | exec)
    for file in "$python" @needed@; do
        [ -f "$file" ] || present=''
    done
    ;;
esac

case $verb in
create | run)
    config=${bundle:-.}/config.json
    case $id in '' | . | .. | */*) ;; *) [ -e "$records/$id" ] && noted=$id ;; esac
    if [ -z "$present" ]; then
        # Nobody is left who could give devices. Both what was looked for at installation and what is now.
        [ -n "$asked" ] && has -e "$asked" -- "$config" && way=missing
        [ -r "$patterns" ] && has -f "$patterns" -- "$config" && way=missing
    elif [ -n "$unsure" ]; then
        way=unsure
    elif [ -n "$noted" ]; then
        way=noted
    elif stale; then
        way=stale
    else
        has -f "$patterns" -- "$config"
        case $? in 1) ;; *) way=asks ;; esac
    fi
    if [ "$way" = asks ] || [ "$way" = missing ]; then
        [ -n "$sandbox" ] && has -e "$sandbox" -- "$config" && way=pass
    fi
    ;;
exec) [ -n "$present" ] && [ -n "$noted" ] && way=noted ;;
delete) [ -n "$noted" ] && way=delete ;;
esac

# The real runtime takes this process over: a gate that finds its own number here was called by itself.
case ${CDI_COURIER_GATE_PID-} in "$$" | "child of $PPID") refuse "$recursion" "$recursion_json" ;; esac

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
