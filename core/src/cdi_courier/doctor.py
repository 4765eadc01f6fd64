"""What this host is, what serves it, and what to do next: one report out of what others have found.

Pure: it asks nobody. `cli.doctor` gathers and shows; docs/choosing.md#json has the shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.hookspecs import Choice
    from cdi_courier.plugins import Plugins
    from cdi_courier.settings import Settings

_VALIDATOR_SINCE: Final = {"containerd": (2, 2, 0), "cri-o": (1, 34, 0)}
_REQUIRE: Final = {
    "containerd": '[plugins."io.containerd.nri.v1.nri".default_validator] enable = true, '
    'required_plugins = ["cdi-courier"]',
    "cri-o": "[crio.nri.default_validator] nri_enable_default_validator = true, "
    'nri_validator_required_plugins = ["cdi-courier"]',
}
_HOLE: Final = (
    "but the first container during whose creation it dies or is too slow is still created without it"
)


def report(
    settings: Settings,
    plugins: Plugins,
    choices: Sequence[Choice],
    snapshot: Snapshot,
    *,
    conflicts: Sequence[str] = (),
    problems: Sequence[str] = (),
    daemon: Mapping[str, Any] | None = None,
    probes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The report as JSON.

    daemon: what a running daemon's status socket says, None if none runs. probes: runtime's key → what
    touching it has shown. problems: of the host as a whole.
    """
    runtimes = [_runtime(choice, daemon, (probes or {}).get(choice.runtime.key, "")) for choice in choices]
    cdi = _cdi(snapshot, choices, settings)
    ready, steps = _next(choices, runtimes, snapshot, daemon, conflicts)
    return {
        "ready": ready,
        "runtimes": runtimes,
        "backends": _backends(plugins),
        "cdi": cdi,
        "policy": _policy(settings),
        "conflicts": list(conflicts),
        "problems": list(problems),
        "daemon": None
        if daemon is None
        else {"pid": daemon.get("pid"), "version": daemon.get("version"), "problems": daemon.get("problems")},
        "next": steps,
    }


def _runtime(choice: Choice, daemon: Mapping[str, Any] | None, probe: str) -> dict[str, Any]:
    runtime = choice.runtime
    session = {}
    if daemon is not None:
        session = dict(daemon.get("runtimes", {}).get(runtime.key, {}))
    return {
        "key": runtime.key,
        "kind": runtime.kind,
        "version": runtime.version,
        "endpoint": runtime.endpoint,
        "facts": {name: {"value": fact.value, "source": fact.source} for name, fact in runtime.facts.items()},
        "problems": list(runtime.problems),
        "offers": [
            {
                "backend": offer.backend,
                "fidelity": offer.fidelity,
                "needs": offer.needs,
                "via": offer.via,
                "reason": offer.reason,
            }
            for offer in choice.offers
        ],
        "unavailable": {name: str(error) for name, error in choice.problems.items()},
        "active": choice.active,
        "recommended": choice.recommended,
        "reason": choice.reason,
        "advice": choice.advice,
        "session": {
            key: session[key] for key in ("state", "since", "cause", "delivery", "counts") if key in session
        },
        "probe": probe,
        "notes": _notes(choice),
    }


def _notes(choice: Choice) -> list[str]:
    """What an administrator should know: what will end, and what NRI could be made to guarantee."""
    warnings = [f"{offer.backend}: {offer.warning}" for offer in choice.offers if offer.warning]
    return warnings + _nri_notes(choice)


def _nri_notes(choice: Choice) -> list[str]:
    runtime = choice.runtime
    since = _VALIDATOR_SINCE.get(runtime.kind)
    version = runtime.version_tuple
    if not choice.is_served_by("nri") or since is None or version is None or version < since:
        return []
    required = runtime.get("required_plugins", [])
    if "cdi-courier" in required or any(name.endswith("-cdi-courier") for name in required):
        return [f"the runtime requires this plugin; {_HOLE}"]
    return [f"to have containers refused while this plugin is away: {_REQUIRE[runtime.kind]}; {_HOLE}"]


def _backends(plugins: Plugins) -> dict[str, Any]:
    known: dict[str, Any] = {name: {"state": "installed", "problem": ""} for name in plugins.backends}
    for name in plugins.disabled:
        known[name] = {"state": "disabled", "problem": "named in [backends] disabled"}
    for name, problem in plugins.problems.items():
        known[name] = {"state": "broken", "problem": str(problem)}
    return known


def _cdi(snapshot: Snapshot, choices: Sequence[Choice], settings: Settings) -> dict[str, Any]:
    unequal = {
        choice.runtime.key: dirs
        for choice in choices
        if (dirs := choice.runtime.get("cdi_spec_dirs")) is not None
        and tuple(dirs) != tuple(settings.cdi.dirs)
    }
    return {
        "dirs": list(snapshot.dirs),
        "found": list(snapshot.found),
        "devices": len(snapshot.devices),
        "files": [file.path for file in snapshot.specs],
        "errors": {
            **{path: [str(error) for error in errors] for path, errors in snapshot.errors.items()},
            **{path: [str(error)] for path, error in snapshot.dir_errors.items()},
        },
        "unequal": unequal,
    }


def _policy(settings: Settings) -> dict[str, Any]:
    compiled = settings.policy.compiled()
    return {
        "default": compiled.default,
        "local": compiled.local,
        "rules": [
            {
                "action": rule.action,
                "namespaces": list(rule.namespaces),
                "pods": list(rule.pods),
                "containers": list(rule.containers),
                "devices": ["*" if d == ("*", "*", "*") else "{}/{}={}".format(*d) for d in rule.devices],
                "source": rule.source,
            }
            for rule in compiled.rules
        ],
    }


def _next(
    choices: Sequence[Choice],
    runtimes: Sequence[Mapping[str, Any]],
    snapshot: Snapshot,
    daemon: Mapping[str, Any] | None,
    conflicts: Sequence[str],
) -> tuple[bool, list[str]]:
    """Whether pods that ask are served now, and what to do, as commands or sentences."""
    steps: list[str] = []
    served = False
    ready = True
    for choice, shown in zip(choices, runtimes, strict=True):
        key = choice.runtime.key
        if choice.active is None:
            if choice.runtime.get("kubelet"):
                ready = False
            if choice.recommended is not None:
                steps.append(f"cdi-courier install --backend {choice.recommended} --runtime {key}")
            continue
        state = shown["session"].get("state")
        if choice.is_served_by("nri") and state not in (None, "active"):
            ready = False
            steps.append(f"{key}: the NRI session is {state}: {shown['session'].get('cause', '')}")
        served = True
        if choice.recommended not in (None, choice.active):
            steps.append(
                f"better for {key}: cdi-courier install --backend {choice.recommended} --runtime {key}"
            )
    if not choices:
        steps.append("no container runtime was found; [runtimes] names one that is not in its usual place")
    # What is in a runtime's configuration delivers by itself; only NRI needs somebody who answers.
    if daemon is None and (not served or any(choice.is_served_by("nri") for choice in choices)):
        ready = False
        steps.append("no daemon runs: cdi-courier run")
    if not snapshot.devices:
        ready = False
        steps.append(
            f"no CDI device is known: put a spec file into {snapshot.dirs[0] if snapshot.dirs else '?'}"
        )
    if snapshot.errors or snapshot.dir_errors:
        steps.append("cdi-courier devices    # says what is wrong with CDI files")
    if conflicts:
        steps.append("switch the conflicting plugin off, or disable this one: each pod that asks would fail")
    return ready and served and not conflicts, steps
