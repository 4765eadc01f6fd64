"""The doctor's report: what is ready, what is not, and what to do next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import doctor
from cdi_courier.cdi.registry import Registry
from cdi_courier.cdi.snapshot import Snapshot
from cdi_courier.cli import command as courier
from cdi_courier.cli import doctor as command
from cdi_courier.errors import HostError, PluginError
from cdi_courier.hookspecs import API_VERSION, Choice, Offer
from cdi_courier.host import conflicts
from cdi_courier.host.model import Fact, Host, Runtime
from cdi_courier.plugins import Plugins
from cdi_courier.settings import Settings
from click.testing import CliRunner

NRI = Offer("nri", "full", "nothing", "NRI is on")
DAEMON: dict[str, Any] = {
    "pid": 7,
    "version": "1",
    "runtimes": {"containerd": {"state": "active", "since": 1.0, "counts": {"injected": 3}}},
}


def chosen(
    active: str | None = "nri",
    recommended: str | None = "nri",
    *,
    kind: str = "containerd",
    version: str = "2.1.9",
    **facts: Any,
) -> Choice:
    known = {name: Fact(value, "a test") for name, value in facts.items()}
    runtime = Runtime(kind, kind, version, "", known)  # type: ignore[arg-type]
    return Choice(runtime, (NRI,), active, recommended, "because", "do so", {})


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """One device."""
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "vendor.com/gpu",
        "devices": [{"name": "a", "containerEdits": {"env": ["A=b"]}}],
    }
    (tmp_path / "v.json").write_text(json.dumps(spec))
    return Registry([str(tmp_path)], trust="any").snapshot()


def reported(choices: list[Choice], snapshot: Snapshot, **more: Any) -> dict[str, Any]:
    found = doctor.report(Settings(), Plugins(), choices, snapshot, **{"daemon": DAEMON, **more})
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_a_served_host_is_ready(snapshot: Snapshot) -> None:
    """With an active backend, a daemon in session and a device, nothing is left to do."""
    found = reported([chosen()], snapshot)

    assert (found["ready"], found["next"]) == (True, [])
    assert found["runtimes"][0]["session"] == {"state": "active", "since": 1.0, "counts": {"injected": 3}}


@pytest.mark.parametrize(
    ("choices", "more", "word"),
    [
        ([], {}, "no container runtime was found"),
        ([chosen(None, "nri")], {}, "cdi-courier install --backend nri --runtime containerd"),
        ([chosen(None, None)], {}, ""),
        ([chosen()], {"daemon": None}, "no daemon runs"),
        (
            [chosen()],
            {"daemon": {"runtimes": {"containerd": {"state": "waiting", "cause": "NRI001: not there"}}}},
            "the NRI session is waiting: NRI001",
        ),
        ([chosen()], {"conflicts": ["another plugin"]}, "conflicting plugin"),
        ([chosen(), chosen(None, "oci_hook", kind="podman", kubelet=True)], {}, "--backend oci_hook"),
    ],
    ids=[
        "no runtime",
        "off",
        "hopeless",
        "no daemon",
        "no session",
        "conflict",
        "the kubelet's is not served",
    ],
)
def test_what_is_missing_is_the_next_step(
    snapshot: Snapshot, choices: list[Choice], more: dict[str, Any], word: str
) -> None:
    """A host is not ready if a pod that asks would not be served, and the report says what to do."""
    found = reported(choices, snapshot, **more)

    assert not found["ready"]
    assert word in "\n".join(found["next"])


def test_without_any_device_a_host_is_not_ready(tmp_path: Path) -> None:
    """Nothing can be asked for, and the step names the directory."""
    found = reported([chosen()], Registry([str(tmp_path)]).snapshot())

    assert not found["ready"]
    assert str(tmp_path) in found["next"][0]


def test_a_runtime_that_nobody_needs_may_be_unserved(snapshot: Snapshot) -> None:
    """An idle Podman beside the kubelet's containerd does not make the host unready, but is mentioned."""
    found = reported([chosen(kubelet=True), chosen(None, "oci_hook", kind="podman")], snapshot)

    assert found["ready"]
    assert found["next"] == ["cdi-courier install --backend oci_hook --runtime podman"]


def test_a_host_of_podman_alone_needs_no_daemon(snapshot: Snapshot) -> None:
    """A hook delivers by itself: a host is ready though no daemon runs."""
    found = reported([chosen("oci_hook", "oci_hook", kind="podman")], snapshot, daemon=None)

    assert (found["ready"], found["next"]) == (True, [])


def test_a_better_backend_is_mentioned(snapshot: Snapshot) -> None:
    """What is active may be less than what could be."""
    found = reported([chosen("oci_hook", "nri")], snapshot)

    assert found["next"] == ["better for containerd: cdi-courier install --backend nri --runtime containerd"]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (chosen(version="2.1.9"), None),
        (chosen(version="2.2.0"), 'required_plugins = ["cdi-courier"]'),
        (chosen(version="2.2.0", required_plugins=["10-cdi-courier"]), "requires this plugin"),
        (chosen(kind="cri-o", version="1.34.0"), "nri_validator_required_plugins"),
        (chosen(kind="cri-o", version="1.33.0"), None),
        (chosen(None, version="2.2.0"), None),
    ],
)
def test_how_to_require_the_plugin_is_said_with_its_hole(
    snapshot: Snapshot, choice: Choice, words: str | None
) -> None:
    """Where a runtime can require a plugin, the note says how, and that the first container slips by."""
    (runtime,) = reported([choice], snapshot)["runtimes"]

    assert bool(runtime["notes"]) is (words is not None)
    for note in runtime["notes"]:
        assert str(words) in note
        assert "the first container" in note


def test_unequal_directories_are_named(snapshot: Snapshot) -> None:
    """A runtime that reads other CDI directories than we is listed with them."""
    found = reported([chosen(cdi_spec_dirs=["/opt/cdi"])], snapshot)

    assert found["cdi"]["unequal"] == {"containerd": ["/opt/cdi"]}


def test_backends_are_listed_whatever_their_state(snapshot: Snapshot) -> None:
    """Installed, disabled and broken ones are told apart, with the reason."""
    plugins = Plugins(
        {"nri": object()},  # type: ignore[dict-item]
        problems={"x": PluginError("PLG001", "plugin x cannot be loaded")},
        disabled=("y",),
    )

    found = doctor.report(Settings(), plugins, [], snapshot)

    assert {name: backend["state"] for name, backend in found["backends"].items()} == {
        "nri": "installed",
        "x": "broken",
        "y": "disabled",
    }


def test_the_policy_is_shown_rule_by_rule(snapshot: Snapshot) -> None:
    """The built-in rule is always there, last, with what it allows."""
    settings = attrs.evolve(Settings())

    rules = doctor.report(settings, Plugins(), [], snapshot)["policy"]["rules"]

    assert rules[-1]["source"] == "the built-in rule"
    assert rules[-1]["devices"] == ["*"]


# Probes


def test_what_every_backend_saw_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has seen does not hide what another could not see, whatever it raises."""

    class Probing:
        api_version = API_VERSION

        def __init__(self, name: str, saw: str | Exception) -> None:
            self.name = name
            self.saw = saw

        def offer(self, *_: object) -> Offer:
            return Offer(self.name, "full", "nothing", "a test")

        def probe(self, *_: object) -> str:
            if isinstance(self.saw, Exception):
                raise self.saw
            return self.saw

    backends = [
        Probing("one", HostError("HST101", "nobody is there")),
        Probing("two", "it says hello"),
        Probing("three", ""),
        Probing("four", KeyError("x")),
    ]
    plugins = Plugins({backend.name: backend for backend in backends})  # type: ignore[misc]
    monkeypatch.setattr(command, "discover", lambda _: plugins)
    monkeypatch.setattr(command, "describe", lambda _: Host((Runtime("containerd", "containerd"),)))
    (tmp_path / "c.toml").write_text(f'[service]\nstate_dir = "{tmp_path}"\n')
    done = CliRunner().invoke(courier, ["--config", str(tmp_path / "c.toml"), "doctor", "--json", "--probe"])
    (runtime,) = json.loads(done.output)["runtimes"]

    assert runtime["probe"] == ("one: HST101: nobody is there; two: it says hello; four: KeyError: 'x'")


# Conflicts


def test_other_plugins_that_answer_the_same_annotations_are_found(tmp_path: Path) -> None:
    """Launched ones by their file, others by their process; hostile names stay one line."""
    plugins, proc = tmp_path / "plugins", tmp_path / "proc"
    for folder in (plugins, proc / "11", proc / "12", proc / "self"):
        folder.mkdir(parents=True)
    for name, mode in (
        ("10-nvidia-nri-plugin\n", 0o755),
        ("20-device-injector", 0o644),
        ("30-logger", 0o755),
    ):
        (plugins / name).touch(mode)
    (proc / "11/cmdline").write_bytes(b"/usr/bin/nvidia-ctk-installer\0--x\0")
    (proc / "12/cmdline").write_bytes(b"/bin/sh\0-c\0device-injector\0")
    (proc / "self/cmdline").write_bytes(b"device-injector\0")

    found = conflicts.find(str(plugins), str(proc))

    assert len(found) == 2
    assert "10-nvidia-nri-plugin\\n is launched" in found[0]
    assert found[1].startswith("process 11 (nvidia-ctk-installer)")


@pytest.mark.parametrize(
    ("words", "conflict"),
    [
        (["/opt/bin/10-device-injector", "--idx", "10"], True),
        (["/usr/bin/python3.11", "/opt/device-injector"], True),
        (["less", "/var/log/nvidia-toolkit.log"], False),
        (["systemctl", "nvidia-toolkit"], False),
        (["/usr/bin/device-injector-log-viewer"], False),
        ([], False),
    ],
    ids=["index", "script", "log", "argument", "other-program", "kernel-thread"],
)
def test_only_who_runs_a_plugin_conflicts(tmp_path: Path, words: list[str], conflict: bool) -> None:
    """Whoever only speaks of one, in a name or an argument, makes no pod fail."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))

    assert bool(conflicts.find(str(tmp_path / "none"), str(tmp_path))) is conflict


def test_a_host_without_plugins_has_no_conflict(tmp_path: Path) -> None:
    """Folders that are not there are nobody's."""
    found = conflicts.find(str(tmp_path / "none"), str(tmp_path / "none"))

    assert found == []


def test_a_warning_of_a_backend_is_a_note(snapshot: Snapshot) -> None:
    """Whoever asks the doctor learns what will end, beside what serves now."""
    choice = attrs.evolve(chosen(), offers=(attrs.evolve(NRI, warning="the file is gone"),))
    notes = reported([choice], snapshot)["runtimes"][0]["notes"]

    assert notes[0] == "nri: the file is gone"


def test_nri_is_asked_after_also_where_another_backend_has_arranged_it(snapshot: Snapshot) -> None:
    """A session that is not there is no readiness, whoever is said to be active."""
    arranged = Offer("cri_o_drop_in", "full", "nothing", "NRI is on", "nri")
    choice = attrs.evolve(chosen("cri_o_drop_in", "cri_o_drop_in"), offers=(arranged,))
    without = reported([choice], snapshot, daemon=None)
    waiting = {"runtimes": {"containerd": {"state": "waiting", "cause": "NRI001"}}}
    found = reported([choice], snapshot, daemon=waiting)

    assert (without["ready"], found["ready"]) == (False, False)
    assert "cdi-courier run" in " ".join(without["next"])
    assert "the NRI session is waiting" in " ".join(found["next"])
