"""The plugin as real containerds launch it themselves, from their plugin directory."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import host
from support.lab import Lab
from support.scenario import ALL, HOSTS, annotated, devices_of, marker, on_host, run, spec
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

MAIN = "from cdi_courier_nri.launched import main; main()"
STOPPED = 10.0  # seconds a plugin may outlive its runtime


@pytest.fixture(params=HOSTS)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Every host in turn, clean; without its plugin afterwards."""
    for lab in on_host(request, request.param):
        yield lab
        plugin_of(lab).unlink(missing_ok=True)
        lab.containerd.restart()


def plugin_of(lab: Lab) -> Path:
    return lab.containerd.root / "nri/plugins/10-cdi-courier"


def install(lab: Lab) -> Path:
    """Put the plugin where the runtime looks at its next start; return the log's path."""
    log = lab.root / "launched.log"
    # The runtime gives it neither an environment nor outputs. What the script adds is what a test needs:
    # settings of its own, a log, and the mark by which whatever is left behind is found.
    environment = {
        "CDI_COURIER_CONFIG": lab.settings(),
        host.MARK: lab.root,
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    exports = "".join(f"export {key}={shlex.quote(str(value))}\n" for key, value in environment.items())
    command = shlex.join([sys.executable, "-c", MAIN])
    script = lab.root / "plugin"
    script.write_text(f"#!/bin/sh\n{exports}exec {command} >> {log} 2>&1\n")
    script.chmod(0o755)
    script.rename(plugin_of(lab))
    return log


def plugins(lab: Lab) -> list[int]:
    """Processes that are the plugin, not what else the lab runs, nor the plugin's look at the host."""

    def is_plugin(pid: int) -> bool:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return b"cdi_courier" in line and b"cdi_courier.host" not in line

    return [pid for pid in host.processes_of(lab.root) if is_plugin(pid)]


def test_a_launched_plugin_serves_the_runtime_s_first_container(lab: Lab) -> None:
    """The runtime waits for it, so no container slips through; it ends with the runtime."""
    lab.write_spec("all.json", spec(all={}))
    pod = annotated(lab, container_c1=ALL, container_c2=ALL)
    log = install(lab)

    lab.containerd.restart()
    container = run(lab, pod)
    during = plugins(lab)
    lab.containerd.stop()
    wait_for(lambda: not plugins(lab), STOPPED, lambda: f"the plugin to end; its log: {log.read_text()}")
    lab.containerd.start()
    again = run(lab, pod, "c2")

    assert devices_of(lab, container) == devices_of(lab, again) == {"ALL"}
    assert marker(lab, container) == f"injected:{ALL}"
    assert len(during) == 1
    assert "delivering by " in log.read_text()


# containerd 1.7 does not start at all when a plugin that it has launched gives up.
@pytest.mark.parametrize("lab", ["2.1-names", "2.1-edits"], indirect=True)
def test_a_launched_plugin_gives_way_to_a_daemon(lab: Lab) -> None:
    """It ends and says why, and the daemon serves on."""
    lab.write_spec("all.json", spec(all={}))
    courier = lab.courier()
    courier.start()
    courier.wait_for_log("synchronized:")
    log = install(lab)
    mark = courier.mark()

    lab.containerd.restart()
    courier.wait_for_log("synchronized:", since=mark)
    container = run(lab, annotated(lab, container_c1=ALL))

    assert devices_of(lab, container) == {"ALL"}
    assert "HST002: " in log.read_text()
    assert courier.process is not None
    assert plugins(lab) == [courier.process.pid]
