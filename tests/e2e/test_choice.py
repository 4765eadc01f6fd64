"""The daemon beside a real containerd: what it chooses, when it says so, and what doctor makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from support.containerd import SUITES_1_7
from support.courier import Courier
from support.lab import Lab
from support.packages import Packages
from support.scenario import ALL, GRANTED_NAMESPACE, annotated, devices_of, run, spec

pytestmark = pytest.mark.runtime


def told(lab: Lab) -> dict[str, dict[str, Any]]:
    """Settings that know where the lab's containerd is, look often, and let the choice decide."""
    config = next(lab.containerd.socket.parent.glob("*.toml"))
    return {
        "runtimes": {"containerd": {"endpoint": str(lab.containerd.socket), "config": str(config)}},
        "probe": {"interval": 1.0},
        "nri": {"delivery": "auto"},
    }


def doctor(courier: Courier, *arguments: str) -> tuple[int, Mapping[str, Any]]:
    argv = [
        sys.executable,
        "-m",
        "cdi_courier",
        "--config",
        str(courier.settings),
        "doctor",
        "--json",
        *arguments,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, json.loads(done.stdout)


def test_a_runtime_that_appears_is_described_chosen_and_served(lab: Lab) -> None:
    """Without a runtime the daemon waits and says so; with one it says what it chose, and pods are served."""
    lab.write_spec("all.json", spec(all={}))
    lab.containerd.stop()
    courier = lab.courier(told(lab))
    courier.start()
    courier.wait_for_log("waiting for it")
    before, report = doctor(courier)
    assert before == 1
    assert report["daemon"]["pid"] == courier.process.pid  # type: ignore[union-attr]

    lab.containerd.start()
    courier.wait_for_log("served by nri: NRI is on; delivering by names")
    courier.wait_for_log(lambda line: "delivering by names" in line and "cdi_courier.nri" in line)
    container = run(lab, annotated(lab, container_c1=ALL))
    after, report = doctor(courier)

    assert devices_of(lab, container) == {"ALL"}
    assert after == 0
    (runtime,) = [r for r in report["runtimes"] if r["kind"] == "containerd"]
    assert (runtime["active"], runtime["recommended"]) == ("nri", "nri")
    assert runtime["session"]["state"] == "active"
    assert runtime["session"]["counts"]["injected"] == 1
    assert runtime["facts"]["nri"]["source"]
    assert courier.stop() == 0


def test_doctor_works_without_a_daemon_and_touches_nothing_unasked(lab: Lab) -> None:
    """The report is the same but for the session; only with --probe does the runtime see a plugin."""
    lab.write_spec("all.json", spec(all={}))
    courier = lab.courier(told(lab))
    seen = lab.containerd.log_file.stat().st_size

    quiet = doctor(courier)
    untouched = lab.containerd.log_file.read_text(errors="replace")[seen:]
    probed = doctor(courier, "--probe")
    touched = lab.containerd.log_file.read_text(errors="replace")[seen:]

    assert (quiet[0], quiet[1]["daemon"]) == (1, None)
    assert "cdi-courier run" in " ".join(quiet[1]["next"])
    assert "cdi-courier-probe" not in untouched
    assert "cdi-courier-probe" in touched
    (runtime,) = [r for r in probed[1]["runtimes"] if r["kind"] == "containerd"]
    assert runtime["probe"].startswith("nri: containerd ")


def test_a_runtime_given_to_another_backend_is_left_alone(lab: Lab) -> None:
    """What [runtimes] demands counts from the first container on, and doctor says that nobody serves it."""
    lab.write_spec("all.json", spec(all={}))
    tables = told(lab)
    tables["runtimes"]["containerd"]["backend"] = "oci_hook"
    courier = lab.courier(tables)
    courier.start()
    courier.wait_for_log("this runtime's containers are left alone: ")

    container = run(lab, annotated(lab, container_c1=ALL))

    assert devices_of(lab, container) == set()
    code, report = doctor(courier)
    assert code == 1
    (runtime,) = [r for r in report["runtimes"] if r["kind"] == "containerd"]
    assert (runtime["active"], runtime["session"]["state"]) == (None, "idle")
    assert "[runtimes] demands oci_hook" in runtime["reason"]


def test_containerd_1_7_with_nri_off_is_told_what_to_do(packages: Packages) -> None:
    """It is not served, and the way to serve it is recommended with what that needs."""
    with Lab(SUITES_1_7, packages=packages, nri=False) as lab:
        lab.write_spec("all.json", spec(all={}))
        courier = lab.courier(told(lab))
        courier.start()
        courier.wait_for_log("no backend can serve now")

        code, report = doctor(courier)

    assert code == 1
    (runtime,) = [r for r in report["runtimes"] if r["kind"] == "containerd"]
    assert (runtime["active"], runtime["recommended"]) == (None, "nri")
    assert runtime["facts"]["nri"]["value"] == "off"
    assert "cdi-courier install --backend nri --runtime containerd" in report["next"]
    assert GRANTED_NAMESPACE in json.dumps(report["policy"])
