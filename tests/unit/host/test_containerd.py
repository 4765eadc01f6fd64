"""containerd: what it answered when it was captured, and how files and socket decide about NRI."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cdi_courier.host import containerd, cri
from cdi_courier.host.files import Root
from cdi_courier.host.sockets import Override
from support import fake_crio

SOCKET = "run/containerd/containerd.sock"
NRI_SOCKET = "run/nri/nri.sock"
CONFIG = "etc/containerd/config.toml"
VARIANTS = [
    ("1.6.20", "plain"),
    ("1.6.20", "podann"),
    ("1.7.24", "nri-off"),
    ("1.7.24", "nri-on"),
    ("2.1.9", "nri-off"),
    ("2.1.9", "nri-on"),
]
NRI = '[plugins."io.containerd.nri.v1.nri"]\n'

variants = pytest.mark.parametrize(("version", "variant"), VARIANTS, ids=["-".join(v) for v in VARIANTS])


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def install(root: Path, data: Path, version: str, variant: str) -> None:
    """The configuration file that the daemon was captured with."""
    put(root, CONFIG, (data / f"containerd-{version}-config-file-{variant}.toml").read_text())


# What it told when it was captured


@variants
def test_a_captured_daemon_is_described(look, root: Path, data: Path, version: str, variant: str) -> None:
    """Version, handlers, CDI and cgroup driver come over the API, the rest from its file."""
    install(root, data, version, variant)
    with fake_crio.containerd(root / SOCKET, data, version, variant):
        host = look()

    (runtime,) = host.runtimes
    assert host.problems == ()
    assert (runtime.key, runtime.kind) == ("containerd", "containerd")
    assert runtime.version_tuple == tuple(map(int, version.split(".")))
    assert runtime.get("handlers") == {"runc": {"type": "io.containerd.runc.v2", "path": ""}}
    assert runtime.get("default_handler") == "runc"
    assert runtime.get("pod_annotations") == (["cdi.example/*"] if variant == "podann" else [])
    assert runtime.get("cdi_enabled") is (version != "1.6.20")
    assert runtime.get("cdi_spec_dirs") == (None if version == "1.6.20" else ["/etc/cdi", "/var/run/cdi"])
    assert runtime.get("cgroup_driver") == "cgroupfs"
    assert runtime.get("config") == "/etc/containerd/config.toml"
    assert runtime.get("config_exists") is True
    assert runtime.get("config_version") == (3 if version == "2.1.9" else 2)
    assert runtime.get("imports") == ["/etc/containerd/conf.d/*.toml"]
    assert runtime.get("pid") == os.getpid()


@pytest.mark.parametrize(
    ("version", "variant", "state", "source"),
    [
        ("1.6.20", "plain", "absent", "containerd 1.6.20~ds1 has no NRI of this protocol"),
        (
            "1.7.24",
            "nri-off",
            "off",
            "/etc/containerd/config.toml; /var/run/nri/nri.sock does not exist",
        ),
        ("1.7.24", "nri-on", "on", f"process {os.getpid()} listens at /var/run/nri/nri.sock"),
        (
            "2.1.9",
            "nri-off",
            "off",
            "/etc/containerd/config.toml; /var/run/nri/nri.sock does not exist",
        ),
        ("2.1.9", "nri-on", "on", f"process {os.getpid()} listens at /var/run/nri/nri.sock"),
    ],
    ids=["1.6", "1.7-off", "1.7-on", "2.1-off", "2.1-on"],
)
def test_nri_is_as_it_was_captured(
    look, root: Path, data: Path, version: str, variant: str, state: str, source: str
) -> None:
    """The state and where it was seen."""
    install(root, data, version, variant)
    with fake_crio.containerd(root / SOCKET, data, version, variant):
        if state == "on":
            with fake_crio.listening(root / NRI_SOCKET):
                (runtime,) = look().runtimes
        else:
            (runtime,) = look().runtimes

    assert runtime.get("nri") == state
    assert runtime.facts["nri"].source == source
    assert runtime.problems == ()


@pytest.mark.parametrize(
    ("version", "kind", "variant", "enabled"),
    [
        ("1.7.24", "default", "", False),
        ("1.7.24", "dump", "-nri-off", False),
        ("1.7.24", "dump", "-nri-on", True),
        ("1.7.24", "file", "-nri-off", False),
        ("1.7.24", "file", "-nri-on", True),
        ("2.1.9", "default", "", True),
        ("2.1.9", "dump", "-nri-off", False),
        ("2.1.9", "dump", "-nri-on", True),
        ("2.1.9", "file", "-nri-off", False),
        ("2.1.9", "file", "-nri-on", True),
    ],
)
def test_a_captured_configuration_says_whether_nri_is_enabled(
    root: Path, data: Path, version: str, kind: str, variant: str, enabled: bool
) -> None:
    """As a main file, what was written and what containerd printed agree."""
    put(root, CONFIG, (data / f"containerd-{version}-config-{kind}{variant}.toml").read_text())

    configured, problems = read_files(root, version)

    assert problems == []
    assert (configured.enabled, configured.socket) == (enabled, "/var/run/nri/nri.sock")
    assert configured.connections


@pytest.mark.parametrize("name", ["default", "dump-plain", "dump-podann", "file-plain", "file-podann"])
def test_a_captured_configuration_of_1_6_is_read(root: Path, data: Path, name: str) -> None:
    """Its version and imports are facts, though there is no NRI to configure."""
    put(root, CONFIG, (data / f"containerd-1.6.20-config-{name}.toml").read_text())

    configured, problems = read_files(root, "1.6.20")

    assert problems == []
    assert not configured.enabled


def read_files(root: Path, version: str, main: str = "/etc/containerd/config.toml"):
    """What `learn_from_files` returns, and the problems it noted."""
    from cdi_courier.host.answers import Findings
    from cdi_courier.host.sockets import Candidate

    findings = Findings()
    findings.version = version
    candidate = Candidate("/run/containerd/containerd.sock", "containerd", config=main)
    return containerd.learn_from_files(Root(str(root)), candidate, None, findings), findings.problems


@variants
def test_a_captured_status_says_nothing_of_nri(data: Path, version: str, variant: str) -> None:
    """The CRI alone leaves NRI unknown, whether it was on or off."""
    status = json.loads((data / f"containerd-{version}-status-verbose-{variant}.json").read_text())
    told = json.loads((data / f"containerd-{version}-version.json").read_text())
    responses = {
        "Version": cri.MESSAGES["VersionResponse"].FromString(fake_crio.message("VersionResponse", told)),
        "Status": cri.MESSAGES["StatusResponse"].FromString(fake_crio.message("StatusResponse", status)),
    }

    findings = containerd.learn_from_cri(cri.read(responses))

    assert findings.problems == []
    assert findings.value("default_handler") == "runc"
    assert not {name for name in findings.facts if name.startswith("nri")}


# NRI


@pytest.mark.parametrize(
    ("version", "captured", "text", "expected"),
    [
        ("1.7.24", "nri-off", "version = 2\n", "off"),
        ("1.7.24", "nri-off", None, "off"),
        ("2.1.9", "nri-off", "version = 3\n" + NRI + "disable = true\n", "off"),
        ("2.1.9", "nri-off", 'disabled_plugins = ["io.containerd.nri.v1.nri"]\nversion = 3\n', "off"),
        ("2.1.9", "nri-on", "version = 3\n" + NRI + "disable_connections = true\n", "on"),
    ],
    ids=["1.7-default", "1.7-no-file", "2.1-disabled", "2.1-plugin-disabled", "2.1-no-connections"],
)
def test_without_a_socket_the_configuration_decides(
    look, root: Path, data: Path, version: str, captured: str, text: str | None, expected: str
) -> None:
    """Where the file and the absent socket agree, the state is known."""
    if text is not None:
        put(root, CONFIG, text)
    with fake_crio.containerd(root / SOCKET, data, version, captured):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == expected
    assert runtime.problems == ()
    assert runtime.get("nri_connections") is (expected == "off")


def test_a_file_that_enables_nri_is_not_believed_without_a_socket(look, root: Path, data: Path) -> None:
    """A daemon not restarted since the file was changed has NRI off, or elsewhere: unknown, and said."""
    put(root, CONFIG, "version = 2\n" + NRI + "disable = false\n")
    with fake_crio.containerd(root / SOCKET, data, "1.7.24", "nri-off"):
        (runtime,) = look().runtimes

    assert runtime.get("nri") is None
    (problem,) = runtime.problems
    assert problem.startswith(
        "HST106: /etc/containerd/config.toml enables NRI, but /var/run/nri/nri.sock does not exist"
    )
    assert "not restarted" in problem


def test_a_stale_nri_socket_is_not_on(look, root: Path, data: Path) -> None:
    """The socket's file stays after a stop; only one that accepts counts."""
    install(root, data, "2.1.9", "nri-on")
    fake_crio.stale(root / NRI_SOCKET)
    with fake_crio.containerd(root / SOCKET, data, "2.1.9", "nri-on"):
        (runtime,) = look().runtimes

    assert runtime.get("nri") is None
    assert "nobody listens at /var/run/nri/nri.sock" in runtime.problems[0]


def test_another_s_nri_socket_is_not_this_runtime_s(look, root: Path, data: Path, stranger: int) -> None:
    """A second runtime's socket at the default path proves nothing, and is named."""
    install(root, data, "2.1.9", "nri-on")
    with fake_crio.containerd(root / SOCKET, data, "2.1.9", "nri-on"):
        (runtime,) = look().runtimes

    assert runtime.get("nri") is None
    assert f"process {stranger}, which is not this containerd, listens" in runtime.problems[0]


def test_another_s_nri_socket_leaves_a_disabled_one_off(look, root: Path, data: Path, stranger: int) -> None:
    """containerd beside a CRI-O with NRI: the file is believed."""
    install(root, data, "1.7.24", "nri-off")
    with fake_crio.containerd(root / SOCKET, data, "1.7.24", "nri-off"):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == "off"
    assert runtime.problems == ()


def test_the_running_daemon_is_believed_over_its_file(look, root: Path, data: Path) -> None:
    """NRI is on as long as the daemon listens, and that a restart ends it is said."""
    install(root, data, "1.7.24", "nri-off")
    with (
        fake_crio.containerd(root / SOCKET, data, "1.7.24", "nri-on"),
        fake_crio.listening(root / NRI_SOCKET),
    ):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == "on"
    (problem,) = runtime.problems
    assert problem == (
        "HST106: NRI is on, but /etc/containerd/config.toml disables it "
        "(a restart of containerd would turn it off)"
    )


def test_the_configured_socket_is_the_one_that_is_tried(look, root: Path, data: Path) -> None:
    """``socket_path`` of an imported file, with the files that say so as source."""
    install(root, data, "2.1.9", "nri-on")
    put(root, "etc/containerd/conf.d/10-nri.toml", NRI + 'socket_path = "/run/other.sock"\n')
    with (
        fake_crio.containerd(root / SOCKET, data, "2.1.9", "nri-on"),
        fake_crio.listening(root / "run/other.sock"),
    ):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == "on"
    assert runtime.get("nri_socket") == "/run/other.sock"
    assert runtime.facts["nri_socket"].source == (
        "/etc/containerd/config.toml, /etc/containerd/conf.d/10-nri.toml"
    )


def test_a_disabled_nri_plugin_is_seen_by_introspection(look, root: Path, data: Path) -> None:
    """A containerd that could have NRI but does not list the plugin has it off."""
    captured = fake_crio.containerd(root / SOCKET, data, "2.1.9", "nri-on")
    plugins = json.loads((data / "containerd-2.1.9-introspection-nri-on.json").read_text())
    plugins = [plugin for plugin in plugins if plugin["type"] != "io.containerd.nri.v1"]
    captured.grpc_answers["/containerd.services.introspection.v1.Introspection/Plugins"] = fake_crio.message(
        "PluginsResponse", {"plugins": plugins}
    )
    with captured:
        (runtime,) = look().runtimes

    assert runtime.get("nri") == "off"
    assert "introspection" in runtime.facts["nri"].source


def test_a_containerd_without_cri_is_described_by_its_own_api(look, root: Path, data: Path) -> None:
    """Debian's containerd beside Docker has the CRI plugin disabled: a version, and why nothing more."""
    install(root, data, "2.1.9", "nri-off")
    captured = fake_crio.containerd(root / SOCKET, data, "2.1.9", "nri-off")
    for method in [name for name in captured.grpc_answers if name.startswith("/runtime.v1.")]:
        del captured.grpc_answers[method]
    with captured:
        (runtime,) = look().runtimes

    assert runtime.version.startswith("2.1.9")
    assert runtime.get("handlers") is None
    assert runtime.problems == (
        "HST104: /run/containerd/containerd.sock serves no CRI (containerd's CRI plugin is disabled)",
    )


# Its files


@pytest.mark.parametrize(
    ("version", "main", "imported", "enabled", "socket"),
    [
        ("1.7.24", NRI + 'socket_path = "/a"\n', NRI + "disable = false\n", True, "/var/run/nri/nri.sock"),
        ("2.1.9", NRI + 'socket_path = "/a"\n', NRI + "disable = false\n", True, "/a"),
        ("1.7.24", NRI + "disable = false\n", NRI + 'socket_path = "/b"\n', False, "/b"),
        ("2.1.9", NRI + "disable = true\n", NRI + 'socket_path = "/b"\n', False, "/b"),
        ("2.1.9", NRI + "disable = true\n", NRI + "disable = false\n", True, "/var/run/nri/nri.sock"),
        ("2.1.9", NRI + 'socket_path = "/a"\n', NRI + 'socket_path = ""\n', True, "/var/run/nri/nri.sock"),
        ("1.7.24", "", "[grpc]\n", False, "/var/run/nri/nri.sock"),
    ],
    ids=["1-replaces", "2-joins", "1-forgets", "2-keeps", "2-overrides", "2-empties", "1-other-table"],
)
def test_imports_are_merged_as_that_version_does(
    root: Path, version: str, main: str, imported: str, enabled: bool, socket: str
) -> None:
    """containerd 1 replaces a plugin's table by an import's, containerd 2 merges the two."""
    put(root, CONFIG, 'version = 2\nimports = ["conf.d/*.toml"]\n' + main)
    put(root, "etc/containerd/conf.d/10.toml", "version = 2\n" + imported)

    configured, problems = read_files(root, version)

    assert problems == []
    assert (configured.enabled, configured.socket) == (enabled, socket)


@pytest.mark.parametrize(
    ("version", "text", "enabled"),
    [
        ("1.7.24", "[plugins.nri]\ndisable = false\n", True),
        ("1.7.24", NRI + "disable = false\n", False),
        ("2.1.9", "[plugins.nri]\ndisable = true\n", True),
        ("2.1.9", NRI + "disable = true\n", False),
    ],
    ids=["1-bare", "1-qualified", "2-bare", "2-qualified"],
)
def test_a_file_without_a_version_is_of_version_1(root: Path, version: str, text: str, enabled: bool) -> None:
    """containerd 1 knows the plugin by its bare name there, containerd 2 takes that for another plugin."""
    put(root, CONFIG, text)

    configured, problems = read_files(root, version)

    assert problems == []
    assert configured.enabled is enabled


def test_later_files_win_and_hidden_ones_count(root: Path) -> None:
    """Imports come in order of their names, also those that a shell would not match."""
    put(root, CONFIG, 'version = 2\nimports = ["conf.d/*.toml"]\n')
    put(root, "etc/containerd/conf.d/10.toml", NRI + 'socket_path = "/ten"\n')
    put(root, "etc/containerd/conf.d/20.toml", NRI + 'socket_path = "/twenty"\n')
    put(root, "etc/containerd/conf.d/.30.toml", NRI + "disable = true\n")

    configured, _ = read_files(root, "2.1.9")

    assert (configured.enabled, configured.socket) == (False, "/twenty")
    assert configured.source.count("conf.d/") == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version = 2\n[", "HST105: /etc/containerd/config.toml is not TOML"),
        ('version = "two"\n', "version is not a whole number"),
        ("version = 2\nimports = 7\n", "imports is not an array of strings"),
        (NRI.replace("[", "version = 2\n[", 1) + 'disable = "no"\n', "disable is not true or false"),
        ('version = 2\nimports = ["gone.toml"]\n', "gone.toml, which /etc/containerd/config.toml imports"),
        ("a = " + "[" * 5000, "is not TOML"),
    ],
    ids=["syntax", "version", "imports", "type", "missing-import", "depth"],
)
def test_a_file_that_containerd_would_refuse_decides_nothing(root: Path, text: str, problem: str) -> None:
    """NRI stays unknown, and what is wrong with the file is said."""
    put(root, CONFIG, text)

    configured, problems = read_files(root, "2.1.9")

    assert configured is None
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_broken_import_is_named(root: Path) -> None:
    """containerd 2 does not name the file itself."""
    put(root, CONFIG, 'version = 3\nimports = ["conf.d/*.toml"]\n')
    put(root, "etc/containerd/conf.d/10.toml", "not toml")

    configured, problems = read_files(root, "2.1.9")

    assert configured is None
    assert problems[0].startswith("HST105: /etc/containerd/conf.d/10.toml is not TOML")


def test_imports_in_a_circle_are_read_once(root: Path) -> None:
    """Each file counts once, as in containerd."""
    put(root, CONFIG, 'version = 2\nimports = ["b.toml"]\n')
    put(
        root,
        "etc/containerd/b.toml",
        'version = 2\nimports = ["config.toml", "b.toml"]\n' + NRI + "disable = false",
    )

    configured, problems = read_files(root, "1.7.24")

    assert problems == []
    assert configured.source == "/etc/containerd/config.toml, /etc/containerd/b.toml"
    assert configured.enabled


@pytest.mark.parametrize("how", ["glob", "names"])
def test_endless_imports_are_refused(root: Path, how: str) -> None:
    """More files than anybody has are not read to the end."""
    names = [f"{number}.toml" for number in range(300)]
    for name in names:
        put(root, f"etc/containerd/conf.d/{name}", "version = 2\n")
    imports = ["conf.d/*.toml"] if how == "glob" else [f"conf.d/{name}" for name in names[:250]]
    put(root, CONFIG, f"version = 2\nimports = {json.dumps(imports)}\n")
    if how == "names":
        put(root, "etc/containerd/conf.d/0.toml", f"version = 2\nimports = {json.dumps(names[250:])}\n")

    configured, problems = read_files(root, "2.1.9")

    assert configured is None
    assert "more than 256 files" in problems[0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"#" * (1 << 21)), "is larger than 1048576 bytes"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not TOML"),
    ],
    ids=["pipe", "folder", "loop", "huge", "not-utf-8"],
)
def test_what_is_no_file_is_not_waited_for(root: Path, make, problem: str) -> None:
    """A main file that cannot be read is a problem in words."""
    (root / "etc/containerd").mkdir()
    make(root / CONFIG)

    configured, problems = read_files(root, "2.1.9")

    assert configured is None
    assert problem in problems[0]


# Distributions


@pytest.mark.parametrize(
    ("name", "version", "template"),
    [
        ("k3s", "2.1.9", "config-v3.toml.tmpl"),
        ("rke2", "2.1.9", "config-v3.toml.tmpl"),
        ("k3s", "1.7.24", "config.toml.tmpl"),
    ],
)
def test_k3s_and_rke2_are_told_apart_by_the_command_line(
    look, root: Path, data: Path, name: str, version: str, template: str
) -> None:
    """Both use one socket; the configuration that containerd was started with says whose it is."""
    folder = f"/var/lib/rancher/{name}/agent/etc/containerd"
    process = root / f"proc/{os.getpid()}"
    process.mkdir()
    (process / "cmdline").write_bytes(f"containerd\0-c\0{folder}/config.toml\0-a\0/run/x\0".encode())
    put(root, f"{folder[1:]}/config.toml", "version = 2\n" + NRI + "disable = true\n")
    with fake_crio.containerd(root / "run/k3s/containerd/containerd.sock", data, version, "nri-off"):
        (runtime,) = look().runtimes

    assert runtime.problems == ()
    assert runtime.key == "containerd"
    assert runtime.get("distribution") == name
    assert runtime.get("config") == f"{folder}/config.toml"
    assert runtime.get("config_template") == f"{folder}/{template}"
    assert runtime.get("nri") == "off"


def test_a_k3s_socket_of_nobody_known_has_no_configuration(look, root: Path, data: Path) -> None:
    """Without a command line and with both folders, neither is guessed."""
    for name in ("k3s", "rke2"):
        (root / f"var/lib/rancher/{name}/agent/etc/containerd").mkdir(parents=True)
    with fake_crio.containerd(root / "run/k3s/containerd/containerd.sock", data, "2.1.9", "nri-off"):
        (runtime,) = look().runtimes

    assert runtime.get("distribution") is None
    assert runtime.get("config") is None
    assert runtime.get("nri") is None


def test_two_containerds_are_two_runtimes(look, root: Path, data: Path) -> None:
    """Each goes by its endpoint, with a version and a configuration of its own."""
    put(root, CONFIG, "version = 2\n" + NRI + "disable = true\n")
    with (
        fake_crio.containerd(root / SOCKET, data, "1.7.24", "nri-off"),
        fake_crio.containerd(root / "run/k0s/containerd.sock", data, "2.1.9", "nri-off"),
    ):
        runtimes = {runtime.key: runtime for runtime in look().runtimes}

    assert set(runtimes) == {"/run/containerd/containerd.sock", "/run/k0s/containerd.sock"}
    assert runtimes["/run/containerd/containerd.sock"].version == "1.7.24~ds1"
    assert runtimes["/run/containerd/containerd.sock"].get("config") == "/etc/containerd/config.toml"
    assert runtimes["/run/k0s/containerd.sock"].get("distribution") == "k0s"
    assert runtimes["/run/k0s/containerd.sock"].get("config") == "/etc/k0s/containerd.toml"


def test_a_cri_o_at_containerd_s_socket_is_a_cri_o(look, root: Path, data: Path) -> None:
    """What answers decides the kind, not where it listens."""
    with fake_crio.crio(root / SOCKET, data, variant="nri-off"):
        (runtime,) = look().runtimes

    assert (runtime.key, runtime.kind) == ("cri-o", "cri-o")
    assert runtime.get("nri") == "off"
    assert runtime.problems == ()


def test_the_validator_is_read(root: Path) -> None:
    """Of a validator that is on, the switches that are on; an import's list replaces the main one."""
    validator = '[plugins."io.containerd.nri.v1.nri".default_validator]\n'
    put(
        root,
        CONFIG,
        f'version = 3\nimports = ["a.toml"]\n{validator}enable = true\nreject_oci_hook_adjustment = true\n'
        'reject_namespace_adjustment = false\nrequired_plugins = ["one"]\n',
    )
    put(root, "etc/containerd/a.toml", f'version = 3\n{validator}required_plugins = ["two"]\n')

    configured, _ = read_files(root, "2.2.1")
    older, _ = read_files(root, "2.1.9")

    assert configured.validator == {"enable": True, "reject_oci_hook_adjustment": True}
    assert configured.required == ["two"]
    assert (older.validator, older.required) == ({}, [])


def test_a_configured_socket_of_a_distribution_keeps_its_layout(look, root: Path, data: Path) -> None:
    """``[runtimes.containerd] endpoint`` at k3s' socket: the configuration is k3s'."""
    folder = "/var/lib/rancher/k3s/agent/etc/containerd"
    put(root, f"{folder[1:]}/config.toml", "version = 3\n")
    path = "/run/k3s/containerd/containerd.sock"
    with fake_crio.containerd(root / path[1:], data, "2.1.9", "nri-off"):
        (runtime,) = look({"containerd": Override(endpoint=path)}).runtimes

    assert runtime.key == "containerd"
    assert runtime.get("distribution") == "k3s"
    assert runtime.get("config") == f"{folder}/config.toml"


@pytest.mark.parametrize("state", ["nri-off", "nri-on"])
def test_a_socket_that_may_not_be_looked_at_proves_nothing(root: Path, data: Path, state: str) -> None:
    """Without permission, a file that enables NRI leaves it unknown; one that disables it is believed."""
    from cdi_courier.host.answers import Findings

    install(root, data, "1.7.24", state)
    (root / NRI_SOCKET).parent.mkdir()
    (root / NRI_SOCKET).symlink_to("/" + "a" * 300)  # cannot be connected to, for everybody
    configured, _ = read_files(root, "1.7.24")
    findings = Findings()
    findings.version = "1.7.24"

    containerd.learn_nri(Root(str(root)), findings, 1, None, configured, 5)

    assert findings.value("nri") == ("off" if state == "nri-off" else None)
    assert [problem[:6] for problem in findings.problems] == ([] if state == "nri-off" else ["HST104"])
