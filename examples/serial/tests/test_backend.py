"""The backend and the command: a bundle's config in, the one to use out, over a real socket.

What may be asked for is the injector's to say; in its place is something that says it for one port.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from cdi_courier.cdi.model import ContainerEdits
from cdi_courier.errors import CdiError
from cdi_courier.hookspecs import ServeContext
from cdi_courier.injector import Injection, Skipped
from cdi_courier.settings import Settings
from cdi_courier_serial import backend
from cdi_courier_serial.backend import BundleSocketBackend
from cdi_courier_serial.bundle import RefusedError, prepare
from cdi_courier_serial.dialect import SERIAL


class Answers:
    """In the injector's place: who asks for ``gps`` gets it, other ports there are none.

    skips: whether one who asks for those starts without.
    """

    def __init__(self, *, skips: bool = False) -> None:
        self.skips = skips

    def inject(self, request: Any) -> Injection | Skipped | None:
        asked = request.annotations.get("serial.example.com")
        if asked is None:
            return None
        assert request.origin == "local"
        names = tuple(SERIAL.parse(asked))
        if asked == "gps":
            return Injection(names, ContainerEdits(env=("GPS=/dev/null",)))
        error = CdiError("CDI012", f"{names[0]} is not defined")
        if self.skips:
            return Skipped(names, error)
        raise error


@pytest.fixture
def context(tmp_path: Path) -> ServeContext:
    settings = Settings()
    settings = evolve(settings, service=evolve(settings.service, state_dir=str(tmp_path)))
    return ServeContext(settings, Answers())  # type: ignore[arg-type]


@pytest.fixture
def server(context: ServeContext) -> Iterator[Any]:
    made = BundleSocketBackend().serve(context)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(10)
    assert not thread.is_alive()


def bundle(folder: Path, annotations: dict[str, str]) -> Path:
    config = {"ociVersion": "1.0.2", "process": {"env": ["PATH=/bin"]}, "annotations": annotations}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_bundle_that_asks_gets_its_device(server: Any, tmp_path: Path) -> None:
    """The edit is in the config that the command leaves, and so is the marker."""
    prepare(bundle(tmp_path, {"serial.example.com": "gps"}), tmp_path / "bundle.sock")
    config = config_of(tmp_path)

    assert config["process"]["env"] == ["PATH=/bin", "GPS=/dev/null"]
    assert config["annotations"]["cdi-courier.io/status"] == "injected:example.com/serial=gps"
    assert server.decisions()[-1]["devices"] == ["example.com/serial=gps"]


def test_a_bundle_that_asks_for_nothing_stays_as_it_is(server: Any, tmp_path: Path) -> None:
    """Its config says the same as before."""
    bundle(tmp_path, {})
    before = config_of(tmp_path)
    prepare(tmp_path, tmp_path / "bundle.sock")

    assert config_of(tmp_path) == before


def test_a_refusal_leaves_the_config_and_serves_the_next(server: Any, tmp_path: Path) -> None:
    """What cannot be resolved is refused with the cause, no byte changes, and the server goes on."""
    bundle(tmp_path, {"serial.example.com": "modem"})
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(RefusedError, match="CDI012"):
        prepare(tmp_path, tmp_path / "bundle.sock")
    after = (tmp_path / "config.json").read_bytes()
    prepare(bundle(tmp_path, {"serial.example.com": "gps"}), tmp_path / "bundle.sock")

    assert after == before
    assert "GPS=/dev/null" in config_of(tmp_path)["process"]["env"]


def test_a_reload_counts_from_the_next_launcher_on(
    server: Any, context: ServeContext, tmp_path: Path
) -> None:
    """Once the injector skips what is not known, a container starts without it and the socket stays."""
    bundle(tmp_path, {"serial.example.com": "modem"})
    with pytest.raises(RefusedError):
        prepare(tmp_path, tmp_path / "bundle.sock")
    server.reload(context.settings, Answers(skips=True))
    prepare(tmp_path, tmp_path / "bundle.sock")

    assert config_of(tmp_path)["annotations"]["cdi-courier.io/status"] == "skipped:CDI012"
    assert [(d["verdict"], d["code"]) for d in server.decisions()] == [
        ("refused", "CDI012"),
        ("skipped", "CDI012"),
    ]


@pytest.mark.parametrize(
    "data", ["", "{", "[]", "null", "[" * 100_000], ids=["empty", "cut", "list", "null", "deep"]
)
def test_what_is_no_config_is_refused_in_words(server: Any, tmp_path: Path, data: str) -> None:
    """A launcher that sends something else gets an error and not silence."""
    (tmp_path / "config.json").write_text(data)

    with pytest.raises(RefusedError):
        prepare(tmp_path, tmp_path / "bundle.sock")


def test_the_socket_is_roots_alone_and_goes_with_the_server(context: ServeContext, tmp_path: Path) -> None:
    """Nobody else may connect, and a stopped server leaves nothing."""
    made = BundleSocketBackend().serve(context)
    mode = (tmp_path / "bundle.sock").stat().st_mode & 0o777
    made.stop()
    made.run()

    assert mode == 0o600
    assert not (tmp_path / "bundle.sock").exists()


def test_running_out_of_descriptors_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that returns would end the whole daemon."""
    monkeypatch.setattr(backend, "_BREATH", 0.0)
    failures = iter([OSError(errno.EMFILE, "Too many open files"), OSError(errno.EINVAL, "shut down")])
    accepts: list[int] = []

    class Listener:
        def accept(self) -> None:
            accepts.append(1)
            raise next(failures)

        def __enter__(self) -> Listener:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    backend.BundleServer(tmp_path / "s", Listener(), None).run()  # type: ignore[arg-type]

    assert len(accepts) == 2
