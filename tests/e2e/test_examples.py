"""The example plugin, installed as a stranger's would be: wheels in a virtual environment of their own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import fake_crio
from support.bundles import BundleHost, find
from support.courier import Courier
from support.packages import Packages

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "serial"
CAPTURED = REPOSITORY / "tests" / "data" / "runtimes"
BACKEND = "bundle_socket"
PORT = "usb-GPS-if00"
NAME = f"example.com/serial={PORT}"
DOMAIN = "serial.example.com"
_INSTALL = 300.0
_TIMEOUT = 120.0


class Installed:
    """A virtual environment with the core and the example, and settings whose paths are all in one folder."""

    def __init__(self, python: Path, root: Path, disabled: Sequence[str] = ()) -> None:
        self.python = python
        self.root = root
        self.settings = root / "config.toml"
        self.specs = root / "cdi"
        self.specs.mkdir(parents=True)
        self.settings.write_text(
            f"[annotations]\ndialects = {json.dumps(['nvidia'] if disabled else ['nvidia', 'serial'])}\n"
            f"[backends]\ndisabled = {json.dumps(list(disabled))}\n"
            f'[cdi]\ndirs = ["{self.specs}"]\ntrust = "any"\n'
            f'[service]\nstate_dir = "{root}/state"\n'
        )

    def run(self, *argv: str | Path, module: str = "cdi_courier") -> subprocess.CompletedProcess[str]:
        return _run([self.python, "-I", "-m", module, *argv], _TIMEOUT)

    def courier(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("--config", self.settings, *argv)

    def generate(self) -> subprocess.CompletedProcess[str]:
        """Have the generator look at a host with one port, which is in truth the null device."""
        host = self.root / "host"
        (host / "dev/serial/by-id").mkdir(parents=True)
        (host / "dev/serial/by-id" / PORT).symlink_to("../../null")
        os.mknod(host / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        return self.courier("generate", "serial", "--root", host, "--output", self.specs / "serial.yaml")


def _run(argv: Sequence[str | Path], timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CDI_COURIER_")}
    return subprocess.run(
        list(argv),
        cwd="/",
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment into which pip has installed the core and the example as wheels."""
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("device nodes can be made by root only")
    folder = tmp_path_factory.mktemp("stranger")
    # hatchling writes nothing into the sources, so they can be built where they are.
    built = [
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
            cwd=source,
            capture_output=True,
            text=True,
            timeout=_INSTALL,
            check=False,
        )
        for source in (REPOSITORY / "core", EXAMPLE)
    ]
    assert [done.returncode for done in built] == [0, 0], [done.stderr for done in built]
    made = _run([sys.executable, "-m", "venv", folder / "venv"], _INSTALL)
    assert made.returncode == 0, made.stderr
    found = folder / "venv/bin/python"
    wheels = sorted(folder.glob("*.whl"))
    pip = _run([found, "-m", "pip", "install", "--quiet", "pytest", *wheels], _INSTALL)
    assert pip.returncode == 0, pip.stderr
    return found


@pytest.fixture
def installed(python: Path, tmp_path: Path) -> Installed:
    return Installed(python, tmp_path / "plugin")


def test_doctor_lists_the_backend_beside_our_own(installed: Installed) -> None:
    """One that is installed is known without a word in any file of ours, and asked of each runtime."""
    socket = installed.root / "containerd.sock"
    with installed.settings.open("a") as file:
        file.write(f'[runtimes]\ncontainerd = {{ endpoint = "{socket}" }}\n')
    with fake_crio.containerd(socket, CAPTURED, "2.1.9", "nri-on"):
        report = json.loads(installed.courier("doctor", "--json").stdout)

    assert report["backends"] == {BACKEND: {"state": "installed", "problem": ""}}
    offered = {
        runtime["endpoint"]: {offer["backend"] for offer in runtime["offers"]}
        for runtime in report["runtimes"]
    }
    assert str(socket) in offered
    assert all(BACKEND in backends for backends in offered.values())


def test_a_disabled_backend_is_not_imported(python: Path, tmp_path: Path) -> None:
    """``[backends] disabled`` keeps a plugin's code from running at all."""
    disabled = Installed(python, tmp_path / "plugin", disabled=(BACKEND, "serial"))
    report = json.loads(disabled.courier("doctor", "--json").stdout)
    traced = _run(
        [
            python,
            "-I",
            "-X",
            "importtime",
            "-m",
            "cdi_courier",
            "--config",
            disabled.settings,
            "config",
            "check",
        ],
        _TIMEOUT,
    )

    assert report["backends"][BACKEND]["state"] == "disabled"
    assert traced.returncode == 0
    assert "cdi_courier.settings" in traced.stderr
    assert "cdi_courier_serial" not in traced.stderr


def test_the_generator_makes_a_spec_whose_device_the_dialect_resolves(
    installed: Installed, tmp_path: Path
) -> None:
    """A pod's short name leads, through the dialect, to the device that the generator has written down."""
    generated = installed.generate()
    manifest = tmp_path / "pod.json"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "logger", "namespace": "kube-system", "annotations": {DOMAIN: PORT}},
        "spec": {"containers": [{"name": "main", "image": "busybox"}]},
    }
    manifest.write_text(json.dumps(pod))
    (document,) = json.loads(installed.courier("explain", "--json", manifest).stdout)
    (container,) = document["containers"]
    (device,) = container["devices"]
    (edit,) = container["edits"]

    assert generated.returncode == 0, generated.stderr
    assert (device["name"], device["key"], device["verdict"]) == (NAME, DOMAIN, "allowed")
    assert device["file"] == str(installed.specs / "serial.yaml")
    assert (edit["kind"], edit["value"]["path"]) == ("deviceNodes", f"/dev/serial/by-id/{PORT}")


def test_the_generator_and_its_options_are_in_the_help(installed: Installed) -> None:
    """A plugin's generator is a command like our own."""
    listed = installed.courier("generate", "--help").stdout

    assert "serial" in listed
    assert "--root" in installed.courier("generate", "serial", "--help").stdout


def test_the_examples_own_tests_pass_where_it_is_installed(installed: Installed) -> None:
    """The tests that its author ships hold for the wheel that a user installs."""
    with tempfile.TemporaryDirectory() as short:  # a socket's path has 107 bytes at most
        done = installed.run(
            *("-c", EXAMPLE / "pyproject.toml", "--rootdir", EXAMPLE, "-p", "no:cacheprovider"),
            *("--basetemp", f"{short}/its", EXAMPLE / "tests"),
            module="pytest",
        )

    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.fixture
def bundles(packages: Packages) -> Iterator[BundleHost]:
    with BundleHost(packages, "v1") as host:
        yield host


@pytest.fixture
def daemon(installed: Installed) -> Iterator[Courier]:
    """``cdi-courier run`` of the environment, whose only backend is the example's."""
    installed.generate()
    log = installed.root / "log"
    with Courier(installed.settings, log, python=installed.python) as running:
        running.wait_for_log(f"serving with backend {BACKEND}")
        yield running


@pytest.mark.runtime
def test_the_backend_delivers_to_a_container_of_a_real_runc(
    installed: Installed, daemon: Courier, bundles: BundleHost, packages: Packages
) -> None:
    """What the daemon puts into a bundle's config is a device that works in runc's container."""
    runc = find(packages, "runc-1.1")
    node = f"/dev/serial/by-id/{PORT}"
    script = f"[ -c {node} ] && echo hello >{node} && echo works || echo nothing"
    seen = {}
    for who, wanted in (("asking", {DOMAIN: PORT}), ("plain", {})):
        bundle = bundles.bundle(script, wanted)
        asked = _run(
            [
                installed.python.parent / "cdi-bundle",
                "--socket",
                installed.root / "state/bundle.sock",
                bundle,
            ],
            _TIMEOUT,
        )
        assert asked.returncode == 0, asked.stderr
        seen[who] = bundles.run(
            runc, "--root", bundles.root / "runc", "run", "--bundle", bundle, who
        ).stdout.strip()
    refused = bundles.bundle(script, {DOMAIN: "usb-lost"})
    lost = _run(
        [installed.python.parent / "cdi-bundle", "--socket", installed.root / "state/bundle.sock", refused],
        _TIMEOUT,
    )
    status: dict[str, Any] = json.loads(_status(installed))
    (server,) = status["runtimes"].values()

    assert seen == {"asking": "works", "plain": "nothing"}
    assert lost.returncode == 1
    assert "CDI012" in lost.stderr
    assert server["counts"] == {"requests": 3, "injected": 1, "skipped": 0, "refused": 1}


def _status(installed: Installed) -> str:
    code = "import json,sys; from cdi_courier import status; print(json.dumps(status.ask(sys.argv[1])))"
    return _run([installed.python, "-I", "-c", code, installed.root / "state"], _TIMEOUT).stdout
