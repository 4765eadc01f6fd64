"""The NRI backend on real containerds: what containers get, and what is said when they get nothing.

By names and by edits alike; what only edits have to be asked is in `test_nri_edits`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from socket import AF_UNIX, socket

import pytest
from support.lab import Lab
from support.scenario import (
    ALL,
    DOMAIN,
    GRANTED_NAMESPACE,
    HOSTS,
    KIND,
    OPEN_FUSE,
    OPEN_KMSG,
    annotated,
    devices_of,
    hook,
    marker,
    on_host,
    refusal,
    run,
    serving,
    shell,
    spec,
)

pytestmark = pytest.mark.runtime

RECONNECTED = 3.0  # seconds from a socket's return until the plugin serves on it

# For what does not depend on the runtime or on what it is sent.
on_one_host = pytest.mark.parametrize("lab", ["2.1-names"], indirect=True)


@pytest.fixture(params=HOSTS)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Every host in turn, clean."""
    yield from on_host(request, request.param)


def line_of(path: Path, text: str) -> int:
    """The number of the line that holds the text."""
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)


# What a container gets


def test_an_annotated_container_gets_its_devices_and_nobody_else_does(lab: Lab) -> None:
    """Nodes, env, mount and hook reach the container that is named, neither its neighbour nor other pods."""
    hello, record = lab.root / "hello", lab.root / "hook-of-all"
    hello.write_text("hello from the host\n")
    record.unlink(missing_ok=True)
    nodes = [
        {"path": "/dev/courier0", "hostPath": "/dev/null", "permissions": "rw"},
        {"path": "/dev/courier1", "hostPath": "/dev/kmsg", "permissions": "rw"},
    ]
    mounts = [{"hostPath": str(hello), "containerPath": "/run/courier/hello", "options": ["ro", "bind"]}]
    lab.write_spec("all.json", spec(all={"deviceNodes": nodes, "mounts": mounts, **hook(record)}))
    courier = serving(lab)
    pod = annotated(lab, container_c1=ALL)
    plain_pod = lab.cri.run_pod("plain", GRANTED_NAMESPACE)

    neighbour, plain = run(lab, pod, "c2"), run(lab, plain_pod)
    ran_too_early = record.exists()
    container = run(lab, pod)

    assert shell(lab, container, "stat -c '%F %t:%T' /dev/courier0 /dev/courier1") == (
        0,
        "character special file 1:3\ncharacter special file 1:b\n",
    )
    assert shell(lab, container, "echo text > /dev/courier0 && exec 3> /dev/courier1") == (0, "")
    rc, text = shell(lab, container, OPEN_FUSE)
    assert rc != 0
    assert "Operation not permitted" in text
    assert devices_of(lab, container) == {"ALL"}
    assert shell(lab, container, "cat /run/courier/hello") == (0, "hello from the host\n")
    assert shell(lab, container, "echo x > /run/courier/hello")[0] != 0
    assert not ran_too_early
    assert record.read_text() == "ran\n"
    assert marker(lab, container) == f"injected:{ALL}"
    courier.wait_for_log(f"injected {GRANTED_NAMESPACE}/asks/c1: {ALL}")
    for other in (neighbour, plain):
        assert shell(lab, other, "ls /dev/courier0 /run/courier")[0] != 0
        assert "Operation not permitted" in shell(lab, other, OPEN_KMSG)[1]
        assert devices_of(lab, other) == set()
        assert marker(lab, other) is None
    assert f"{GRANTED_NAMESPACE}/asks/c2" not in courier.log()
    assert courier.stop() == 0


def test_the_key_that_names_the_container_wins_over_the_pod_s_and_that_over_the_bare_one(lab: Lab) -> None:
    """The most specific key present decides alone, and an empty value asks for nothing."""
    lab.write_spec("all.json", spec(one={}, two={}, three={}))
    serving(lab)
    one, two, three = (f"{KIND}={name}" for name in ("one", "two", "three"))
    every = annotated(lab, "every", container_c1=one, container_c3="", pod=two, bare=three)
    bare = annotated(lab, "bare", bare=three)

    seen = {
        (pod.name, name): devices_of(lab, run(lab, pod, name))
        for pod, name in ((every, "c1"), (every, "c2"), (every, "c3"), (bare, "c1"))
    }

    assert seen == {
        ("every", "c1"): {"ONE"},
        ("every", "c2"): {"TWO"},
        ("every", "c3"): set(),
        ("bare", "c1"): {"THREE"},
    }


def test_two_devices_come_from_two_spec_files(lab: Lab) -> None:
    """A list may name devices of different vendors, and blanks around the names do not matter."""
    other = "example.com/nic"
    lab.write_spec("gpu.json", spec(one={}))
    lab.write_spec("nic.yaml", json.dumps(spec(other, two={})), directory=1)
    serving(lab)

    container = run(lab, annotated(lab, pod=f"{KIND}=one , {other}=two"))

    assert devices_of(lab, container) == {"ONE", "TWO"}
    assert marker(lab, container) == f"injected:{KIND}=one,{other}=two"


def test_two_devices_may_share_what_they_bring(lab: Lab) -> None:
    """A node, a mount and a variable of both are there once, as with a driver's control device."""
    file = lab.root / "shared-file"
    file.write_text("shared\n")
    edits = {
        "env": ["COURIER_SHARED=yes"],
        "deviceNodes": [{"path": "/dev/courier0", "hostPath": "/dev/kmsg", "permissions": "rw"}],
        "mounts": [{"hostPath": str(file), "containerPath": "/run/shared", "options": ["ro", "bind"]}],
    }
    lab.write_spec("all.json", spec(one=edits, two=edits))
    serving(lab)

    container = run(lab, annotated(lab, pod=f"{KIND}=one,{KIND}=two"))

    assert shell(lab, container, "cat /run/shared && exec 3> /dev/courier0") == (0, "shared\n")
    assert devices_of(lab, container) == {"SHARED"}
    assert lab.cri.runtime_spec(container)["process"]["env"].count("COURIER_SHARED=yes") == 1


def test_a_privileged_container_gets_its_device_too(lab: Lab) -> None:
    """It has every device of the host already, one of the same path included, and ours beside them."""
    nodes = [{"path": path, "hostPath": "/dev/fuse"} for path in ("/dev/courier0", "/dev/fuse")]
    lab.write_spec("all.json", spec(all={"deviceNodes": nodes}))
    serving(lab)

    pod = lab.cri.run_pod("asks", GRANTED_NAMESPACE, annotations={f"{DOMAIN}/pod": ALL}, privileged=True)
    container = run(lab, pod, privileged=True)

    assert shell(lab, container, "stat -c %t:%T /dev/courier0 /dev/fuse") == (0, "a:e5\na:e5\n")
    assert devices_of(lab, container) == {"ALL"}


def test_a_device_asked_for_twice_in_one_annotation_is_injected_once(lab: Lab) -> None:
    """Its hook runs once, and the marker names it once."""
    record = lab.root / "hook-of-twice"
    record.unlink(missing_ok=True)
    lab.write_spec("all.json", spec(all=hook(record)))
    serving(lab)

    container = run(lab, annotated(lab, container_c1=f"{ALL},{ALL}"))

    assert record.read_text() == "ran\n"
    assert devices_of(lab, container) == {"ALL"}
    assert marker(lab, container) == f"injected:{ALL}"


def test_a_device_that_the_kubelet_asks_for_too_is_granted(lab: Lab) -> None:
    """One device by device plugin and by annotation is there; by edits its hook runs once, by names twice."""
    record = lab.root / "hook-of-both"
    record.unlink(missing_ok=True)
    node = {"path": "/dev/courier1", "hostPath": "/dev/kmsg", "permissions": "rw"}
    lab.write_spec("all.json", spec(all={"deviceNodes": [node], **hook(record)}))
    serving(lab)

    container = run(lab, annotated(lab, container_c1=ALL), cdi_devices=[ALL])

    assert shell(lab, container, "exec 3> /dev/courier1") == (0, "")
    assert devices_of(lab, container) == {"ALL"}
    assert marker(lab, container) == f"injected:{ALL}"
    # An edit that the container has already is not sent again. Names that the runtime injects anyway are
    # known only where it tells them; elsewhere ours come on top: a known limit.
    once = lab.delivery != "names" or lab.containerd.binaries.version >= (2, 3)
    assert record.read_text() == ("ran\n" if once else "ran\nran\n")


def test_another_domain_is_answered_when_it_is_configured(lab: Lab) -> None:
    """What the domains ask for is concatenated in their order; one that is not configured is nothing."""
    lab.write_spec("all.json", spec(one={}, two={}, three={}))
    serving(lab, {"annotations": {"domains": [DOMAIN, "amd.cdi.k8s.io"]}})
    annotations = {
        "amd.cdi.k8s.io/container.c1": f"{KIND}=one,{KIND}=two",
        f"{DOMAIN}/pod": f"{KIND}=two",
        "other.cdi.k8s.io/pod": f"{KIND}=three",
    }

    container = run(lab, lab.cri.run_pod("both", GRANTED_NAMESPACE, annotations=annotations))

    assert devices_of(lab, container) == {"ONE", "TWO"}
    assert marker(lab, container) == f"injected:{KIND}=two,{KIND}=one"


# What is refused


@pytest.mark.parametrize(
    ("value", "code", "cause"),
    [
        (f"{KIND}=al", "CDI012", f'device "{KIND}=al" is unknown'),
        (f"{ALL},{KIND}/gpu", "ANN001", "not a qualified CDI device name"),
        (f"{ALL},", "ANN002", "is empty"),
    ],
    ids=["unknown", "malformed", "empty"],
)
def test_what_cannot_be_answered_fails_with_code_and_cause(
    lab: Lab, value: str, code: str, cause: str
) -> None:
    """Whoever describes the pod reads what is wrong and what to do, and the next container works."""
    lab.write_spec("all.json", spec(all={}))
    courier = serving(lab)

    text = refusal(lab, annotated(lab, container_c1=value))

    assert f"{code}: " in text
    assert cause in text
    if code == "CDI012":
        assert f"known: {ALL}" in text
    else:
        assert f"{DOMAIN}/container.c1" in text
    courier.wait_for_log(lambda line: f"refused {GRANTED_NAMESPACE}/asks/c1: {code}: " in line)
    assert devices_of(lab, run(lab, annotated(lab, "next", pod=ALL))) == {"ALL"}


def test_a_denied_namespace_fails_with_the_toml_that_would_allow_it(lab: Lab) -> None:
    """The refusal says who asked for what and which rule decided; its TOML, pasted, lets the pod start."""
    lab.write_spec("all.json", spec(all={}))
    courier = serving(lab)
    pod = annotated(lab, namespace="default", container_c1=ALL)

    text = refusal(lab, pod)

    assert 'POL001: container "c1" of pod "default/asks" may not have' in text
    assert f'"{ALL}" (no rule matches, and [policy] default = "deny")' in text
    toml = re.search(r"\[\[policy\.rules\]\]\n(?:\w+ = .+\n)+", text)
    assert toml, text
    courier.wait_for_log("refused default/asks/c1: POL001: ")
    courier.stop()
    allowed = lab.courier(name="allowed")
    allowed.settings.write_text(allowed.settings.read_text() + toml.group())
    allowed.start()
    allowed.wait_for_log("synchronized:")
    assert devices_of(lab, run(lab, pod)) == {"ALL"}


@pytest.mark.parametrize(
    ("key", "namespace", "value", "code"),
    [
        ("on_denied", "default", ALL, "POL001"),
        ("on_unresolvable", GRANTED_NAMESPACE, f"{ALL},{KIND}=al", "CDI012"),
    ],
    ids=["denied", "unresolvable"],
)
def test_with_skip_the_container_starts_without_devices(
    lab: Lab, key: str, namespace: str, value: str, code: str
) -> None:
    """Nothing of the request is injected, and the container and the log say why."""
    lab.write_spec("all.json", spec(all={}))
    courier = serving(lab, {"delivery": {key: "skip"}})

    container = run(lab, annotated(lab, namespace=namespace, container_c1=value))

    assert devices_of(lab, container) == set()
    assert marker(lab, container) == f"skipped:{code}"
    courier.wait_for_log(f"skipped {namespace}/asks/c1: {code}: ")


def test_with_skip_a_malformed_annotation_still_fails(lab: Lab) -> None:
    """Skipping is for what is denied or missing; a typing mistake is never passed over."""
    serving(lab, {"delivery": {"on_denied": "skip", "on_unresolvable": "skip"}})

    assert "ANN002: " in refusal(lab, annotated(lab, container_c1=","))


@pytest.mark.parametrize(
    ("lab", "why"),
    [
        ("2.1-names", "[cdi] dirs are not the default ones"),
        ("1.7-edits", "containerd honours CDI names over NRI only since 2.1.0"),
    ],
    indirect=["lab"],
    ids=["2.1", "1.7"],
)
def test_auto_means_edits_unless_the_runtime_surely_reads_the_same_files(lab: Lab, why: str) -> None:
    """The log says what is sent and why, and the device arrives."""
    lab.write_spec("all.json", spec(all={}))
    lab.delivery = "auto"
    courier = serving(lab)

    container = run(lab, annotated(lab, container_c1=ALL))

    assert f"delivering by edits: {why}" in courier.log()
    assert devices_of(lab, container) == {"ALL"}


# Restarts


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restarted_runtime_is_served_again_within_three_seconds(lab: Lab, how: str) -> None:
    """The plugin finds the new socket, says why the old session ended, and the next pod is injected."""
    lab.write_spec("all.json", spec(all={}))
    courier = serving(lab)
    mark = courier.mark()

    getattr(lab.containerd, how)()
    lab.containerd.start()
    line = courier.wait_for_log("synchronized:", RECONNECTED, since=mark)

    registered = datetime.fromisoformat(line[:23]).timestamp()
    assert registered - lab.nri_socket.stat().st_mtime < RECONNECTED
    courier.wait_for_log(lambda line: "NRI session 1 on " in line and "closed after" in line, since=mark)
    assert devices_of(lab, run(lab, annotated(lab, container_c1=ALL))) == {"ALL"}
    assert courier.running


# Spec files


def test_changes_of_spec_files_reach_the_next_pod(lab: Lab) -> None:
    """A file written in place, renamed within its directory or deleted counts at once, without a restart."""
    serving(lab)
    pod = annotated(
        lab,
        container_first=f"{KIND}=one",
        container_second=f"{KIND}=two",
        container_third=f"{KIND}=two",
        container_fourth=f"{KIND}=two",
    )
    path = lab.cdi_dirs[0] / "all.json"

    path.write_text(json.dumps(spec(one={})))
    first = run(lab, pod, "first")
    path.write_text(json.dumps(spec(two={})))
    second = run(lab, pod, "second")
    hidden = path.rename(path.with_suffix(".off"))
    without = refusal(lab, pod, "third")
    renamed = hidden.rename(path.with_name("other.json"))
    third = run(lab, pod, "third")
    renamed.unlink()
    deleted = refusal(lab, pod, "fourth")

    assert devices_of(lab, first) == {"ONE"}
    assert devices_of(lab, second) == devices_of(lab, third) == {"TWO"}
    for text in (without, deleted):
        assert "CDI014: " in text
        assert f"{KIND}=two" in text


def test_one_bad_spec_file_does_not_hurt_the_others(lab: Lab) -> None:
    """The good file's device is injected; a name that the bad one may define is refused with its reason."""
    lab.write_spec("bad.json", '{"cdiVersion": "0.6.0", "kind": ')
    lab.write_spec("good.json", spec(all={}))
    serving(lab)
    pod = annotated(lab, container_c1=ALL, container_c2=f"{KIND}=lost")

    assert devices_of(lab, run(lab, pod)) == {"ALL"}
    text = refusal(lab, pod, "c2")
    assert "CDI013: " in text
    assert "bad.json" in text


def test_a_directory_that_is_a_file_does_not_hurt_the_other(lab: Lab) -> None:
    """The device of the directory that is one is injected, and a refusal names the one that is not."""
    lab.cdi_dirs[1].rmdir()
    lab.cdi_dirs[1].write_text("not a directory")
    lab.write_spec("good.json", spec(all={}))
    serving(lab)
    pod = annotated(lab, container_c1=ALL, container_c2=f"{KIND}=lost")

    assert devices_of(lab, run(lab, pod)) == {"ALL"}
    text = refusal(lab, pod, "c2")
    assert "CDI013: " in text
    assert str(lab.cdi_dirs[1]) in text
    assert "Not a directory" in text


def test_without_any_directory_the_refusal_says_where_it_looked(lab: Lab) -> None:
    """No CDI at all is told apart from a device that is missing."""
    for directory in lab.cdi_dirs:
        directory.rmdir()
    courier = serving(lab)

    text = refusal(lab, annotated(lab, container_c1=ALL))

    assert "CDI014: " in text
    assert "none of the spec directories exists" in text
    assert all(str(directory) in text for directory in lab.cdi_dirs)
    assert courier.running


# Bad input


@on_one_host
@pytest.mark.parametrize(
    ("table", "key", "value", "code", "words"),
    [
        ("nri", "plugin_index", "7x", "SET004", "two digits"),
        ("cdi", "dirs", "/etc/cdi", "SET004", "an array of strings"),
        ("nri", "socket", "/run/nri.sock", "SET003", "sockets"),
    ],
    ids=["bad-value", "bad-type", "unknown-key"],
)
def test_wrong_settings_end_the_start_with_file_line_and_key(
    lab: Lab, table: str, key: str, value: str, code: str, words: str
) -> None:
    """Exit status 2 and one message that says where the mistake is and what is allowed."""
    courier = lab.courier({table: {key: value}})
    courier.start()

    assert courier.wait() == 2
    text = courier.log()
    line = line_of(courier.settings, f"{key} = ")
    assert f"{code}: {courier.settings}, line {line}, {table}.{key}: " in text
    assert words in text


@on_one_host
def test_unreadable_settings_end_the_start(lab: Lab) -> None:
    """Exit status 2 for a file that is no TOML and for one that is not there."""
    broken, absent = lab.courier(name="broken"), lab.courier(name="absent")
    broken.settings.write_text("[nri\n")
    absent.settings.unlink()

    for courier, code in ((broken, "SET002"), (absent, "SET001")):
        courier.start()
        assert courier.wait() == 2
        assert f"{code}: " in courier.log()
        assert str(courier.settings) in courier.log()


def test_a_missing_socket_is_waited_for(lab: Lab) -> None:
    """The daemon says once that the socket is not there, and serves when the runtime starts."""
    lab.write_spec("all.json", spec(all={}))
    lab.containerd.stop()
    lab.nri_socket.unlink(missing_ok=True)
    courier = lab.courier()

    courier.start()
    courier.wait_for_log("NRI001: ")
    lab.containerd.start()
    courier.wait_for_log("synchronized:", RECONNECTED)

    assert courier.log().count("NRI001") == 1
    assert devices_of(lab, run(lab, annotated(lab, container_c1=ALL))) == {"ALL"}


@on_one_host
def test_a_socket_that_speaks_something_else_is_named(lab: Lab) -> None:
    """On containerd's gRPC socket the daemon says that it is not NRI's, goes on trying, stops cleanly."""
    courier = lab.courier({"nri": {"sockets": [str(lab.containerd.socket)]}})

    courier.start()
    line = courier.wait_for_log(lambda line: any(code in line for code in ("NRI006", "NRI009", "NRI010")))
    courier.wait_for_log("NRI session 2 on ")

    assert str(lab.containerd.socket) in line
    assert courier.running
    assert courier.stop() == 0


@on_one_host
def test_a_file_in_the_socket_s_place_is_named(lab: Lab) -> None:
    """The daemon says that the path is no socket and goes on looking at it."""
    path = lab.root / "file.sock"
    path.touch()
    courier = lab.courier({"nri": {"sockets": [str(path)]}})

    courier.start()

    assert "it is not a socket" in courier.wait_for_log("NRI004: ")
    assert courier.stop() == 0


@on_one_host
def test_a_socket_without_permission_is_named(lab: Lab) -> None:
    """A daemon that may not connect says so and what to do, and goes on trying."""
    path, python = lab.root / "theirs.sock", lab.root / "python"
    # Root without capabilities is refused like anybody else, yet reads what the lab wrote.
    python.write_text(f'#!/bin/sh\nexec setpriv --inh-caps=-all --bounding-set=-all {sys.executable} "$@"\n')
    python.chmod(0o700)
    path.unlink(missing_ok=True)
    with socket(AF_UNIX) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        os.chown(path, 65534, 65534)
        path.chmod(0o600)
        courier = lab.courier({"nri": {"sockets": [str(path)]}})
        courier.python = python

        courier.start()

        assert "run as root" in courier.wait_for_log("NRI003: ")
        assert courier.stop() == 0


@on_one_host
def test_a_second_daemon_on_the_same_socket_does_not_start(lab: Lab) -> None:
    """Whatever its state directory is: exit status 1, and the first one's containers do not notice."""
    lab.write_spec("all.json", spec(all={}))
    first = serving(lab)
    second = lab.courier({"service": {"state_dir": str(lab.root / "second")}}, name="second")

    second.start()

    assert second.wait() == 1
    assert first.process is not None
    assert f"HST002: another cdi-courier (pid {first.process.pid}) already serves" in second.log()
    assert str(lab.nri_socket) in second.log()
    assert devices_of(lab, run(lab, annotated(lab, container_c1=ALL))) == {"ALL"}


@on_one_host
def test_a_second_daemon_on_the_same_state_directory_does_not_start(lab: Lab) -> None:
    """Even for another socket: exit status 1."""
    serving(lab)
    second = lab.courier({"nri": {"sockets": [str(lab.root / "absent.sock")]}}, name="second")

    second.start()

    assert second.wait() == 1
    assert "HST002: " in second.log()
    assert str(lab.state_dir) in second.log()
