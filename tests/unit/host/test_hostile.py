"""Hosts on which something hangs, lies or is broken: every answer comes in time, and says what was wrong."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cdi_courier.errors import HostError
from cdi_courier.host import unix_http
from cdi_courier.host.files import Root
from cdi_courier.host.sockets import Override
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fake_crio
from support.needs import needs_root

CONTAINERD = "run/containerd/containerd.sock"
CRIO = "run/crio/crio.sock"
DOCKER = "run/docker.sock"
PATHS = pytest.mark.parametrize("path", [CONTAINERD, CRIO, DOCKER])

TIMEOUT = 0.3  # seconds of one question in these tests
IN_TIME = 5.0  # seconds that all of them may take on a loaded machine; without a bound it is for ever


@contextlib.contextmanager
def serving(path: Path, serve: Callable[[socket.socket, threading.Event], None]) -> Iterator[None]:
    """A server that does this with each connection, until the event is set or the connection breaks."""
    ended = threading.Event()
    threads = []

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            serve(connection, ended)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=one, args=(connection,)))
                threads[-1].start()

    with fake_crio.listening(path) as listener:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def silent(_: socket.socket, ended: threading.Event) -> None:
    ended.wait()


def garbage(connection: socket.socket, _: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(os.urandom(4096))


def dropping(_: socket.socket, __: threading.Event) -> None:
    pass


def dripping(connection: socket.socket, ended: threading.Event) -> None:
    """The beginning of an HTTP answer, a byte at a time, without an end."""
    connection.recv(65536)
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b" " * 100000:
        connection.sendall(bytes([byte]))
        if ended.wait(0.02):
            return


def flooding(connection: socket.socket, ended: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not ended.is_set():
        connection.sendall(b"a" * (1 << 20))


@PATHS
@pytest.mark.parametrize("serve", [silent, garbage, dropping, dripping, flooding])
def test_who_does_not_answer_properly_is_a_runtime_with_problems(
    look, root: Path, path: str, serve: Callable[[socket.socket, threading.Event], None]
) -> None:
    """It is there, nothing is known of it, and why is said in time."""
    with serving(root / path, serve):
        start = time.monotonic()
        host = look(timeout=TIMEOUT)
        duration = time.monotonic() - start

    assert duration < IN_TIME
    (runtime,) = host.runtimes
    assert runtime.version == ""
    assert runtime.get("nri") is None
    assert runtime.get("handlers") is None
    assert runtime.problems
    assert {problem.partition(":")[0] for problem in runtime.problems} <= {"HST103", "HST104"}
    if serve is silent:
        assert all("did not answer within" in problem for problem in runtime.problems)


def test_a_full_backlog_is_a_runtime_that_hangs(look, root: Path) -> None:
    """Who listens and never accepts is not waited for."""
    (root / "run/containerd").mkdir()
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(root / CONTAINERD))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                filler = ends.enter_context(socket.socket(socket.AF_UNIX))
                filler.setblocking(False)
                filler.connect(str(root / CONTAINERD))
        (runtime,) = look(timeout=TIMEOUT).runtimes

    assert runtime.problems[0].startswith("HST103: /run/containerd/containerd.sock did not accept")


@PATHS
def test_a_stale_socket_is_no_runtime(look, root: Path, path: str) -> None:
    """What a runtime left when it went is told of the host; nothing is claimed to be there."""
    fake_crio.stale(root / path)

    host = look()

    assert host.runtimes == ()
    assert host.problems == (f"HST101: nobody listens at /{path} (the runtime is down and left its socket)",)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Path.touch, "HST101: /run/docker.sock is not a socket"),
        (Path.mkdir, "HST101: /run/docker.sock is not a socket"),
        (lambda path: path.symlink_to(path), "HST101: /run/docker.sock is a symbolic link to itself"),
        (os.mkfifo, "HST101: /run/docker.sock is not a socket"),
    ],
    ids=["file", "folder", "loop", "pipe"],
)
def test_what_is_no_socket_is_said_to_be_none(
    look, root: Path, make: Callable[[Path], object], problem: str
) -> None:
    """Anything else at a socket's place is named, and no runtime."""
    make(root / DOCKER)

    host = look()

    assert host.runtimes == ()
    assert [said.startswith(problem) for said in host.problems] == [True]


def test_a_datagram_socket_is_no_runtime_s(look, root: Path) -> None:
    """A socket of another type cannot be connected to, and that is said."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(root / DOCKER))
        (runtime,) = look().runtimes

    assert runtime.problems[0].startswith("HST104: /run/docker.sock cannot be connected to: Protocol wrong")


@needs_root
def test_who_may_not_connect_is_told_so(root: Path) -> None:
    """Without permission the runtime is named, and that root is needed."""
    script = (
        "import os, sys; os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "from cdi_courier.host.probe import Request, host\n"
        "from cdi_courier.host.files import Root\n"
        "print(*host(Request(Root(sys.argv[1]), 2, 9)).runtimes[0].problems)"
    )
    root.chmod(0o755)
    with fake_crio.listening(root / DOCKER):
        (root / DOCKER).chmod(0o600)
        output = in_child(script, str(root))

    assert output == "HST102: /run/docker.sock: permission denied (run as root)\n"


def in_child(script: str, *args: str) -> str:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr == ""
    return done.stdout


def test_fifty_sockets_are_asked_at_once(look, root: Path) -> None:
    """Half of them hang; all are told of in the time of one."""
    with contextlib.ExitStack() as ends:
        paths = [f"/run/s{number}.sock" for number in range(50)]
        for path in paths[:25]:
            ends.enter_context(serving(root / path[1:], silent))
        for path in paths[25:]:
            fake_crio.stale(root / path[1:])
        start = time.monotonic()
        host = look({path: Override() for path in paths}, timeout=1.0)
        duration = time.monotonic() - start

    assert duration < 2 * IN_TIME
    assert host.runtimes == ()
    assert [sum(path in problem for problem in host.problems) for path in paths] == [1] * 50


def test_a_hanging_runtime_does_not_hide_another(look, root: Path, data: Path) -> None:
    """Each is asked on its own, and what the files say is told even of the one that hangs."""
    (root / "etc/containerd").mkdir()
    (root / "etc/containerd/config.toml").write_text('version = 2\nimports = ["a"]\n')
    with serving(root / CONTAINERD, silent), fake_crio.crio(root / CRIO, data, variant="nri-off"):
        hanging, other = look(timeout=1.5).runtimes

    assert (other.kind, other.version, other.problems) == ("cri-o", "1.36.3", ())
    assert hanging.kind == "containerd"
    assert hanging.get("config_version") == 2
    assert hanging.get("imports") == ["a"]


def test_the_whole_time_bounds_all_questions(look, root: Path) -> None:
    """A long timeout of one question does not outlast the time for all."""
    with serving(root / CONTAINERD, silent), serving(root / DOCKER, dripping):
        start = time.monotonic()
        host = look(timeout=600.0, total=1.0)
        duration = time.monotonic() - start

    assert duration < IN_TIME
    assert {runtime.kind for runtime in host.runtimes} == {"containerd", "docker"}
    assert all(runtime.problems for runtime in host.runtimes)


@pytest.mark.parametrize(
    "config",
    [
        '{"containerd": 7}',
        '["x"]',
        "nonsense",
        '{"containerd": {"runtimes": {"a": 1}, "defaultRuntimeName": 5}}',
        '{"containerd": {"runtimes": []}, "enableCDI": "yes", "cdiSpecDirs": [1]}',
        "[" * 100000,
    ],
    ids=["number", "list", "text", "types", "more-types", "depth"],
)
def test_a_status_of_another_shape_gives_no_facts(look, root: Path, data: Path, config: str) -> None:
    """A value of the wrong type is no value; the rest is told."""
    captured = fake_crio.containerd(root / CONTAINERD, data, "1.6.20", "plain")
    captured.grpc_answers["/runtime.v1.RuntimeService/Status"] = fake_crio.message(
        "StatusResponse", {"info": {"config": config}}
    )
    with captured:
        (runtime,) = look().runtimes

    assert runtime.version == "1.6.20~ds1"
    assert not {"handlers", "default_handler", "cdi_spec_dirs"} & runtime.facts.keys()


@pytest.mark.parametrize("name", ["evil\x1b[2J", "", "dockerd"], ids=["escape", "nothing", "other"])
def test_a_runtime_of_another_name_is_named_harmlessly(look, root: Path, data: Path, name: str) -> None:
    """What it calls itself is quoted, without control characters."""
    captured = fake_crio.containerd(root / CONTAINERD, data, "1.6.20", "plain")
    captured.grpc_answers["/runtime.v1.RuntimeService/Version"] = fake_crio.message(
        "VersionResponse", {"runtime_name": name, "runtime_version": "1\n2"}
    )
    with captured:
        (runtime,) = look().runtimes

    assert "calls itself" in runtime.problems[0]
    assert runtime.problems[0].isprintable()
    assert runtime.version.isprintable()


_HEADS = ["", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(_HEADS))
def test_any_bytes_are_an_answer_or_a_problem(answer: bytes, head: str) -> None:
    """Whatever comes over HTTP, it is a body or an error with a code."""
    data = head.encode() + answer
    code = ""
    try:
        body = unix_http._body(data, "GET / at /x")
    except HostError as error:
        body, code = b"", error.code

    assert len(body) <= len(data)
    assert code in ("", "HST104")


_KEYS = ["crio", "nri", "runtime", "runtimes", "enable_nri", "nri_listen", "hooks_dir", "default_validator"]
_KEYS += ["Runtimes", "containerd", "defaultRuntimeName", "host", "ociRuntime", "name", "SecurityOptions"]
_KEYS += ["Components", "Version", "NRI", "CDISpecDirs", "cgroup_driver", "x"]
_DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(_DOCUMENTS)
def test_any_document_is_read_without_an_exception(document: object) -> None:
    """JSON or TOML of any shape leaves facts of the right type, or none."""
    from cdi_courier.host import containerd, cri, crio, docker, podman
    from cdi_courier.host.answers import Findings
    from cdi_courier.host.model import Host, Runtime, from_json, to_json

    if not isinstance(document, dict):
        document = {"crio": document}
    findings = Findings()

    crio.learn_from_config(document, findings)
    crio.learn_from_info(document, findings)
    crio.learn_from_cri(cri.Answer("cri-o", Findings(), document, ()), findings)
    findings.add(containerd.learn_from_cri(cri.Answer("containerd", Findings(), document, ())))
    docker.learn_from_info(document, None, findings)
    for read in (podman.read_info, lambda given: docker.read_version(given, "it")):
        with contextlib.suppress(HostError):
            read(document)

    host = Host((Runtime("k", "docker", facts=findings.facts),))
    assert from_json(json.loads(json.dumps(to_json(host)))) == host
    for name, types in {"nri": str, "hooks_dirs": list, "handlers": dict, "rootless": bool}.items():
        assert findings.value(name) is None or isinstance(findings.value(name), types)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_configuration_file_is_read_without_an_exception(text: str) -> None:
    """Whatever stands in containerd's file, NRI is known or a problem is said."""
    import tempfile

    from cdi_courier.host import containerd
    from cdi_courier.host.answers import Findings
    from cdi_courier.host.sockets import Candidate

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "c.toml").write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
        findings = Findings()
        findings.version = "2.1.9"
        configured = containerd.learn_from_files(
            Root(folder), Candidate("/run/x", "containerd", config="/c.toml"), None, findings
        )

    assert (configured is None) == bool(findings.problems)
