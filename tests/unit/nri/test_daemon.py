"""The whole daemon beside an NRI runtime in Python: what it did, told alike by status, metrics and log."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.courier import Courier
from support.nri_runtime import NriRuntime, container, pod
from support.waiting import wait_for

KEY = "nvidia.cdi.k8s.io"


def scrape(path: Path) -> dict[tuple[str, str], float]:
    """(metric without prefix, its one other label than the socket) → value."""
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        (
            s.name.removeprefix("cdi_courier_"),
            next((v for k, v in s.labels.items() if k != "socket"), ""),
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name.startswith("cdi_courier_")
    }


class Host:
    """A daemon, its runtime and its files."""

    def __init__(self, folder: Path, socket_path: str) -> None:
        self.folder = folder
        self.cdi = folder / "cdi"
        self.cdi.mkdir()
        self.conf = folder / "config.toml"
        self.socket_path = socket_path
        self.metrics = folder / "m"
        self.write_settings()
        self.courier = Courier(self.conf, folder / "log")

    def write_settings(self, more: str = "", **nri: Any) -> None:
        nri = {"sockets": [self.socket_path], "delivery": "edits", **nri}
        lines = [f"{key} = {json.dumps(value)}" for key, value in nri.items()]
        self.conf.write_text(
            f'[cdi]\ndirs = ["{self.cdi}"]\ntrust = "any"\n'
            f'[service]\nstate_dir = "{self.folder}/s"\nlog_format = "json"\n'
            f'[metrics]\nlisten = "unix:{self.metrics}"\n'
            "[nri]\n" + "\n".join(lines) + f"\n{more}\n"
        )

    def spec(self, **devices: dict[str, Any]) -> None:
        made = [{"name": n, "containerEdits": e or {"env": ["A=b"]}} for n, e in devices.items()]
        document = {"cdiVersion": "0.7.0", "kind": "vendor.com/gpu", "devices": made}
        (self.cdi / "v.json").write_text(json.dumps(document))

    def status(self) -> tuple[int, dict[str, Any]]:
        argv = [sys.executable, "-m", "cdi_courier", "--config", str(self.conf), "status", "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, json.loads(done.stdout)

    def session(self) -> dict[str, Any]:
        (found,) = [e for e in self.status()[1]["runtimes"].values() if e.get("socket") == self.socket_path]
        return found

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.courier.log().splitlines()]

    def reload(self, words: str) -> None:
        mark = self.courier.mark()
        assert self.courier.process is not None
        self.courier.process.send_signal(signal.SIGHUP)
        self.courier.wait_for_log(words, since=mark)


@pytest.fixture
def host(tmp_path: Path, path: str) -> Iterator[Host]:
    """A host whose daemon is not started yet; whatever is left of it ends."""
    made = Host(tmp_path, path)
    yield made
    made.courier.stop()


def asks(value: str, name: str = "p", namespace: str = "gpu-operator") -> Any:
    return pod(name, namespace, **{KEY: value})


def test_status_metrics_and_log_tell_the_same_numbers(host: Host, path: str) -> None:
    """Every container that was asked about is in each of them, under the verdict and cause that it had."""
    host.spec(a={}, b={}, lossy={"additionalGids": [44]})
    listed = asks("vendor.com/gpu=a", "early"), container("c0", "early")
    with NriRuntime(path, listed=[([listed[0]], [listed[1]])]) as runtime, host.courier as courier:
        runtime.plugin()
        # The audit runs once the runtime has its answer.
        courier.wait_for_log("missed gpu-operator/early/c0")
        errors = [
            runtime.create_container(asked, container(of=asked.id)).error.partition(":")[0]
            for asked in (
                *[asks("vendor.com/gpu=a,vendor.com/gpu=b", f"p{n}") for n in range(3)],
                *[asks("vendor.com/gpu=a", f"d{n}", "default") for n in range(2)],
                asks("vendor.com/gpu=none"),
                asks("vendor.com/gpu=lossy"),
                asks("x"),
                *[pod(f"plain{n}") for n in range(4)],
            )
        ]
        courier.wait_for_log("refused gpu-operator/p/c0: ANN001")
        code, report = host.status()
        session = host.session()
        scraped = scrape(host.metrics)
    logged = [line for line in host.logged() if "verdict" in line]

    refused = {"POL001": 2, "CDI012": 1, "DLV001": 1, "ANN001": 1}
    assert Counter(errors) == {"": 7, **refused}
    assert code == 0
    assert session["counts"] == {
        "requests": 12,
        "injected": 3,
        "skipped": 0,
        "refused": 5,
        "unresolved": 1,
        "undeliverable": 1,
        "missed": 1,
    }
    assert session["refusals"] == refused
    assert {code: scraped["refusals_total", code] for code in refused} == refused
    assert session["kinds"] == {"vendor.com/gpu": 6}
    assert scraped["injected_devices_total", "vendor.com/gpu"] == 6
    numbers = {
        "requests_total": 12,
        "injections_total": 3,
        "unresolved_total": 1,
        "undeliverable_total": 1,
        "missed_containers": 1,
        "reconnects_total": 0,
        "request_duration_seconds_count": 12,
        "registry_files": 1,
        "registry_devices": 3,
    }
    assert {name: scraped[name, ""] for name in numbers} == numbers
    assert scraped["session_state", "active"] == 1
    assert sum(session["latency"]["counts"]) == 12
    assert 0 < session["latency"]["p50"] <= session["latency"]["p99"]
    assert Counter(line["verdict"] for line in logged) == {"injected": 3, "refused": 5, "missed": 1}
    assert Counter(line["code"] for line in logged if line["verdict"] == "refused") == refused
    assert Counter(d["verdict"] for d in report["decisions"]) == {"injected": 3, "refused": 5}
    injected = next(line for line in logged if line["verdict"] == "injected")
    assert (injected["namespace"], injected["pod"], injected["container"]) == ("gpu-operator", "p0", "c0")
    assert injected["rule"] == "the built-in rule"
    assert injected["devices"] == "vendor.com/gpu=a,vendor.com/gpu=b"
    assert 0 < injected["duration"] < 10


def test_a_reload_changes_answers_and_no_session(host: Host, path: str) -> None:
    """From the next container on the new rules count; the runtime has the same plugin as before."""
    host.spec(a={})
    with NriRuntime(path) as runtime, host.courier:
        peer = runtime.plugin()
        ask = asks("vendor.com/gpu=a", namespace="team")
        before = runtime.create_container(ask, container()).error.partition(":")[0]
        host.write_settings('[[policy.rules]]\naction = "allow"\nnamespaces = ["team"]')
        host.reload("changed: policy.rules")
        allowed = runtime.create_container(ask, container()).error
        host.write_settings("[policy]\ndefault = 1")
        host.reload("SET030: the settings stay as they were: SET004: ")
        still = runtime.create_container(ask, container()).error
        host.write_settings(plugin_index="11")
        host.reload("SET031: nri.plugin_index: changed")
        after = runtime.create_container(ask, container()).error.partition(":")[0]
        session = host.session()

        assert runtime.active() == [peer]
    assert (before, allowed, still, after) == ("POL001", "", "", "POL001")
    assert (session["sessions"], session["counts"]["requests"]) == (1, 4)


def test_a_reload_takes_other_spec_folders_and_deliveries(host: Host, path: str) -> None:
    """So do what is known of devices and how they are sent."""
    host.spec(a={})
    with NriRuntime(path) as runtime, host.courier:
        runtime.plugin()
        (edits,) = runtime.create_container(asks("vendor.com/gpu=a"), container()).adjustments
        host.write_settings(delivery="names")
        host.reload("changed: nri.delivery")
        (names,) = runtime.create_container(asks("vendor.com/gpu=a"), container()).adjustments
        host.cdi = host.folder / "other"
        host.cdi.mkdir()
        host.write_settings(delivery="names")
        host.reload("changed: cdi.dirs")
        gone = runtime.create_container(asks("vendor.com/gpu=a"), container()).error

    assert [pair.key for pair in edits.env] == ["A"]
    assert [device.name for device in names.cdi_devices] == ["vendor.com/gpu=a"]
    assert gone.startswith("CDI014: ")


def test_many_reloads_lose_no_container(host: Host, path: str) -> None:
    """Each of many containers is answered by the settings of before or after, while they keep changing."""
    host.spec(a={})
    with NriRuntime(path) as runtime, host.courier as courier:
        runtime.plugin()
        assert courier.process is not None
        results = []
        for number in range(60):
            if number % 3 == 0:
                host.write_settings('[policy]\ndefault = "allow"' if number % 2 else "")
                courier.process.send_signal(signal.SIGHUP)
            creation = runtime.create_container(asks("vendor.com/gpu=a", namespace="team"), container())
            results.append((creation.error.partition(":")[0], len(creation.adjustments), creation.dropped))
        wait_for(lambda: host.session()["counts"]["requests"] == 60, 10, "the last to be counted")
        session = host.session()

    assert {(error, given) for error, given, _ in results} <= {("", 1), ("POL001", 0)}
    assert all(dropped == [] for _, _, dropped in results)
    assert session["sessions"] == 1
    assert session["counts"]["injected"] + session["counts"]["refused"] == 60


def test_the_service_manager_learns_that_a_daemon_without_a_runtime_is_ready(
    host: Host, tmp_path: Path
) -> None:
    """Ready means that it serves or waits: a runtime that is ordered after it must be able to start."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        manager.settimeout(20)
        host.courier.env |= {"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "600000"}
        host.courier.start()
        told = [manager.recv(4096).decode()]
        while "waiting: NRI001" not in told[-1]:
            told.append(manager.recv(4096).decode())
        host.courier.stop()
        while told[-1] != "STOPPING=1":
            told.append(manager.recv(4096).decode())

    assert told[0].startswith("READY=1\nSTATUS=0 of 1 connected, 0 injected, 0 refused")
    assert all(message.endswith("\nWATCHDOG=1") for message in told[1:-1])
