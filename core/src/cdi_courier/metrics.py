"""The Prometheus endpoint of ``[metrics] listen``: what the status report counts, in Prometheus' words.

Nothing is counted for it. A scrape asks for the report that ``cdi-courier status`` shows and names its
numbers, so the two always agree and an answer to a runtime pays nothing. Labels are sockets, error codes, CDI
kinds and states: never what a pod's author can choose. It must not know how the report is made.

prometheus_client is optional, and imported, like http.server, only where the endpoint is switched on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
from typing import TYPE_CHECKING, Any, Final

from cdi_courier import latency, status
from cdi_courier.errors import CourierError, PluginError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from http.server import BaseHTTPRequestHandler

    from prometheus_client import Metric

    _Report = Callable[[], Mapping[str, Any]]

logger = logging.getLogger("cdi_courier")

STATES: Final = ("waiting", "registering", "configured", "active", "idle", "stopped")

_PATIENCE: Final = 5.0  # seconds for a scraper that does not send or read
_BREATH: Final = 0.2  # seconds until another attempt at a connection that cannot be accepted
_MODE: Final = 0o660  # of a unix socket: its owner's and its folder's group may connect


@contextlib.contextmanager
def serving(listen: str, report: _Report) -> Iterator[str]:
    """Answer ``GET /metrics`` at ``HOST:PORT`` or ``unix:/path``; nothing where `listen` is empty.

    Yields why there are no metrics although they are wanted, ``""`` if there is nothing to say: ``SET032``
    prometheus_client is missing, ``SET033`` the address cannot be listened at. That is an error in the log:
    serving containers matters more.
    """
    if not listen:
        yield ""
        return
    ending = threading.Event()
    try:
        server = _server(listen, report, ending)
    except CourierError as error:
        logger.error("%s", error)  # noqa: TRY400 - an expected failure has no traceback
        yield str(error)
        return

    def serve() -> None:
        # Not serve_forever, which wakes up for nothing.
        while not ending.is_set():
            server.handle_request()

    thread = threading.Thread(target=serve, name="metrics", daemon=True)
    thread.start()
    logger.info("metrics at %s", listen)
    try:
        yield ""
    finally:
        ending.set()
        # Ends the accept.
        _shut(server.socket)
        if server.connection is not None:
            _shut(server.connection)
        thread.join(_PATIENCE)
        server.server_close()
        if listen.startswith("unix:"):
            with contextlib.suppress(OSError):
                _remove(listen.removeprefix("unix:"))


def _server(listen: str, report: _Report, ending: threading.Event) -> Any:
    import socketserver

    try:
        handler = _handler(report)
    except ImportError as error:
        raise PluginError(
            "SET032",
            f"[metrics] listen is set, but prometheus_client cannot be imported: {error}",
            "install python3-prometheus-client, or cdi-courier[metrics]; or leave the key empty",
        ) from None

    class Server(socketserver.TCPServer):
        # One request at a time: who scrapes slowly holds up other scrapers, for `_PATIENCE`, and nobody else.
        allow_reuse_address = True
        request_queue_size = 16
        connection: socket.socket | None = None  # the latest

        def __init__(self) -> None:
            if listen.startswith("unix:"):
                self.address_family = socket.AF_UNIX
                self.allow_reuse_address = False
                path = listen.removeprefix("unix:")
                super().__init__(path, handler, bind_and_activate=False)  # type: ignore[arg-type]
                try:
                    _bind(self.socket, path)
                    self.server_activate()
                except BaseException:
                    self.server_close()
                    raise
                return
            host, _, port = listen.rpartition(":")
            host = host.strip("[]")
            self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            super().__init__((host, int(port)), handler)

        def get_request(self) -> tuple[Any, Any]:
            try:
                connection, address = self.socket.accept()
            except OSError as error:
                # Whoever waits to be accepted would have the loop look again at once, for ever.
                if error.errno in status.SCARCE and not ending.wait(_BREATH):
                    logger.error("%s", status.scarce("who scrapes waits", error))  # noqa: TRY400
                raise
            self.connection = connection
            # A unix socket's peer has no address, and the handler wants one.
            return connection, address or ("unix", 0)

        def handle_error(self, *_: object) -> None:
            logger.debug("a scrape failed", exc_info=True)

    try:
        return Server()
    except (OSError, OverflowError) as error:
        raise SettingsError(
            "SET033",
            f"cannot listen at [metrics] listen = {listen}: {getattr(error, 'strerror', None) or error}",
            "there are no metrics until the daemon is restarted with an address that is free",
        ) from None


def _bind(listener: socket.socket, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _remove(path)  # what somebody else has left
    before = os.umask(0o777 & ~_MODE)
    try:
        status.at(path, listener.bind)
    finally:
        os.umask(before)


def _remove(path: str) -> None:
    """Remove a socket; never a file that is none. Raises `OSError`."""
    if stat.S_ISSOCK(os.lstat(path).st_mode):
        os.unlink(path)


def _shut(connection: socket.socket) -> None:
    """End whatever waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _handler(report: _Report) -> type[BaseHTTPRequestHandler]:
    """What answers requests. Raises ImportError where prometheus_client is missing."""
    from http.server import BaseHTTPRequestHandler

    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(Collector(report))
    ProcessCollector(registry=registry)

    class Handler(BaseHTTPRequestHandler):
        server_version = "cdi-courier"
        sys_version = ""

        def setup(self) -> None:
            super().setup()
            # For all of it: who sends a byte a second would pass a limit of each wait.
            self._limit = threading.Timer(_PATIENCE, _shut, (self.connection,))
            self._limit.daemon = True
            self._limit.start()

        def finish(self) -> None:
            self._limit.cancel()
            super().finish()

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, explain="metrics are at /metrics")
                return
            try:
                encoder, kind = choose_encoder(self.headers.get("Accept", ""))
                body = encoder(registry)
            except Exception:
                logger.exception("the metrics report failed")
                self.send_error(500)
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class Collector:
    """Makes metrics of a status report, at each scrape (prometheus_client's protocol for collectors)."""

    def __init__(self, report: _Report) -> None:
        self._report = report

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask for a report when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        found = self._report()
        yield from _of_daemon(found)
        yield from _of_sessions(
            {entry["socket"]: entry for entry in found.get("runtimes", {}).values() if "socket" in entry}
        )


def _of_daemon(found: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    build = GaugeMetricFamily(
        "cdi_courier_build_info", "Always 1; the version is a label.", labels=["version"]
    )
    build.add_metric([str(found.get("version", ""))], 1)
    yield build
    settings, cdi = found.get("settings", {}), found.get("cdi", {})
    gauges = {
        "settings_timestamp_seconds": (settings.get("loaded"), "When the settings in force were read."),
        "settings_reload_failed": (
            bool(settings["problem"]) if "problem" in settings else None,
            "1 if the last attempt to read the settings again failed, so that those of before count.",
        ),
        "registry_files": (cdi.get("files"), "CDI spec files that are valid and trusted."),
        "registry_devices": (cdi.get("devices"), "CDI devices that can be asked for."),
        "registry_errors": (cdi.get("errors"), "Errors of CDI spec files and directories."),
        "registry_conflicts": (
            cdi.get("conflicts"),
            "CDI devices that two files of one directory define, so that none counts.",
        ),
        "table_timestamp_seconds": (
            found.get("table"),
            "When the compiled table for hooks was written; absent where there is none.",
        ),
    }
    for name, (value, text) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(f"cdi_courier_{name}", text, value=float(value))


# name: (table of the report, its key or the label of its keys, help)
_COUNTED: Final = {
    "requests": ("counts", "requests", "Containers that a runtime asked about."),
    "injections": ("counts", "injected", "Containers that were given devices."),
    "unresolved": ("counts", "unresolved", "Containers whose devices could not be resolved."),
    "undeliverable": ("counts", "undeliverable", "Containers whose edits could not all be delivered."),
}
_COUNTED_BY: Final = {
    "refusals": ("refusals", "code", "Containers that were refused, by error code."),
    "skips": ("skips", "code", "Containers started without the devices they ask for, by error code."),
    "injected_devices": ("kinds", "kind", "Devices given to containers, by CDI kind."),
}


def _of_sessions(sessions: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    # The socket tells sessions apart; the backend may not be known at first, and a label must not change.
    labels = ["socket"]
    for name, (where, what, text) in _COUNTED.items():
        family = CounterMetricFamily(f"cdi_courier_{name}", text, labels=labels)
        for path, entry in sessions.items():
            family.add_metric([path], entry.get(where, {}).get(what, 0))
        yield family
    for name, (where, label, text) in _COUNTED_BY.items():
        family = CounterMetricFamily(f"cdi_courier_{name}", text, labels=[*labels, label])
        for path, entry in sessions.items():
            for key, count in sorted(entry.get(where, {}).items()):
                family.add_metric([path, key], count)
        yield family
    connections = CounterMetricFamily(
        "cdi_courier_reconnects", "Connections to a runtime after the first.", labels=labels
    )
    missed = GaugeMetricFamily(
        "cdi_courier_missed_containers",
        "Containers that run without the devices they ask for, as of the latest list of the runtime.",
        labels=labels,
    )
    states = GaugeMetricFamily(
        "cdi_courier_session_state", "1 for the state that the session is in.", labels=[*labels, "state"]
    )
    since = GaugeMetricFamily(
        "cdi_courier_session_state_timestamp_seconds",
        "Since when the session is in its state.",
        labels=labels,
    )
    durations = HistogramMetricFamily(
        "cdi_courier_request_duration_seconds",
        "Time from the first byte of a runtime's request to its answer.",
        labels=labels,
    )
    for path, entry in sessions.items():
        connections.add_metric([path], max(0, entry.get("sessions", 0) - 1))
        missed.add_metric([path], entry.get("counts", {}).get("missed", 0))
        for state in STATES:
            states.add_metric([path, state], entry.get("state") == state)
        if "since" in entry:
            since.add_metric([path], entry["since"])
        if "latency" in entry:
            told = entry["latency"]
            durations.add_metric([path], latency.cumulative(told), told["sum"])
    yield from (connections, missed, states, since, durations)
