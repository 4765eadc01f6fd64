"""The Prometheus endpoint: names as Prometheus wants them, numbers as the report has them, who may ask."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import re
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import metrics
from cdi_courier.latency import Histogram
from prometheus_client.parser import text_string_to_metric_families
from support.unix_http import UnixConnection
from support.waiting import wait_for

SOCKET = "/var/run/nri/nri.sock"


def report() -> dict[str, Any]:
    """A report in which every number is another."""
    latency = Histogram()
    for seconds in (0.00007, 0.0002, 0.0002, 3.0):
        latency.add(seconds)
    counts = {
        "requests": 41,
        "injected": 23,
        "refused": 7,
        "skipped": 5,
        "unresolved": 3,
        "undeliverable": 2,
        "missed": 11,
    }
    return {
        "version": "1.2.3",
        "pid": 1,
        "settings": {"files": [], "loaded": 1000.5, "problem": "SET030: x", "restart": []},
        "cdi": {"files": 13, "devices": 17, "errors": 19, "conflicts": 29},
        "table": 2000.25,
        "runtimes": {
            "containerd": {
                "backend": "nri",
                "socket": SOCKET,
                "state": "active",
                "since": 3000.125,
                "counts": counts,
                "refusals": {"POL001": 4, "CDI012": 3},
                "skips": {"POL001": 5},
                "kinds": {"vendor.com/gpu": 31},
                "sessions": 3,
                "latency": latency.report(),
            },
            "podman": {"backend": "oci_hook"},
        },
        "decisions": [{"container": "secret/pod/name"}],
    }


def get(connection: http.client.HTTPConnection, path: str = "/metrics") -> tuple[int, str]:
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[str]:
    """What a scrape of `report` gives."""
    path = tmp_path / "metrics.sock"
    with metrics.serving(f"unix:{path}", report) as trouble:
        assert trouble == ""
        yield get(UnixConnection(path))[1]


def value(text: str, name: str, **labels: str) -> float:
    """The one sample of that name with these labels among its own."""
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found)


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("build_info", {"version": "1.2.3"}, 1),
        ("settings_timestamp_seconds", {}, 1000.5),
        ("settings_reload_failed", {}, 1),
        ("registry_files", {}, 13),
        ("registry_devices", {}, 17),
        ("registry_errors", {}, 19),
        ("registry_conflicts", {}, 29),
        ("table_timestamp_seconds", {}, 2000.25),
        ("requests_total", {"socket": SOCKET}, 41),
        ("injections_total", {"socket": SOCKET}, 23),
        ("unresolved_total", {"socket": SOCKET}, 3),
        ("undeliverable_total", {"socket": SOCKET}, 2),
        ("refusals_total", {"socket": SOCKET, "code": "POL001"}, 4),
        ("refusals_total", {"socket": SOCKET, "code": "CDI012"}, 3),
        ("skips_total", {"socket": SOCKET, "code": "POL001"}, 5),
        ("injected_devices_total", {"socket": SOCKET, "kind": "vendor.com/gpu"}, 31),
        ("reconnects_total", {"socket": SOCKET}, 2),
        ("missed_containers", {"socket": SOCKET}, 11),
        ("session_state", {"socket": SOCKET, "state": "active"}, 1),
        ("session_state", {"socket": SOCKET, "state": "waiting"}, 0),
        ("session_state_timestamp_seconds", {"socket": SOCKET}, 3000.125),
        ("request_duration_seconds_count", {"socket": SOCKET}, 4),
        ("request_duration_seconds_sum", {"socket": SOCKET}, 3.00047),
        ("request_duration_seconds_bucket", {"socket": SOCKET, "le": "0.0002"}, 3),
        ("request_duration_seconds_bucket", {"socket": SOCKET, "le": "2.0"}, 3),
        ("request_duration_seconds_bucket", {"socket": SOCKET, "le": "+Inf"}, 4),
    ],
)
def test_each_number_of_the_report_is_a_metric(
    scraped: str, name: str, labels: dict[str, str], expected: float
) -> None:
    """A scrape names the very numbers that status shows."""
    assert value(scraped, f"cdi_courier_{name}", **labels) == pytest.approx(expected)


def test_names_are_as_prometheus_wants_them(scraped: str) -> None:
    """`promtool check metrics` finds nothing: help for each, _total for counters alone, base units."""
    families = {f.name: f for f in text_string_to_metric_families(scraped)}
    mine = {name: family for name, family in families.items() if name.startswith("cdi_courier_")}

    assert len(mine) > 15
    for name, family in mine.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(total|count|sum|bucket|counter|gauge|histogram)$", name)
        assert not re.search(r"(milli|micro|_ms|minutes|hours|days|percent|kilo|mega)", name)
        for sample in family.samples:
            assert sample.name.endswith("_total") is (family.type == "counter")
            assert all(re.fullmatch(r"[a-z]+", label) for label in sample.labels)
        if "duration" in name or "timestamp" in name:
            assert name.endswith("_seconds")
    for other in families.keys() - mine.keys():
        assert other.startswith("process_")


def test_nothing_that_a_pod_s_author_chooses_is_a_label(scraped: str) -> None:
    """The number of series is bounded, and a scrape tells nothing about who runs what."""
    assert "secret" not in scraped


def test_a_unix_socket_is_for_its_owner_and_group_and_goes_with_the_daemon(tmp_path: Path) -> None:
    """Its mode is 0660; a socket that a killed daemon has left is replaced."""
    path = tmp_path / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    with metrics.serving(f"unix:{path}", report):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert get(UnixConnection(path))[0] == 200

    assert not path.exists()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_a_loopback_address_is_served() -> None:
    """GET /metrics is answered; any other path is not found; the next scrape is answered too."""
    port = free_port()

    with metrics.serving(f"127.0.0.1:{port}", report) as trouble:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        codes = [get(connection, path)[0] for path in ("/metrics", "/", "/metrics?x=1")]

    assert (trouble, codes) == ("", [200, 404, 200])


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A path that was mistyped is an error in words, and what lies there stays."""
    path = tmp_path / "precious"
    path.write_text("x")

    with metrics.serving(f"unix:{path}", report) as trouble:
        pass

    assert trouble.startswith("SET033: cannot listen at [metrics] listen = unix:")
    assert trouble in caplog.text
    assert path.read_text() == "x"


def test_what_lies_there_at_the_end_and_is_no_socket_stays(tmp_path: Path) -> None:
    """Somebody may have put a file in the socket's place meanwhile."""
    path = tmp_path / "metrics.sock"
    with metrics.serving(f"unix:{path}", report):
        path.unlink()
        path.write_text("x")

    assert path.read_text() == "x"


@pytest.fixture
def dripping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, threading.Event]]:
    """The socket, at which somebody sends a byte now and then, and what tells that they were left."""
    monkeypatch.setattr(metrics, "_PATIENCE", 0.5)
    path, left, done = tmp_path / "metrics.sock", threading.Event(), threading.Event()

    def drip() -> None:
        with socket.socket(socket.AF_UNIX) as slow:
            wait_for(path.exists, 10, "the socket")
            slow.connect(str(path))
            with contextlib.suppress(OSError):
                while not done.wait(0.05):
                    slow.sendall(b"x")
        left.set()

    thread = threading.Thread(target=drip)
    thread.start()
    yield path, left
    done.set()
    thread.join()


def test_who_sends_slowly_is_left_after_a_while(dripping: tuple[Path, threading.Event]) -> None:
    """The limit is one of the whole request; the next scraper is served."""
    path, left = dripping
    with metrics.serving(f"unix:{path}", report):
        assert left.wait(10)
        assert get(UnixConnection(path))[0] == 200


def test_the_end_waits_for_nobody_who_sends_slowly(
    dripping: tuple[Path, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being read then is cut off."""
    monkeypatch.setattr(metrics, "_PATIENCE", 30.0)
    path, left = dripping

    def timed() -> bool:
        return any(isinstance(thread, threading.Timer) for thread in threading.enumerate())

    with metrics.serving(f"unix:{path}", report):
        wait_for(timed, 10, "the request to be read")
    ended = left.wait(5)

    assert ended


def test_a_port_that_is_taken_is_an_error_in_words() -> None:
    """The daemon goes on without metrics, and says why it has none."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        with metrics.serving(f"127.0.0.1:{other.getsockname()[1]}", report) as trouble:
            pass

    assert trouble.startswith("SET033: ")


def test_a_folder_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    """So is a unix socket that cannot be made."""
    with metrics.serving(f"unix:{tmp_path}/none/x.sock", report) as trouble:
        pass

    assert trouble.startswith("SET033: ")
    assert "No such file" in trouble


def test_without_prometheus_client_the_cause_is_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the optional package is missing, the daemon serves, and the log says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with metrics.serving("127.0.0.1:1", report) as trouble:
        pass

    assert trouble.startswith("SET032: ")
    assert "python3-prometheus-client" in caplog.text


def test_switched_off_nothing_of_it_is_loaded() -> None:
    """By default there is neither prometheus_client nor an HTTP server in the daemon."""
    import subprocess

    script = (
        "import sys; from cdi_courier import service, metrics\n"
        "with metrics.serving('', dict): pass\n"
        "print([m for m in ('prometheus_client', 'http.server') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_a_report_that_fails_is_an_error_for_that_scrape_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scraper gets 500, the log the cause, and the next scrape its numbers."""
    reports: list[Any] = [None, report()]
    path = tmp_path / "m.sock"

    with metrics.serving(f"unix:{path}", lambda: reports.pop(0)):
        codes = [get(UnixConnection(path))[0] for _ in range(2)]

    assert codes == [500, 200]
    assert "the metrics report failed" in caplog.text


def test_a_report_of_another_backend_needs_only_what_it_has(tmp_path: Path) -> None:
    """A third-party backend that tells a state and nothing else has a state and zeros."""
    path = tmp_path / "m.sock"

    with metrics.serving(f"unix:{path}", lambda: {"runtimes": {"x": {"socket": "/x", "state": "active"}}}):
        code, text = get(UnixConnection(path))

    assert code == 200
    assert value(text, "cdi_courier_requests_total", socket="/x") == 0


def test_states_are_those_of_the_nri_connection() -> None:
    """A state that a session can be in has its own series, and no other has one but a backend's rest."""
    doc = importlib.import_module("cdi_courier_nri.connection").NriConnection.__doc__
    told = doc.partition("state is ")[2].partition("; since")[0]

    assert {*re.findall("``(\\w+)``", told), "idle"} == set(metrics.STATES)
