"""Who may have what. Light module; it knows nothing of spec files or of how a device gets anywhere.

Rules are tried in order and the first match decides, name by name. Names are judged after parsing, part by
part: a pattern never spans the ``/`` or the ``=``.
"""

from __future__ import annotations

from cdi_courier.errors import PolicyDenied, quoted
from cdi_courier.names import split_device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Literal

    from cdi_courier.request import ContainerRequest

    Action = Literal["allow", "deny"]

ANY = ("*",)

# A refusal travels in a status of 4,096 characters (NRI backend) and must arrive whole: this many
# reasons, each for this many names of at most 200 characters, and a rule of this many characters.
_MAX_REASONS = 2
_MAX_LISTED = 4
_MAX_RULE = 1500


def _is_plain(pattern: str) -> bool:
    return not any(c in pattern for c in "*?[")


class Rule:
    """One rule; a list of patterns matches if any of them does.

    action: ``allow`` or ``deny``.
    namespaces, pods, containers: shell patterns (``*``, ``?``, ``[..]``), case-sensitive.
    devices: ``*`` or ``VENDOR/CLASS=NAME``, each part a pattern of its own.
    source: for a person, e.g. ``rule 2 of /etc/cdi-courier/conf.d/50-gpu.toml``.
    """

    __slots__ = ("_any_device", "_who", "action", "containers", "devices", "namespaces", "pods", "source")

    def __init__(
        self,
        action: Action,
        *,
        namespaces: Sequence[str] = ANY,
        pods: Sequence[str] = ANY,
        containers: Sequence[str] = ANY,
        devices: Sequence[str] = ANY,
        source: str = "a rule",
    ) -> None:
        self.action = action
        self.namespaces = tuple(namespaces)
        self.pods = tuple(pods)
        self.containers = tuple(containers)
        self.devices = tuple(("*", "*", "*") if d == "*" else split_device(d) for d in devices)
        # What decides nearly always is made ready: a list that matches anything, and names without globs.
        self._any_device = ("*", "*", "*") in self.devices
        self._who = tuple(
            (
                field,
                frozenset(p for p in patterns if _is_plain(p)),
                tuple(p for p in patterns if not _is_plain(p)),
            )
            for field, patterns in (
                ("namespace", self.namespaces),
                ("pod", self.pods),
                ("container", self.containers),
            )
            if "*" not in patterns
        )
        self.source = source

    def asks(self, request: ContainerRequest) -> bool:
        """Does the rule speak of whoever asks?"""
        for field, names, patterns in self._who:
            text = getattr(request, field)
            if text not in names and not _matches(text, patterns):
                return False
        return True

    def covers(self, device: str) -> bool:
        """Does the rule speak of this qualified device name?"""
        if self._any_device:
            return True
        vendor, class_, name = split_device(device)
        return any(_match(vendor, v) and _match(class_, c) and _match(name, n) for v, c, n in self.devices)


# The last rule, always present: the namespaces in which the GPU operator's own pods and node agents live.
BUILT_IN = Rule(
    "allow", namespaces=("kube-system", "gpu-operator", "nvidia-gpu-operator"), source="the built-in rule"
)


class Policy:
    """The rules in force: `rules` first, then the built-in one, then `default`; `local` for the rest.

    default: what happens to a Kubernetes container that no rule matches.
    local: what happens to a container that is not Kubernetes'; rules do not apply to those.
    """

    __slots__ = ("default", "local", "rules")

    def __init__(
        self, rules: Iterable[Rule] = (), *, default: Action = "deny", local: Action = "allow"
    ) -> None:
        self.rules = (*rules, BUILT_IN)
        self.default = default
        self.local = local


def judge(policy: Policy, request: ContainerRequest, device: str) -> tuple[bool, str]:
    """Whether `request` may have the qualified name `device`, and which rule says so, for a person."""
    if request.origin != "kubernetes":
        return policy.local == "allow", f'[policy] local = "{policy.local}"'
    if not request.namespace:
        return False, "the runtime told no namespace, and without one no rule can be applied"
    for rule in policy.rules:
        if rule.asks(request) and rule.covers(device):
            return rule.action == "allow", rule.source
    return policy.default == "allow", f'no rule matches, and [policy] default = "{policy.default}"'


def require(policy: Policy, request: ContainerRequest, devices: Iterable[str]) -> str:
    """The rules that allow every device, for a person, separated by "; "; ``""`` if there is no device.

    Raises one `PolicyDenied` ``POL001`` that names all refused devices.
    """
    refused: dict[str, list[str]] = {}
    allowing: list[str] = []
    for device in devices:
        allowed, why = judge(policy, request, device)
        if not allowed:
            refused.setdefault(why, []).append(device)
        elif why not in allowing:
            allowing.append(why)
    if not refused:
        return "; ".join(allowing)
    who = f"container {quoted(request.container)} of pod {quoted(request.namespace + '/' + request.pod)}"
    if request.origin != "kubernetes":
        who = f"local container {quoted(request.container)}"
    groups = [f"{_listed(names)} ({why})" for why, names in refused.items()]
    what = "; ".join(groups[:_MAX_REASONS]) + ("; and others" if len(groups) > _MAX_REASONS else "")
    names = [name for group in refused.values() for name in group]
    raise PolicyDenied(
        "POL001",
        f"{who} may not have {what}",
        _hint(request, names),
        namespace=request.namespace,
        pod=request.pod,
        container=request.container,
        devices=",".join(names),
        rule="; ".join(list(refused)[:_MAX_REASONS]),
    )


def allowing_rule(request: ContainerRequest, devices: Sequence[str]) -> str:
    """The TOML that would allow it, to paste into a later file than those read so far."""
    if request.origin != "kubernetes":
        return '[policy]\nlocal = "allow"\n'
    return (
        "[[policy.rules]]\n"
        'action = "allow"\n'
        f"namespaces = {_toml_list([_literal(request.namespace)])}\n"
        f"devices = {_toml_list(devices)}\n"
    )


def _hint(request: ContainerRequest, devices: Sequence[str]) -> str:
    if request.origin == "kubernetes" and not request.namespace:
        return "a pod always has a namespace; report the runtime and its version"
    rule = allowing_rule(request, devices)
    if len(rule) > _MAX_RULE:
        # Half a rule would be no TOML, or another rule.
        return "the rule that would allow it is too long for here; `cdi-courier policy check` prints it"
    return f"to allow it, put this into a file in /etc/cdi-courier/conf.d that sorts last:\n{rule}"


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(map(quoted, names[:_MAX_LISTED]))
    return text if len(names) <= _MAX_LISTED else f"{text} and {len(names) - _MAX_LISTED} others"


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return any(_match(text, pattern) for pattern in patterns)


def _match(text: str, pattern: str) -> bool:
    if _is_plain(pattern):
        return text == pattern
    # Only where a rule has globs: fnmatch loads re, which takes as long as the interpreter.
    from fnmatch import fnmatchcase

    return fnmatchcase(text, pattern)


def _literal(text: str) -> str:
    """A pattern that matches exactly `text`: a hostile namespace ``*`` must not become a wildcard."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _toml_list(items: Sequence[str]) -> str:
    return "[" + ", ".join(quoted(item, None) for item in items) + "]"
