"""The wrapper in front of runc on real containerds without NRI, through the CRI, as `install` sets it up."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import changes
from cdi_courier.host import gate_users
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.settings import OciHookSettings, Settings
from cdi_courier_oci_hook import wrapping
from cdi_courier_oci_hook.backend import OciHookBackend
from click.testing import Result
from support.containerd import SUITES_1_6, SUITES_1_7, SUITES_2, packaged
from support.containerd_files import HANDLED, Files
from support.cri import CriError, Pod
from support.installing import Restarter, courier, files_of, keep_files
from support.lab import Lab
from support.packages import Packages
from support.scenario import (
    ALL,
    DOMAIN,
    GRANTED_NAMESPACE,
    KIND,
    OPEN_FUSE,
    OPEN_KMSG,
    annotated,
    devices_of,
    hook,
    run,
    serving,
    shell,
    spec,
)

pytestmark = pytest.mark.runtime

HANDLER = "cdi-courier"
RUNTIME = ("--backend", "oci_hook", "--runtime", "containerd")


@dataclass
class Host:
    """A lab whose containerd has NRI off. gate: where the wrapper is, or will be."""

    lab: Lab
    restarter: Restarter
    gate: Path

    def courier(self, *arguments: str, **oci_hook: str) -> Result:
        """Run `cdi-courier` with the lab's settings."""
        own = {"gate_dir": str(self.gate.parent), "log": str(self.lab.root / "gate.log"), **oci_hook}
        return courier(self.lab, self.restarter.command, *arguments, tables={"oci_hook": own})

    def install(self, *arguments: str, **oci_hook: str) -> Result:
        result = self.courier("install", *RUNTIME, "--apply", *arguments, **oci_hook)

        assert result.exit_code == 0, result.output
        assert "oci_hook can serve it" in result.output
        return result

    def bundle(self, identity: str) -> dict[str, Any]:
        """The OCI config that the low-level runtime was given."""
        path = f"io.containerd.runtime.v2.task/k8s.io/{identity}/config.json"
        config: dict[str, Any] = json.loads((self.lab.containerd.root / "state" / path).read_bytes())
        return config


def hosted(packages: Packages, suite: tuple[str, ...], *, nri: bool = False) -> Iterator[Host]:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        Lab(suite, packages=packages, nri=nri) as lab,
        Restarter(lab.root, lab.containerd.restart) as restarter,
    ):
        keep_files(lab, monkeypatch)
        lab.delivery = "edits"
        yield Host(lab, restarter, lab.root / "bin/cdi-courier-containerd")


@pytest.fixture(scope="module", params=[SUITES_1_6, SUITES_1_7], ids=["1.6", "1.7"])
def installed(request: pytest.FixtureRequest, packages: Packages) -> Iterator[Host]:
    """The wrapper is installed, and its handler is the default."""
    for host in hosted(packages, request.param):
        host.install()
        yield host


@pytest.fixture
def host(installed: Host) -> Iterator[Host]:
    """`installed`, without pods and CDI files."""
    yield installed
    installed.lab.remove_pods()
    installed.lab.clear_specs()
    assert "Traceback" not in installed.lab.containerd.log()


@pytest.fixture(params=[SUITES_1_6, SUITES_1_7, SUITES_2], ids=["1.6", "1.7", "2.1"])
def plain(request: pytest.FixtureRequest, packages: Packages) -> Iterator[Host]:
    """Nothing is installed yet."""
    yield from hosted(packages, request.param)


def refusal(host: Host, pod: Pod, name: str = "c1") -> str:
    """What the CRI says against the container."""
    container = host.lab.cri.create_container(pod, name)
    with pytest.raises(CriError) as caught:
        host.lab.cri.start(container)
    return caught.value.message


def environment(host: Host, container: str) -> str:
    """The variables of the container's first process."""
    return shell(host.lab, container, "tr '\\0' '\\n' < /proc/1/environ")[1]


# What containerd makes of its files


def dump(containerd: Path, main: Path) -> dict[str, Any]:
    """Its whole configuration as it understands it, without what is empty or names the files."""
    done = subprocess.run(
        [containerd, "-c", main, "config", "dump"], capture_output=True, check=True, timeout=30
    )
    document = tomllib.loads(done.stdout.decode())
    document.pop("imports", None)
    full: dict[str, Any] = filled(document)
    return full


def filled(value: Any) -> Any:
    if isinstance(value, dict):
        inner = {key: filled(item) for key, item in value.items() if key != "sandbox_mode"}
        return {key: item for key, item in inner.items() if item not in ("", 0, [], {}, None)}
    return value


def handlers(document: dict[str, Any]) -> dict[str, Any]:
    """The table of the CRI's plugin that has them."""
    tables = [plugin.get("containerd", {}) for plugin in document["plugins"].values()]
    (found,) = [table for table in tables if "runtimes" in table]
    return found


def readers(files: Files) -> list[str]:
    """The containerds that read this host's files: the one that they are for, and newer and older ones."""
    return ["2.1"] if files.version.startswith("2") else ["1.6", "1.7", "2.1"]


@pytest.fixture(scope="module")
def binaries(packages: Packages) -> dict[str, Path]:
    """containerd's program, by version."""
    suites = {"1.6": SUITES_1_6, "1.7": SUITES_1_7, "2.1": SUITES_2}
    return {name: packaged(packages, suite).containerd for name, suite in suites.items()}


@pytest.mark.parametrize(
    ("files", "reader"),
    [
        pytest.param(files, reader, id=f"{name}-{reader}")
        for name, files in HANDLED.items()
        for reader in readers(files)
    ],
)
def test_containerd_makes_of_the_files_what_is_meant(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    binaries: dict[str, Path],
    files: Files,
    reader: str,
):
    """There is one handler more, which is the default, and nothing else of the configuration is different."""
    monkeypatch.setattr(changes, "FOLDER", str(tmp_path / "state"))
    monkeypatch.setattr(wrapping, "real_runtime", lambda *_: "/usr/bin/true")
    main = files.write(tmp_path / "etc")
    if files.main is None:
        main.write_text("version = 2\n")
    before = dump(binaries[reader], main)
    version = files.version if files.version.startswith(reader[:2]) else f"{reader}.0"
    runtime = Runtime("containerd", "containerd", version, "", {"config": Fact(str(main), "a test")})
    told = Settings(oci_hook=OciHookSettings(gate_dir=str(tmp_path / "bin")))
    changes.apply(OciHookBackend().plan(runtime, told), folder=changes.FOLDER)
    after = dump(binaries[reader], main)

    table, old = handlers(after), handlers(before)
    ours = table["runtimes"].pop(HANDLER)
    assert ours.pop("options")["BinaryName"] == str(tmp_path / "bin/cdi-courier-containerd")
    assert ours.pop("pod_annotations") == [f"{DOMAIN}/*", DOMAIN]
    copied = {**old["runtimes"][old["default_runtime_name"]]}
    copied.pop("options", None)
    # Who is added has this by default, as runc has, but only of runc is it in the dump.
    assert {**ours, "sandboxer": ""} == {**copied, "sandboxer": ""}
    assert table["default_runtime_name"] == HANDLER
    table["default_runtime_name"] = old["default_runtime_name"]
    assert after == before


# What containers get


@pytest.mark.parametrize("key", ["container_c1", "pod", "bare"])
def test_each_form_of_the_key_asks(host: Host, key: str):
    """The container has its device's variable, in its first process as in those that are exec'd."""
    host.lab.write_spec("v.json", spec(all={}))
    container = run(host.lab, annotated(host.lab, **{key: ALL}))

    assert "COURIER_ALL=yes\n" in environment(host, container)
    assert devices_of(host.lab, container) == {"ALL"}


def test_several_names_are_all_delivered(host: Host):
    """A list of names gives each one's edits, and nobody else's."""
    host.lab.write_spec("v.json", spec(one={}, two={}, three={}))
    container = run(host.lab, annotated(host.lab, pod=f"{KIND}=one, {KIND}=three"))

    assert devices_of(host.lab, container) == {"ONE", "THREE"}


def test_every_kind_of_edit_arrives(host: Host, tmp_path: Path):
    """The node can be used and no other can, the mount is there, and the hook has run."""
    shared, record = tmp_path / "shared", tmp_path / "record"
    shared.mkdir()
    (shared / "file").write_text("from the host")
    edits = {
        "deviceNodes": [{"path": "/dev/courier", "hostPath": "/dev/null"}, {"path": "/dev/kmsg"}],
        "mounts": [{"hostPath": str(shared), "containerPath": "/shared", "options": ["ro", "bind"]}],
        **hook(record),
    }
    host.lab.write_spec("v.json", spec(all=edits))
    container = run(host.lab, annotated(host.lab, container_c1=ALL))

    assert shell(host.lab, container, "test -c /dev/courier && echo x > /dev/courier") == (0, "")
    assert shell(host.lab, container, OPEN_KMSG)[0] == 0
    rc, words = shell(host.lab, container, OPEN_FUSE)
    assert (rc != 0, "not permitted" in words) == (True, True)
    assert shell(host.lab, container, "cat /shared/file") == (0, "from the host")
    assert record.read_text() == "ran\n"


def test_two_containers_of_a_pod_get_their_own(host: Host):
    """Each is told by its name; a third one, which no key names, gets nothing."""
    host.lab.write_spec("v.json", spec(one={}, two={}))
    pod = annotated(host.lab, container_c1=f"{KIND}=one", container_c2=f"{KIND}=two")

    found = {name: devices_of(host.lab, run(host.lab, pod, name)) for name in ("c1", "c2", "c3")}
    assert found == {"c1": {"ONE"}, "c2": {"TWO"}, "c3": set()}


def test_who_does_not_ask_is_left_alone(host: Host):
    """A pod without our annotations, and the sandbox of one with them, have the config of runc's own."""
    host.lab.write_spec(
        "v.json", spec(all={"deviceNodes": [{"path": "/dev/courier", "hostPath": "/dev/null"}]})
    )
    plain = host.lab.cri.run_pod("plain", GRANTED_NAMESPACE, annotations={"other.example/key": ALL})
    asks = annotated(host.lab, bare=ALL)
    config = host.bundle(run(host.lab, plain))

    for found in (config, host.bundle(plain.id), host.bundle(asks.id)):
        assert "COURIER" not in json.dumps(found["process"])
        assert "courier" not in json.dumps(found["linux"].get("devices", []))
    assert not any(key.startswith("cdi-courier") or DOMAIN in key for key in config["annotations"])
    # It is not for want of the annotation.
    assert host.bundle(asks.id)["annotations"][DOMAIN] == ALL


# What is refused


def test_a_namespace_without_a_rule_is_refused_in_words(host: Host):
    """The CRI's error says which rule is missing, as TOML to paste."""
    host.lab.write_spec("v.json", spec(all={}))
    words = refusal(host, annotated(host.lab, namespace="default", container_c1=ALL))

    assert "POL001" in words
    assert 'namespaces = ["default"]' in words


def test_a_name_that_is_not_there_is_refused_with_the_cause(host: Host):
    """The CRI's error names the device, and what would define it."""
    host.lab.write_spec("v.json", spec(all={}))
    words = refusal(host, annotated(host.lab, container_c1=f"{KIND}=none"))

    assert f"{KIND}=none" in words
    assert "CDI" in words


def test_a_refused_container_does_not_spoil_its_pod(host: Host):
    """Once the cause is mended, the same pod's next container starts."""
    pod = annotated(host.lab, container_c1=ALL)
    refusal(host, pod)
    host.lab.write_spec("v.json", spec(all={}))
    (left,) = host.lab.cri.list_containers(pod)
    host.lab.cri.remove_container(left.id)

    assert devices_of(host.lab, run(host.lab, pod)) == {"ALL"}


# The rest of a container's life


def test_containers_live_as_with_runc_alone(host: Host):
    """They survive containerd's restart, can be entered before and after it, are stopped and removed."""
    host.lab.write_spec("v.json", spec(all={}))
    pod = annotated(host.lab, container_c1=ALL)
    container, other = run(host.lab, pod), run(host.lab, pod, "c2")
    host.lab.containerd.restart()

    assert devices_of(host.lab, container) == {"ALL"}
    assert shell(host.lab, other, "exit 7")[0] == 7
    for each in (container, other):
        host.lab.cri.stop_container(each)
        assert host.lab.cri.container_status(each).status.exit_code == 137
        host.lab.cri.remove_container(each)
    host.lab.cri.remove_pod(pod)
    assert host.lab.cri.list_containers() == []
    assert not list((host.lab.containerd.root / "oci/runc").rglob("state.json"))
    assert not os.listdir(host.lab.state_dir / "exec")


def test_a_newer_gate_may_take_the_place_of_one_in_use(host: Host):
    """A container that was made through the old one is entered and stopped through the new one."""
    host.lab.write_spec("v.json", spec(all={}))
    pod = annotated(host.lab, container_c1=ALL)
    container = run(host.lab, pod)
    old = host.gate.read_bytes()
    host.gate.write_bytes(old + b"# an older version\n")
    inode = host.gate.stat().st_ino
    result = host.courier("install", *RUNTIME)

    assert result.exit_code == 0, result.output
    assert host.gate.read_bytes() == old
    assert host.gate.stat().st_ino != inode
    assert devices_of(host.lab, container) == {"ALL"}
    host.lab.cri.remove_pod(pod)


@pytest.mark.parametrize("word", ["--version", "features", "list"])
def test_what_creates_nothing_is_answered_by_the_real_runtime(host: Host, word: str):
    """The gate says what runc says, with the same status."""
    answers = [
        subprocess.run([program, word], capture_output=True, check=True, timeout=30).stdout
        for program in (host.gate, host.lab.containerd.binaries.runc)
    ]

    assert answers[0] == answers[1]
    assert answers[0]


def test_once_it_is_in_force_there_is_nothing_to_do(host: Host):
    """Installing again writes nothing, and asks for no restart."""
    before = host.restarter.times
    result = host.courier("install", *RUNTIME, "--apply")

    assert "oci_hook is installed already" in result.output
    assert "to make it effective" not in result.output
    assert host.restarter.times == before


def test_with_nri_beside_it_nothing_is_delivered_twice(packages: Packages):
    """What one of the two has put in, the other one leaves: a hook runs once, a variable is there once."""
    for both in hosted(packages, SUITES_1_7, nri=True):
        both.install()
        record = both.lab.root / "record"
        node = {"path": "/dev/courier", "hostPath": "/dev/null"}
        both.lab.write_spec("v.json", spec(all={"deviceNodes": [node], **hook(record)}))
        serving(both.lab)
        config = both.bundle(run(both.lab, annotated(both.lab, container_c1=ALL)))

        assert record.read_text() == "ran\n"
        assert config["process"]["env"].count("COURIER_ALL=yes") == 1
        assert [device["path"] for device in config["linux"]["devices"]] == ["/dev/courier"]


# Installing and uninstalling


def test_nothing_goes_while_a_container_uses_it_and_everything_afterwards(plain: Host):
    """Uninstalling names who keeps it from it, whatever is forced, and in the end every byte is back."""
    before = files_of(plain.lab)
    plain.install()
    plain.lab.write_spec("v.json", spec(all={}))
    pod = annotated(plain.lab, container_c1=ALL)
    container = run(plain.lab, pod)
    during = files_of(plain.lab)
    for words in (("uninstall", "--apply", "--force"), ("uninstall",)):
        result = plain.courier(*words)
        assert result.exit_code == 1
        assert f'CHG011: 2 containers use "{plain.gate}"' in result.output
        assert f"{GRANTED_NAMESPACE}/asks/(sandbox), {GRANTED_NAMESPACE}/asks/c1 " in result.output
    assert files_of(plain.lab) == during
    assert devices_of(plain.lab, container) == {"ALL"}
    # What has ended needs no low-level runtime, even if the CRI still knows of it.
    plain.lab.cri.stop_container(container)
    assert gate_users.users(str(plain.gate)) == (f"{GRANTED_NAMESPACE}/asks/(sandbox)",)
    plain.lab.cri.stop_pod(pod)
    result = plain.courier("uninstall", "--apply")

    assert result.exit_code == 0, result.output
    assert files_of(plain.lab) == before
    assert not plain.gate.parent.exists()
    assert not os.listdir(changes.FOLDER)
    assert plain.lab.cri.list_containers(pod) != []
    plain.lab.cri.remove_pod(pod)
    after = plain.lab.cri.run_pod("after", GRANTED_NAMESPACE, annotations={DOMAIN: ALL})
    assert devices_of(plain.lab, run(plain.lab, after)) == set()


def test_a_gate_that_the_daemon_still_calls_goes_last(installed: Host):
    """Without a restart the files are put back, but pods still start; after it the wrapper goes as well."""
    lab = installed.lab
    lab.remove_pods()
    written = files_of(lab)
    result = installed.courier("uninstall")

    assert result.exit_code == 0, result.output
    assert "then again: cdi-courier uninstall" in result.output
    assert files_of(lab) != written
    assert installed.gate.exists()
    pod = lab.cri.run_pod("still", GRANTED_NAMESPACE)
    assert shell(lab, run(lab, pod), "echo yes") == (0, "yes\n")
    lab.containerd.restart()
    assert "CHG011" in installed.courier("uninstall").output
    lab.remove_pods()
    result = installed.courier("uninstall")
    assert "oci_hook is uninstalled" in result.output
    assert not installed.gate.parent.exists()
    installed.install()
    assert files_of(lab) == written


def test_a_named_handler_serves_only_pods_that_name_it(installed: Host):
    """Others run as before; the RuntimeClass that pods need is printed. Going back makes it the default."""
    lab = installed.lab
    lab.write_spec("v.json", spec(all={}))
    written = files_of(lab)
    result = installed.install(handler_mode="named")
    annotations = {f"{DOMAIN}/pod": ALL}
    named = lab.cri.run_pod("named", GRANTED_NAMESPACE, annotations=annotations, handler=HANDLER)
    usual = lab.cri.run_pod("usual", GRANTED_NAMESPACE, annotations=annotations)

    assert f"kind: RuntimeClass\nmetadata:\n  name: {HANDLER}\nhandler: {HANDLER}" in result.output
    assert devices_of(lab, run(lab, named)) == {"ALL"}
    assert devices_of(lab, run(lab, usual)) == set()
    assert gate_users.users(str(installed.gate)) == (
        f"{GRANTED_NAMESPACE}/named/(sandbox)",
        f"{GRANTED_NAMESPACE}/named/c1",
    )
    lab.remove_pods()
    lab.clear_specs()
    installed.install()
    assert files_of(lab) == written
