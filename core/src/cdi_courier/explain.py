"""What becomes of each container of a manifest on this host, and what its author may have got wrong.

It delivers nothing and knows no files: manifests come from `manifests`, the answer from the same functions
that answer a runtime. Source of the key forms, and so of what can be wrong with them:
docs/facts.md#annotation-keys, #device-injector-annotations.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from cdi_courier import oci
from cdi_courier.annotations import comma_list, compile_keys
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.dialects import yaml_list
from cdi_courier.errors import AnnotationError, CdiError, PolicyDenied, quoted
from cdi_courier.injector import Injection
from cdi_courier.names import invalid_qualified
from cdi_courier.policy import judge, require
from cdi_courier.request import ContainerRequest

if TYPE_CHECKING:
    from cdi_courier.annotations import Dialect, KeyFamily
    from cdi_courier.cdi.model import ContainerEdits
    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.hookspecs import Choice
    from cdi_courier.injector import Injector
    from cdi_courier.manifests import Container, PodTemplate
    from cdi_courier.plugins import Plugins
    from cdi_courier.settings import Settings

# An annotation's name has 63 characters at most behind the slash, "container." included
# (docs/facts.md#annotation-keys), and its domain 253.
_MAX_NAME: Final = 63
_MAX_DOMAIN: Final = 253
_MAX_LISTED: Final = 8
_MAX_PROBLEMS: Final = 50  # of one pod's keys: they are as many as a hostile author likes
_MAX_COMPARED: Final = 200
_NEAR: Final = 0.8

_INERT: Final = "cdi.k8s.io"
_VENDORS: Final = ".cdi.k8s.io"
_RAW: Final = frozenset(
    f"{what}.{domain}" for what in ("devices", "mounts") for domain in ("noderesource.dev", "nri.io")
)
# Other annotations of NRI's sample plugins, whose names come near those for CDI devices.
_FOREIGN: Final = frozenset(
    f"{what}.{domain}"
    for what in ("network-devices", "netdevices", "netdevice", "io-priority", "memory-policy", "sysctl")
    for domain in ("noderesource.dev", "nri.io")
)
# What Kubernetes runs its pods on.
_CRI: Final = frozenset({"containerd", "cri-o"})

_BASE_CONFIG: Final[dict[str, Any]] = {
    "ociVersion": "1.0.2",
    "process": {"user": {"uid": 0, "gid": 0}, "env": [], "cwd": "/"},
    "root": {"path": "rootfs"},
    "mounts": [],
    "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}, "devices": []},
}
"""What edits are applied to: as little as a config can hold, so that a diff shows nothing but them."""


def report(
    templates: Iterable[PodTemplate],
    injector: Injector,
    settings: Settings,
    plugins: Plugins,
    choices: Sequence[Choice],
    *,
    diff: bool = False,
) -> list[dict[str, Any]]:
    """One entry for each pod or pod template, as JSON.

    templates: each with its namespace. injector: made with these settings and plugins. choices: what is
    chosen for each of the host's runtimes. diff: also show each container's OCI config before and after.
    Reads spec files, and what the host has at the paths of their device nodes; never raises for what a
    manifest says.
    """
    reader = _Explainer(injector, settings, plugins, choices, diff=diff)
    return [reader.template(template) for template in templates]


def delivered(found: Iterable[Mapping[str, Any]]) -> bool:
    """Whether every container of a report gets all that it asks for, and nothing seems meant otherwise."""
    return not any(
        container["problems"] or any(lost["active"] for lost in container["undeliverable"])
        for entry in found
        for container in entry["containers"]
    )


class _Explainer:
    """What stays the same from container to container."""

    def __init__(
        self,
        injector: Injector,
        settings: Settings,
        plugins: Plugins,
        choices: Sequence[Choice],
        *,
        diff: bool,
    ) -> None:
        self._injector = injector
        self._settings = settings
        self._plugins = plugins
        self._choices = choices
        self._served_by = _pod_runtimes(choices)
        self._diff = diff
        self._snapshot = injector.registry.snapshot()
        self._policy = settings.policy.compiled()
        self._keys = _Keys(settings, plugins)
        # Containers that ask for the same names get the same.
        self._deliveries: dict[tuple[str, ...], _Delivery] = {}

    def template(self, template: PodTemplate) -> dict[str, Any]:
        """The entry of one pod or pod template."""
        containers = []
        every = itertools.chain(map(_Mistake, template.problems), self._keys.mistakes(template))
        mistakes = list(itertools.islice(every, _MAX_PROBLEMS))
        if next(every, None) is not None:
            mistakes.append(_Mistake("there are more problems with this pod's annotations"))
        for container in template.containers:
            entry = self._container(template, container)
            said = [m.text for m in mistakes if m.container in (None, container.name)]
            entry["problems"] = list(dict.fromkeys((*said, *entry["problems"])))
            containers.append(entry)
        return {
            "document": {
                "number": template.document,
                "line": template.line,
                "item": template.item,
                "kind": template.kind,
                "namespace": template.namespace,
                "name": template.name,
            },
            "containers": containers,
        }

    def _container(self, template: PodTemplate, container: Container) -> dict[str, Any]:
        request = ContainerRequest(
            template.annotations,
            namespace=template.namespace,
            pod=template.pod,
            container=container.name,
        )
        keys = self._keys.applied(request)
        entry: dict[str, Any] = {
            "name": container.name,
            "type": container.type,
            "key": ", ".join(keys) or None,
            "devices": [],
            "verdict": None,
            "rule": None,
            "edits": [],
            "undeliverable": [],
            "problems": [],
        }
        if self._diff:
            entry["diff"] = ""
        try:
            requested = self._injector.requested(request)
        except AnnotationError as error:
            entry["problems"] = [str(error), *self._keys.remedies(error, request, self._snapshot)]
            return entry
        if requested:
            self._judge(entry, request, requested)
            self._deliver(entry, requested)
        return entry

    def _judge(self, entry: dict[str, Any], request: ContainerRequest, requested: Mapping[str, str]) -> None:
        rules: dict[str, None] = {}
        denied: dict[str, None] = {}
        for name, key in requested.items():
            allowed, rule = judge(self._policy, request, name)
            (rules if allowed else denied)[rule] = None
            device = self._snapshot.devices.get(name)
            entry["devices"].append(
                {
                    "name": name,
                    "key": key,
                    "verdict": "allowed" if allowed else "denied",
                    "rule": rule,
                    "file": device.path if device else None,
                }
            )
        entry["verdict"] = "denied" if denied else "allowed"
        entry["rule"] = "; ".join(denied or rules)
        try:
            require(self._policy, request, requested)
        except PolicyDenied as error:
            entry["problems"] += self._skipped(self._settings.delivery.on_denied, "on_denied")
            entry["problems"].append(str(error))

    def _deliver(self, entry: dict[str, Any], requested: Mapping[str, str]) -> None:
        names = tuple(requested)
        unknown = [name for name in names if name not in self._snapshot.devices]
        if unknown:
            entry["problems"] += self._skipped(self._settings.delivery.on_unresolvable, "on_unresolvable")
            entry["problems"] += [str(self._snapshot.explain(name)) for name in unknown]
            return
        delivery = self._deliveries.get(names)
        if delivery is None:
            delivery = self._deliveries[names] = self._delivery(names, requested)
        entry["edits"] = delivery.edits
        entry["undeliverable"] = delivery.undeliverable
        entry["problems"] += delivery.problems
        if self._diff:
            entry["diff"] = delivery.diff

    def _skipped(self, choice: str, key: str) -> list[str]:
        return [f'the container starts without its devices: [delivery] {key} = "skip"'] * (choice == "skip")

    def _delivery(self, names: tuple[str, ...], requested: Mapping[str, str]) -> _Delivery:
        resolution = self._snapshot.resolve(names)
        injection = Injection(names, resolution.edits, requested, resolution.files)
        problems = _unserved(self._served_by)
        diff = ""
        try:
            edited = oci.apply_edits(_BASE_CONFIG, edits_to_dict(resolution.edits))
        except CdiError as error:
            problems.append(str(error))
        else:
            diff = _diff(_BASE_CONFIG, edited) if self._diff else ""
        undeliverable = [
            lost
            for choice in self._choices
            for lost in self._undeliverable(choice, injection, served=choice in self._served_by)
        ]
        return _Delivery(_provenance(self._snapshot, names), undeliverable, problems, diff)

    def _undeliverable(
        self, choice: Choice, injection: Injection, *, served: bool
    ) -> Iterable[dict[str, Any]]:
        for name, backend in self._plugins.backends.items():
            offer = choice.offer(name)
            if offer is None or offer.needs == "impossible":
                reason = offer.reason if offer else str(choice.problems.get(name, "it makes no offer"))
                lost: Sequence[tuple[str, str]] = [(EVERYTHING, reason)]
            else:
                try:
                    lost = [
                        (str(edit), str(reason))
                        for edit, reason in backend.undeliverable(choice.runtime, injection, self._settings)
                    ]
                except Exception as error:  # noqa: BLE001 - foreign code
                    lost = [(EVERYTHING, quoted(f"{type(error).__name__}: {error}"))]
            for edit, reason in lost:
                yield {
                    "runtime": choice.runtime.key,
                    "backend": name,
                    "active": served and choice.active == name,
                    "edit": edit,
                    "reason": reason,
                }


EVERYTHING: Final = "everything"
"""What a backend that cannot serve a runtime at all loses."""


@frozen
class _Delivery:
    """What some names come to, whoever asks for them."""

    edits: list[dict[str, Any]]
    undeliverable: list[dict[str, Any]]
    problems: list[str]
    diff: str


def _pod_runtimes(choices: Sequence[Choice]) -> list[Choice]:
    """The runtimes that pods run on: the kubelet's if that is known, else all that could be its."""
    known = [choice for choice in choices if choice.runtime.get("kubelet")]
    return known or [choice for choice in choices if choice.runtime.kind in _CRI]


def _unserved(choices: Sequence[Choice]) -> list[str]:
    if not choices:
        return [
            "this host has no container runtime that pods could run on, so nothing would be delivered here"
        ]
    return [
        f"nothing would be delivered on {choice.runtime.key}: {choice.reason}"
        + (f"; {choice.advice}" if choice.advice else "")
        for choice in choices
        if choice.active is None
    ]


# --- edits ---------------------------------------------------------------------------------------------


def _provenance(snapshot: Snapshot, names: Iterable[str]) -> list[dict[str, Any]]:
    """Each edit of `names` in the order of `Snapshot.resolve`, with the file and the device it is from.

    Edits that a spec makes for all its devices have no device; of several ``intelRdt`` only the last counts.
    """
    found: list[dict[str, Any]] = []
    used: set[str] = set()
    for name in names:
        entry = snapshot.devices[name]
        if entry.path not in used:
            used.add(entry.path)
            found += _edits(entry.spec.container_edits, entry.path, None)
        found += _edits(entry.device.container_edits, entry.path, name)
    last = max((i for i, edit in enumerate(found) if edit["kind"] == "intelRdt"), default=-1)
    return [edit for i, edit in enumerate(found) if edit["kind"] != "intelRdt" or i == last]


def _edits(edits: ContainerEdits, file: str, device: str | None) -> Iterable[dict[str, Any]]:
    for kind, value in edits_to_dict(edits).items():
        for item in value if isinstance(value, list) else [value]:
            text = _EDITS[kind](item)
            yield {"edit": text, "kind": kind, "file": file, "device": device, "value": item}


def _arrow(source: str | None, destination: str) -> str:
    if not source or source == destination:
        return quoted(destination)
    return f"{quoted(source)} → {quoted(destination)}"


# Field of CDI's container edits → one of them for a person, in the words that backends use too.
_EDITS: Final[dict[str, Any]] = {
    "env": lambda item: f"env {quoted(item)}",
    "deviceNodes": lambda item: f"device node {_arrow(item.get('hostPath'), item['path'])}",
    "netDevices": lambda item: f"network device {_arrow(item['hostInterfaceName'], item['name'])}",
    "mounts": lambda item: f"mount {_arrow(item['hostPath'], item['containerPath'])}",
    "hooks": lambda item: f"hook {item['hookName']} {quoted(item['path'])}",
    "intelRdt": lambda item: f"intelRdt {quoted(json.dumps(item))}",
    "additionalGids": lambda item: f"additional group {item}",
}


def _diff(before: dict[str, Any], after: dict[str, Any]) -> str:
    old, new = (json.dumps(config, indent=2, sort_keys=True).splitlines() for config in (before, after))
    return "\n".join(difflib.unified_diff(old, new, "before/config.json", "after/config.json", lineterm=""))


# --- keys ----------------------------------------------------------------------------------------------


@frozen
class _Mistake:
    """Something that is probably meant otherwise. container: whom it concerns, None: the whole pod."""

    text: str
    container: str | None = None


class _Keys:
    """The annotation keys that are answered, those that could be, and what comes near them."""

    def __init__(self, settings: Settings, plugins: Plugins) -> None:
        configured = settings.annotations
        self._dialects = plugins.dialects
        self._families: list[tuple[str, KeyFamily]] = []
        self._off: list[tuple[str, KeyFamily]] = []
        for name in (*configured.dialects, *(n for n in self._dialects if n not in configured.dialects)):
            families = compile_keys([self._dialects[name]], configured.domains)
            (self._families if name in configured.dialects else self._off).extend(
                (name, family) for family in families
            )
        self._answered = _domains(self._families)
        self._unanswered = _domains(self._off)

    def applied(self, request: ContainerRequest) -> list[str]:
        """The keys that decide for a container, at most one a family; they may ask for nothing."""
        found = []
        for _, (forms, _) in self._families:
            for prefix, scoped in forms:
                key = prefix + request.container if scoped else prefix
                if key in request.annotations:
                    found.append(key)
                    break
        return found

    def mistakes(self, template: PodTemplate) -> Iterable[_Mistake]:
        """What is wrong with where annotations stand and what they are called."""
        for place, keys in template.elsewhere.items():
            for key in keys:
                # Tools that write to a workload and its template both do no harm.
                if key in template.annotations:
                    continue
                if key.partition("/")[0] in self._answered:
                    yield _Mistake(self._misplaced(template, place, key))
                elif mistake := self._mistaken(key, template):
                    yield mistake
        for key in template.annotations:
            if mistake := self._mistaken(key, template):
                yield mistake

    @staticmethod
    def _misplaced(template: PodTemplate, place: str, key: str) -> str:
        if place.endswith("labels"):
            return f"{quoted(key)} is a label in {place}; it has to be an annotation, in {template.place}"
        if place.endswith("metadata.annotations"):
            return (
                f"annotation {quoted(key)} is in {place}, on the {printable_kind(template.kind)} and not on "
                f"its pods, so it does nothing; put it into {template.place}"
            )
        return (
            f"annotation {quoted(key)} is in {place}, where Kubernetes knows no annotations; put it into "
            f"{template.place}"
        )

    def _mistaken(self, key: str, template: PodTemplate) -> _Mistake | None:
        domain, slash, name = key.partition("/")
        if "*" in key and (domain in self._answered or "cdi" in domain):
            return _Mistake(
                f"annotation {quoted(key)} applies to nothing: keys know no wildcards; "
                f"{self._pod_wide(domain)}"
            )
        form = self._form_of(key, self._families)
        if form is not None:
            prefix, scoped = form
            return self._addressed(key, prefix, template) if scoped else None
        if domain in self._answered:
            return self._unknown_form(key, name, template)
        if self._form_of(key, self._off) is not None:
            dialect = next(name for name, family in self._off if self._form_of(key, [(name, family)]))
            return _Mistake(
                f"annotation {quoted(key)} is of the dialect {dialect}, which is off; to have it answered, "
                f'add "{dialect}" to [annotations] dialects'
            )
        if domain == _INERT:
            return _Mistake(
                f"annotation {quoted(key)} does nothing on a pod, with any runtime: runtimes take {_INERT} "
                f"annotations only from the kubelet's device plugins; {self._pod_wide(domain)}"
            )
        if domain in _RAW:
            return _Mistake(
                f"annotation {quoted(key)} names raw devices or mounts, which are not answered because they "
                "would bypass CDI and the policy; ask for a CDI device instead"
            )
        return None if domain in _FOREIGN else self._near_domain(key, domain, slash + name)

    def _near_domain(self, key: str, domain: str, rest: str) -> _Mistake | None:
        near = _nearest_domain(domain, self._answered)
        if near is not None and not domain.endswith(_VENDORS):
            return _Mistake(
                f"annotation {quoted(key)} is not answered: there is no domain {quoted(domain)}; "
                f"did you mean {quoted(near + rest)}?"
            )
        if domain.endswith(_VENDORS):
            meant = f"; did you mean {quoted(near + rest)}?" if near is not None else ""
            return _Mistake(
                f"annotation {quoted(key)} is not answered: {quoted(domain)} is not one of "
                f"[annotations] domains ({_listed(self._answered)}){meant}"
            )
        near = _nearest_domain(domain, self._unanswered)
        if near is not None:
            return _Mistake(
                f"annotation {quoted(key)} is not answered: there is no domain {quoted(domain)}; "
                f"{quoted(near + rest)} would be, of a dialect that [annotations] dialects turns on"
            )
        return None

    @staticmethod
    def _form_of(key: str, families: Iterable[tuple[str, KeyFamily]]) -> tuple[str, bool] | None:
        for _, (forms, _) in families:
            for prefix, scoped in forms:
                if key.startswith(prefix) if scoped else key == prefix:
                    return prefix, scoped
        return None

    def _pod_wide(self, domain: str) -> str:
        """How every container of a pod is asked for, preferably with the same domain."""
        prefixes = [prefix for _, (forms, _) in self._families for prefix, scoped in forms if not scoped]
        same = [prefix for prefix in prefixes if prefix.partition("/")[0] == domain]
        for prefix in (*same, *prefixes):
            return f"for every container of the pod write {quoted(prefix)}"
        return "no dialect that is on has a key for a whole pod"

    def _addressed(self, key: str, prefix: str, template: PodTemplate) -> _Mistake | None:
        """A key that names a container: is there one?"""
        wanted = key.removeprefix(prefix)
        longest = _MAX_NAME - len(prefix.partition("/")[2])
        if len(wanted) <= longest and any(wanted == container.name for container in template.containers):
            return None
        names = list(dict.fromkeys(container.name for container in template.containers))
        # Kubernetes takes a key no longer than that, so people cut the name.
        cut = next((n for n in names if len(wanted) == longest and n.startswith(wanted)), "")
        if len(wanted) > longest or cut:
            meant = cut or wanted
            return _Mistake(
                f"annotation {quoted(key)}: container {quoted(meant)} has a name of {len(meant)} characters, "
                f"and an annotation can name containers of at most {longest}; give it a shorter name, or "
                f"{self._pod_wide(key.partition('/')[0])}",
                meant if meant in names else None,
            )
        near = _nearest(wanted, names, least=0.6)
        if near is not None:
            return _Mistake(
                f"annotation {quoted(key)}: the pod has no container {quoted(wanted)}; did you mean "
                f"{quoted(prefix + near)}?",
                near,
            )
        return _Mistake(
            f"annotation {quoted(key)}: the pod has no container {quoted(wanted)}; its containers are "
            f"{_listed(names)}"
        )

    def _unknown_form(self, key: str, name: str, template: PodTemplate) -> _Mistake:
        """A key of a domain that is answered, in a form that is not."""
        domain = key.partition("/")[0]
        forms = [
            form for _, (every, _) in self._families for form in every if form[0].partition("/")[0] == domain
        ]
        scoped = [prefix for prefix, is_scoped in forms if is_scoped]
        meant = ""
        if scoped:
            last = re.split(r"[./:=_-]", name)[-1]
            names = [container.name for container in template.containers]
            target = name if name in names else next((n for n in names if name.endswith(n)), last)
            if target in names:
                meant = scoped[0] + target
        if not meant:
            meant = _nearest(key, [prefix for prefix, is_scoped in forms if not is_scoped]) or ""
        what = f"did you mean {quoted(meant)}? " if meant else ""
        written = [prefix + "NAME" * is_scoped for prefix, is_scoped in forms]
        return _Mistake(
            f"annotation {quoted(key)} is of no form that is answered; {what}The forms are {_listed(written)}"
        )

    # --- values

    def remedies(self, error: AnnotationError, request: ContainerRequest, snapshot: Snapshot) -> list[str]:
        """What a value that does not parse was probably meant to be."""
        key = error.fields.get("annotation")
        if key is None or error.code not in ("ANN001", "ANN002", "ANN005"):
            return []
        name = next((n for n, family in self._families if self._form_of(key, [(n, family)])), None)
        if name is None:
            return []
        value = request.annotations[key]
        dialect = self._dialects[name]
        for other in self._dialects.values():
            names = _names(other, value) if other is not dialect else None
            if names:
                return [
                    f"annotation {quoted(key)} has its list in the form of the dialect {other.name}"
                    + _written(dialect, names)
                ]
        names = [item for item in re.split(r"[\s;,\"'\[\]]+", value) if item not in ("", "-")]
        if len(names) > 1 and not any(map(invalid_qualified, names)):
            return [
                f"annotation {quoted(key)} does not separate its names as it should{_written(dialect, names)}"
            ]
        return [
            said
            for item in dict.fromkeys(_items(dialect, value))
            if invalid_qualified(item) is not None and (said := _suggestion(item, snapshot))
        ]


def printable_kind(kind: str) -> str:
    """A hostile kind as one harmless word; unquoted if it looks like one."""
    return kind if re.fullmatch(r"[A-Za-z]{1,63}", kind) else quoted(kind)


def _domains(families: Iterable[tuple[str, KeyFamily]]) -> list[str]:
    found = (prefix.partition("/")[0] for _, (forms, _) in families for prefix, _ in forms)
    return list(dict.fromkeys(found))


def _nearest(word: str, known: Iterable[str], least: float = _NEAR) -> str | None:
    """The one of `known` that is most like `word` and not equal to it."""
    if len(word) > _MAX_DOMAIN:
        return None  # what is no name comes near none, and comparing costs the square of its length
    some = itertools.islice(known, _MAX_COMPARED)
    lowered = {item.lower(): item for item in some if item != word and len(item) <= _MAX_DOMAIN}
    near = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=least)
    return lowered[near[0]] if near else None


def _nearest_domain(domain: str, known: Sequence[str]) -> str | None:
    """The domain that was probably meant: spelt nearly so, or with the labels that are its own."""
    near = _nearest(domain, known)
    if near is not None:
        return near
    labels = set(domain.lower().split("."))
    return next((item for item in known if labels.issuperset(item.lower().split(".")[:2])), None)


def _items(dialect: Dialect, value: str) -> list[str]:
    try:
        return list(dialect.parse(value))
    except AnnotationError:
        return []


def _names(dialect: Dialect, value: str) -> list[str]:
    """What a dialect reads in a value, if it is a list of qualified names in that dialect's form."""
    names = _items(dialect, value)
    return [] if any(invalid_qualified(name) is not None for name in names) else names


def _written(dialect: Dialect, names: Sequence[str]) -> str:
    if dialect.parse is comma_list:
        right = ", ".join(names)
    elif dialect.parse is yaml_list:
        right = json.dumps(names)
    else:
        return ""
    # In single quotes, as YAML takes it: names that are qualified hold none.
    return f"; write '{right}'"


def _suggestion(item: str, snapshot: Snapshot) -> str:
    if "*" in item:
        return f"{quoted(item)}: names know no wildcards; a device that stands for all is often called all"
    folded = re.sub(r"[:/= ]+", "=", item.lower())
    near = sorted(
        name
        for name in snapshot.devices
        if name.endswith(f"={item}")
        or name.partition("=")[0] == item
        or re.sub("[:/=]", "=", name.lower()) == folded
    )
    if not near:
        return ""
    return f"{quoted(item)} is not a qualified name; did you mean {_listed(near)}?"


def _listed(items: Sequence[str]) -> str:
    text = ", ".join(quoted(item) for item in items[:_MAX_LISTED])
    return text if len(items) <= _MAX_LISTED else f"{text} and {len(items) - _MAX_LISTED} others"
