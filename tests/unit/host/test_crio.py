"""CRI-O as every version answers, over both protocols of its one socket."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cdi_courier.host import cri, crio
from cdi_courier.host.answers import Findings, from_toml
from support import fake_crio

SOCKET = "run/crio/crio.sock"
NRI_SOCKET = "run/nri/nri.sock"


def test_a_crio_is_described_in_full(look, root: Path, data: Path) -> None:
    """Everything there is to know of a CRI-O with NRI on, each fact with its source."""
    with fake_crio.crio(root / SOCKET, data), fake_crio.listening(root / NRI_SOCKET):
        host = look()

    (runtime,) = host.runtimes
    assert host.problems == runtime.problems == ()
    assert (runtime.key, runtime.kind, runtime.version) == ("cri-o", "cri-o", "1.36.3")
    assert runtime.endpoint == "/run/crio/crio.sock"
    assert {name: fact.value for name, fact in runtime.facts.items()} == {
        "nri": "on",
        "nri_socket": "/var/run/nri/nri.sock",
        "nri_connections": True,
        "nri_validator": {},
        "required_plugins": [],
        "config": "/etc/crio/crio.conf",
        "config_exists": False,
        "handlers": {
            "crun": {"type": "oci", "path": "/usr/bin/crun"},
            "runc": {"type": "oci", "path": "/usr/sbin/runc"},
        },
        "default_handler": "runc",
        "hooks_dirs": ["/usr/share/containers/oci/hooks.d"],
        "cdi_enabled": True,
        "cdi_spec_dirs": ["/etc/cdi", "/var/run/cdi"],
        "cgroup_driver": "cgroupfs",
        "rootless": os.geteuid() != 0,
        "pid": os.getpid(),
    }
    assert runtime.facts["nri"].source == "CRI-O GET /config"
    assert runtime.facts["cgroup_driver"].source == "CRI-O GET /info"


@pytest.mark.parametrize(
    ("version", "nri", "cdi", "connections", "validator"),
    [
        ("1.24.6", "absent", False, None, None),
        ("1.26.1", "off", False, None, {}),
        ("1.28.2", "off", True, True, {}),
        ("1.30.0", "on", True, True, {}),
        ("1.33.1", "on", True, True, {}),
        ("1.36.3", "on", True, True, {}),
    ],
)
def test_each_version_tells_what_it_can(
    look, root: Path, data: Path, version: str, nri: str, cdi: bool, connections: bool | None, validator
) -> None:
    """What a version does not have is absent or unknown; the rest is the same for all."""
    with fake_crio.crio(root / SOCKET, data, version), fake_crio.listening(root / NRI_SOCKET):
        (runtime,) = look().runtimes

    assert runtime.problems == ()
    assert runtime.version == version
    assert runtime.get("nri") == nri
    assert runtime.get("cdi_enabled") is cdi
    assert runtime.get("nri_connections") is connections
    assert runtime.get("nri_validator") == validator
    assert runtime.get("default_handler") == "runc"
    assert runtime.get("cgroup_driver") == "cgroupfs"


def test_nri_that_is_off_is_off_whatever_listens(look, root: Path, data: Path) -> None:
    """The live configuration decides; another's NRI socket is not CRI-O's."""
    with fake_crio.crio(root / SOCKET, data, variant="nri-off"), fake_crio.listening(root / NRI_SOCKET):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == "off"
    assert runtime.problems == ()


def test_without_http_the_cri_tells_the_rest_and_nri_is_unknown(look, root: Path, data: Path) -> None:
    """A status alone names handlers and directories, and nothing of NRI is assumed."""
    with fake_crio.crio(root / SOCKET, data, http=False):
        (runtime,) = look().runtimes

    assert runtime.get("nri") is None
    assert runtime.facts["handlers"].source == "CRI Status"
    assert runtime.get("handlers")["crun"] == {"type": "oci", "path": "/usr/bin/crun"}
    assert runtime.get("hooks_dirs") == ["/usr/share/containers/oci/hooks.d"]
    assert runtime.get("cgroup_driver") == "cgroupfs"
    assert [problem[:6] for problem in runtime.problems] == ["HST104", "HST104"]
    assert "status 404" in runtime.problems[0]


def test_only_questions_without_effects_are_asked(look, root: Path, data: Path) -> None:
    """No path is requested but the two that only read: /pause would stop a container."""
    with fake_crio.crio(root / SOCKET, data) as runtime:
        look()

    assert {ask for ask in runtime.asked if ask.startswith("GET")} == {"GET /config", "GET /info"}
    assert {ask.rpartition("/")[2] for ask in runtime.asked if ask.startswith("/")} == {
        "Version",
        "Status",
        "RuntimeConfig",
    }


def test_nri_that_is_on_without_its_socket_is_a_problem(look, root: Path, data: Path) -> None:
    """The live configuration says on, and what keeps plugins out is said."""
    with fake_crio.crio(root / SOCKET, data):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == "on"
    (problem,) = runtime.problems
    assert problem.startswith("HST106: CRI-O has NRI on, but /var/run/nri/nri.sock does not exist")


@pytest.mark.parametrize("name", ["http-config-nri-on", "http-config-nri-off", "http-config-extra-handler"])
def test_the_live_configuration_is_read(data: Path, name: str) -> None:
    """Each captured configuration gives NRI, handlers and directories."""
    findings = Findings()

    crio.learn_from_config(from_toml((data / f"crio-1.36.3-{name}.toml").read_bytes(), name), findings)

    assert findings.value("nri") == ("off" if name.endswith("off") else "on")
    assert findings.value("nri_socket") == "/var/run/nri/nri.sock"
    assert set(findings.value("handlers")) == {"crun", "runc"} | (
        {"cdi-courier"} if name.endswith("extra-handler") else set()
    )
    assert findings.value("cdi_spec_dirs") == ["/etc/cdi", "/var/run/cdi"]


@pytest.mark.parametrize(
    ("name", "nri", "default", "handlers"),
    [("config-default", "on", "crun", {"crun"}), ("config-effective", None, "runc", {"crun", "runc"})],
)
def test_a_printed_configuration_gives_only_what_it_holds(
    data: Path, name: str, nri: str | None, default: str, handlers: set[str]
) -> None:
    """Values that are commented out in what ``crio config`` prints are unknown, not defaults."""
    findings = Findings()

    crio.learn_from_config(from_toml((data / f"crio-1.36.3-{name}.toml").read_bytes(), name), findings)

    assert findings.value("nri") == nri
    assert findings.value("default_handler") == default
    assert set(findings.value("handlers")) == handlers


@pytest.mark.parametrize("variant", ["nri-on", "nri-off", "extra-handler"])
def test_a_captured_status_is_read(data: Path, variant: str) -> None:
    """Handlers, hook and spec directories under Go's field names; nothing of NRI."""
    status = json.loads((data / f"crio-1.36.3-status-verbose-{variant}.json").read_text())
    version = json.loads((data / "crio-1.36.3-version.json").read_text())
    responses = {
        "Version": cri.MESSAGES["VersionResponse"].FromString(fake_crio.message("VersionResponse", version)),
        "Status": cri.MESSAGES["StatusResponse"].FromString(fake_crio.message("StatusResponse", status)),
    }
    findings = Findings()

    answer = cri.read(responses)
    crio.learn_from_cri(answer, findings)

    assert (answer.name, findings.version) == ("cri-o", "1.36.3")
    assert set(answer.handlers) == {*findings.value("handlers"), ""}
    assert findings.value("hooks_dirs") == ["/usr/share/containers/oci/hooks.d"]
    assert findings.value("nri") is None


def test_a_captured_info_is_read(data: Path) -> None:
    """The cgroup driver."""
    findings = Findings()

    crio.learn_from_info(json.loads((data / "crio-1.36.3-http-info.json").read_text()), findings)

    assert findings.value("cgroup_driver") == "cgroupfs"


def test_the_validator_is_read(data: Path) -> None:
    """Of a validator that is on, the switches that are on and the plugins it requires."""
    text = (data / "crio-1.36.3-http-config-nri-on.toml").read_text()
    text = text.replace("nri_enable_default_validator = false", "nri_enable_default_validator = true")
    text = text.replace("oci_hook_adjustment = false", "oci_hook_adjustment = true")
    text += '      nri_validator_required_plugins = ["guard"]\n'
    findings = Findings()

    crio.learn_from_config(from_toml(text.encode(), "text"), findings)

    assert findings.value("nri_validator") == {
        "nri_enable_default_validator": True,
        "nri_validator_reject_oci_hook_adjustment": True,
    }
    assert findings.value("required_plugins") == ["guard"]


def test_the_main_file_is_where_the_command_line_says(look, root: Path, data: Path) -> None:
    """``--config`` of the process that listens, relative to where it was started."""
    process = root / f"proc/{os.getpid()}"
    process.mkdir()
    (process / "cmdline").write_bytes(b"/usr/bin/crio\0--config=crio/my.conf\0")
    (process / "cwd").symlink_to("/etc")
    (root / "etc/crio").mkdir()
    (root / "etc/crio/my.conf").touch()
    with fake_crio.crio(root / SOCKET, data, variant="nri-off"):
        (runtime,) = look().runtimes

    assert runtime.get("config") == "/etc/crio/my.conf"
    assert runtime.get("config_exists") is True
    assert runtime.facts["config"].source == f"command line of process {os.getpid()}"


def test_nri_at_another_s_socket_is_a_problem(look, root: Path, data: Path, stranger: int) -> None:
    """Two runtimes with one NRI socket: plugins reach only one, and which is said."""
    with fake_crio.crio(root / SOCKET, data):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == "on"
    (problem,) = runtime.problems
    assert problem.startswith(
        f"HST106: CRI-O has NRI on, but process {stranger}, which is not CRI-O, listens at"
    )


def test_a_runtime_of_before_v1_tells_its_version(look, root: Path, data: Path) -> None:
    """CRI-O before 1.23 answers the older name of the API; what its version means is known."""
    old = fake_crio.crio(root / SOCKET, data, "1.22.5")
    version = old.grpc_answers["/runtime.v1.RuntimeService/Version"]
    old.grpc_answers.clear()
    old.grpc_answers["/runtime.v1alpha2.RuntimeService/Version"] = version
    with old:
        (runtime,) = look().runtimes

    assert runtime.version == "1.22.5"
    assert runtime.get("nri") == "absent"
    assert runtime.get("cdi_enabled") is False
    assert runtime.get("default_handler") == "runc"
