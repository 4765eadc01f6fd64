"""Settings that change all the time under load: an answer is one of before or of after, never of both."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path

from support.daemon import Daemon
from support.nri_soak import SoakRuntime, template

KEY = "nvidia.cdi.k8s.io"
GPU = "vendor.com/gpu"
EVERY = 0.05  # seconds between two reloads
RELOADS = 80
BATCH = 90

RULE = '[[policy.rules]]\naction = "allow"\nnamespaces = ["team"]\ndevices = ["{}={}"]\n'

# What the settings `x` and `y` make of a container. Half of the one and half of the other would be a device
# that may be had and is not known, or one that comes in the way of the other.
ANSWERS = {
    "asks x": {"edits", "POL001"},
    "asks y": {"POL001", "names"},
    "asks both": {"POL001"},
    "plain": {""},
}


def test_reloads_all_the_time_fail_no_container_and_mix_no_settings(tmp_path: Path) -> None:
    """SIGHUP every 50 ms: folders, rules and delivery change together, the session stays, all get answers."""
    socket_path = str(tmp_path / "nri.sock")
    daemon = Daemon(tmp_path, socket_path)
    folders = {name: tmp_path / f"cdi-{name}" for name in "xy"}
    for name, folder in folders.items():
        folder.mkdir()
        daemon.write_spec(GPU, {name: {"env": [f"{name.upper()}=1"]}}, folder)
    ended = threading.Event()
    done = itertools.count(1)
    reloads = 0

    def configure(name: str) -> None:
        delivery = {"x": "edits", "y": "names"}[name]
        daemon.configure(RULE.format(GPU, name), cdi=folders[name], delivery=delivery)

    def reload() -> None:
        nonlocal reloads
        for name in itertools.cycle("yx"):
            configure(name)
            daemon.hang_up()
            reloads = next(done)
            if ended.wait(EVERY):
                return

    kinds = {
        "asks x": template({KEY: f"{GPU}=x"}, "team"),
        "asks y": template({KEY: f"{GPU}=y"}, "team"),
        "asks both": template({KEY: f"{GPU}=x,{GPU}=y"}, "team"),
        "plain": template({}, "team"),
    }
    found: Counter[tuple[str, str]] = Counter()
    configure("x")
    with SoakRuntime(socket_path, kinds) as runtime, daemon.courier as courier:
        runtime.connect()
        thread = threading.Thread(target=reload)
        thread.start()
        try:
            while reloads < RELOADS:
                found += runtime.ask(itertools.islice(itertools.cycle(kinds), BATCH))
        finally:
            ended.set()
            thread.join()
        session = daemon.session()
        log = courier.log()

    verdicts = {kind: {verdict for asked, verdict in found if asked == kind} for kind in kinds}
    assert verdicts == ANSWERS
    assert sum(found.values()) == runtime.asked
    assert session["sessions"] == 1
    assert log.count("settings read again") > RELOADS / 2  # two signals that wait may be one
    assert "SET030" not in log
    assert "Traceback" not in log
