"""Finding and asking every container runtime of the host, all at once. Runs in a process of its own.

It imports grpcio. Nothing is changed: sockets are asked and closed, files are read.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from cdi_courier.errors import HostError, quoted
from cdi_courier.host import cgroups, docker, files, kubelet, podman, sockets
from cdi_courier.host.answers import Findings, table, text, together
from cdi_courier.host.model import KINDS, Host, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cdi_courier.host import cri
    from cdi_courier.host.model import Kind
    from cdi_courier.host.sockets import Candidate, Override

_SHARE: Final = 0.4  # of the whole time, for one round of questions: there are two, and what is around them
_NOBODY: Final = "HST101"
_KUBELET: Final = "the kubelet's configuration"
_PODMAN: Final = "Podman"


@frozen
class Request:
    """What to look for. root: see `files.Root`. timeout: seconds of one question; total: of all of it.

    overrides: ``[runtimes]``. runtime_dir, config_dir: a rootless caller's, else ``""``.
    """

    root: files.Root
    timeout: float
    total: float
    overrides: Mapping[str, Override] = field(factory=dict)
    runtime_dir: str = ""
    config_dir: str = ""

    @property
    def round(self) -> float:
        """Seconds for questions that are asked together."""
        return min(self.timeout, self.total * _SHARE)


@frozen
class _Found:
    """A runtime before it has its key."""

    candidate: Candidate
    kind: Kind
    findings: Findings


def host(request: Request) -> Host:
    """The host as it is now. Never raises for what it finds."""
    candidates = sockets.candidates(request.root, request.overrides, request.runtime_dir)
    questions: dict[str, Callable[[], Any]] = {
        _name(candidate): partial(_runtime, request, candidate) for candidate in candidates
    }
    questions[_KUBELET] = partial(kubelet.endpoint, request.root)
    questions[_PODMAN] = partial(_podman, request)
    answers = together(questions, request.total)
    found: list[_Found] = []
    problems: list[str] = []
    imitation = _Imitation("", "")
    for candidate in candidates:
        answer = answers[_name(candidate)]
        if isinstance(answer, _Found):
            found.append(answer)
        elif isinstance(answer, _Imitation):
            imitation = answer
        elif candidate.kind is not None and answer.code != _NOBODY:
            # Something is there, and hangs, is not understood, or may not be asked.
            found.append(_Found(candidate, candidate.kind, _only(answer)))
        else:
            problems.append(str(answer))
    podman_ = _podman_found(request, answers[_PODMAN], imitation)
    found += [podman_] if podman_ is not None else []
    endpoint = answers[_KUBELET]
    if isinstance(endpoint, HostError):
        problems.append(str(endpoint))
    elif endpoint is not None:
        _learn_kubelet(request.root, endpoint, found)
    return Host(_named(found, request.overrides), tuple(problems))


def _only(error: HostError) -> Findings:
    findings = Findings()
    findings.trouble(error)
    return findings


def _name(candidate: Candidate) -> str:
    return f"the runtime at {candidate.path}"


@frozen
class _Imitation:
    """A socket of Docker's API at which a Podman of this version answers; its program tells more."""

    path: str
    version: str


def _runtime(request: Request, candidate: Candidate) -> _Found | _Imitation:
    """The runtime at a socket. Raises `HostError` where nothing at all can be said of it."""
    root, path, timeout = request.root, candidate.path, request.round
    peer = sockets.peer(root, path, timeout)
    kind = candidate.kind
    ask = {None: _unknown, "docker": _docker, "cri-o": _crio, "containerd": _containerd}.get(kind, _docker)
    findings = Findings()
    findings.learn("pid", peer.pid, f"who listens at {path}")
    answer = ask(request, candidate, peer.pid, findings)
    if isinstance(answer, _Imitation):
        return answer
    if peer.user is not None and answer in ("containerd", "cri-o"):
        findings.learn("rootless", peer.user != 0, f"user of process {peer.pid}, which listens at {path}")
    cgroups.learn(root, peer.pid, findings)
    return _Found(candidate, answer, findings)


def _taken(answers: Mapping[str, Any], name: str, findings: Findings) -> Any:
    """The answer by this name; None, with a problem noted, where there is none."""
    answer = answers.get(name)
    if isinstance(answer, HostError):
        findings.trouble(answer)
        return None
    return answer


def _check_name(told: cri.Answer, path: str, kind: Kind, findings: Findings) -> None:
    if told.served and told.name != kind:
        findings.trouble(HostError("HST104", f"the runtime at {path} calls itself {quoted(told.name)}"))


def _containerd(request: Request, candidate: Candidate, pid: int | None, findings: Findings) -> Kind:
    from cdi_courier.host import containerd, cri

    root, path, timeout = request.root, candidate.path, request.round
    answers = together(
        {
            "CRI": lambda: cri.ask(root, path, timeout),
            "introspection": lambda: containerd.introspect(root, path, timeout),
        },
        timeout + 1,  # both end by themselves
    )
    asked = answers["CRI"]
    if isinstance(asked, cri.Answer) and asked.name == "cri-o":
        return _crio(request, candidate, pid, findings)
    told = _taken(answers, "CRI", findings)
    introspection = _taken(answers, "introspection", findings)
    if told is not None:
        findings.add(containerd.learn_from_cri(told))
        _check_name(told, path, "containerd", findings)
        if not told.served:
            findings.trouble(
                HostError("HST104", f"{path} serves no CRI", "containerd's CRI plugin is disabled")
            )
    plugins = None
    if introspection is not None:
        findings.version = findings.version or introspection.version
        plugins = introspection.plugins

    def read() -> None:
        configured = containerd.learn_from_files(root, candidate, pid, findings)
        containerd.learn_nri(root, findings, pid, plugins, configured, timeout)

    _taken(
        together({f"the configuration of {path}": read}, timeout), f"the configuration of {path}", findings
    )
    return "containerd"


def _crio(request: Request, candidate: Candidate, pid: int | None, findings: Findings) -> Kind:
    from cdi_courier.host import cri, crio

    root, path, timeout = request.root, candidate.path, request.round
    answers = together(
        {
            "CRI": lambda: cri.ask(root, path, timeout),
            "config": lambda: crio.get_config(root, path, timeout),
            "info": lambda: crio.get_info(root, path, timeout),
        },
        timeout + 1,
    )
    asked = answers["CRI"]
    if isinstance(asked, cri.Answer) and asked.name == "containerd" and candidate.kind == "cri-o":
        return _containerd(request, evolve(candidate, kind="containerd"), pid, findings)
    told = _taken(answers, "CRI", findings)
    config, info = _taken(answers, "config", findings), _taken(answers, "info", findings)
    if told is not None:
        findings.version = told.findings.version
        _check_name(told, path, "cri-o", findings)
    if info is not None:
        crio.learn_from_info(info, findings)
    if config is not None:
        crio.learn_from_config(config, findings)
    if told is not None:
        crio.learn_from_cri(told, findings)
    crio.learn_from_version(findings)

    def read() -> None:
        crio.learn_from_files(root, candidate.config, pid, findings)
        crio.check_nri_socket(root, findings, pid, timeout)

    _taken(together({f"the files of {path}": read}, timeout), f"the files of {path}", findings)
    return "cri-o"


def _docker(request: Request, candidate: Candidate, _: int | None, findings: Findings) -> Kind | _Imitation:
    root, path, timeout = request.root, candidate.path, request.round
    answers = together(
        {
            "version": lambda: docker.get_version(root, path, timeout),
            "info": lambda: docker.get_info(root, path, timeout),
        },
        timeout + 1,
    )
    version, info = _taken(answers, "version", findings), _taken(answers, "info", findings)
    if version is not None:
        if version.podman:
            return _Imitation(path, version.version)
        findings.version = version.version
    if info is not None:
        docker.learn_from_info(info, version, findings)
    config, source = candidate.config, "[runtimes] config"
    if not config and findings.value("rootless") is False:
        config, source = docker.DEFAULT_CONFIG, "where it lies by default"
    if config:
        findings.learn("config", config, source)
        findings.learn("config_exists", root.exists(config), config)
    return "docker"


def _unknown(
    request: Request, candidate: Candidate, pid: int | None, findings: Findings
) -> Kind | _Imitation:
    """A socket of which only the path is known. Raises `HostError` if nothing known answers."""
    from cdi_courier.host import cri

    root, path, timeout = request.root, candidate.path, request.round
    answers = together(
        {
            "CRI": lambda: cri.ask(root, path, timeout),
            "version": lambda: docker.get_version(root, path, timeout),
        },
        timeout + 1,
    )
    told, version = answers["CRI"], answers["version"]
    if isinstance(told, cri.Answer):
        if told.name == "containerd":
            return _containerd(request, candidate, pid, findings)
        if told.name == "cri-o":
            return _crio(request, candidate, pid, findings)
    if isinstance(version, docker.Version):
        return _docker(request, candidate, pid, findings)
    if isinstance(told, HostError):
        raise told
    name = quoted(told.name) if isinstance(told, cri.Answer) and told.served else "nothing known"
    raise HostError("HST104", f"{path} is {name}; known are {', '.join(KINDS)}", "correct [runtimes]")


def _podman(request: Request) -> Findings | None:
    """What Podman's program and files tell; None if it is not installed or to be left alone."""
    override = request.overrides.get("podman", sockets.Override())
    program = "" if override.ignore else podman.find(request.root)
    if not program:
        return None
    findings = Findings()
    try:
        findings.add(podman.read_info(podman.info(program, request.round)))
    except HostError as error:
        findings.trouble(error)
    podman.learn_from_files(request.root, override.config, request.config_dir, findings)
    cgroups.learn(request.root, None, findings)
    return findings


def _podman_found(
    request: Request, answer: Findings | HostError | None, imitation: _Imitation
) -> _Found | None:
    """Podman with its socket, if there is one of the two."""
    override = request.overrides.get("podman", sockets.Override())
    if override.ignore or (answer is None and not imitation.path):
        return None
    if answer is None:
        text_ = f"Podman answers at {imitation.path}, but its program is not here"
        answer = _only(HostError("HST107", text_, "nothing more than its version is known"))
        answer.version = imitation.version
    elif isinstance(answer, HostError):
        answer = _only(answer)
    return _Found(sockets.Candidate(imitation.path, "podman"), "podman", answer)


def _learn_kubelet(root: files.Root, endpoint: kubelet.Endpoint, found: list[_Found]) -> None:
    for each in found:
        mine = bool(each.candidate.path) and sockets.same(root, each.candidate.path, endpoint.path)
        if each.kind == "docker" and endpoint.path in sockets.CRI_DOCKERD:
            mine = True
        each.findings.learn("kubelet", mine, f"{endpoint.source}: {endpoint.path}")


def _named(found: list[_Found], overrides: Mapping[str, Override]) -> tuple[Runtime, ...]:
    """The runtimes with their keys: see `Runtime`."""
    counts = {kind: sum(each.kind == kind for each in found) for kind in KINDS}
    runtimes: dict[str, Runtime] = {}
    for each in found:
        candidate, findings = each.candidate, each.findings
        override = overrides.get(each.kind)
        if override is not None and override.ignore and not candidate.key:
            continue  # it turned out to be of a kind that is left alone
        alone = counts[each.kind] == 1 or not candidate.path
        key = candidate.key or (each.kind if alone else candidate.path)
        runtimes.setdefault(
            key,
            Runtime(
                key,
                each.kind,
                findings.version,
                candidate.path,
                dict(findings.facts),
                tuple(findings.problems),
            ),
        )
    return tuple(runtimes.values())


def request_from(data: Mapping[str, Any]) -> Request:
    """The request that `describe` has written as JSON."""
    return Request(
        files.Root(text(data["root"]) or ""),
        float(data["timeout"]),
        float(data["total"]),
        {
            key: sockets.Override(values["ignore"], values["endpoint"], values["config"])
            for key, values in table(data, "runtimes").items()
        },
        *_of_user(),
    )


def _of_user() -> tuple[str, str]:
    """(`runtime_dir`, `config_dir`) of a rootless caller; empty for root, whose runtimes are the system's."""
    if os.geteuid() == 0:
        return "", ""
    # Without HOME, as in a service, the user database says where it is.
    config_dir = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.environ.get("XDG_RUNTIME_DIR", ""), config_dir if config_dir.startswith("/") else ""
