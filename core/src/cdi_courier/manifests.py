"""Bytes of a manifest file → the pods and pod templates in it. Pure; it knows no devices and no dialects.

YAML 1.1 in as many documents as there are, or JSON, as kubectl reads them. Whatever has a pod template where
Kubernetes has it counts, custom resources too; other kinds are passed over.

Hostile input: bytes, nesting and nodes are bounded, and a node counts each time that an alias repeats it, so
nothing that is small on disk is large here. The tree is built from events and walked without recursion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import yaml
from attrs import evolve, field, frozen

from cdi_courier.cdi.decode import resolve_scalar
from cdi_courier.errors import ManifestError, quoted

MAX_BYTES: Final = 4 << 20
"""Of one file; etcd, where every object ends, takes 1.5 MiB of each."""

_MAX_DEPTH: Final = 200  # a pod needs 12; custom resource definitions, which are passed over, 40
_MAX_NODES: Final = 500_000  # 4 MiB of ordinary manifests have half as many
_MAX_CONTAINERS: Final = 5_000

# Where the pod template lies; every other kind has it where a Deployment has it.
_TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_USUAL_TEMPLATE: Final = ("spec", "template")
_WORKLOADS: Final = frozenset(
    (*_TEMPLATES, "Deployment", "DaemonSet", "StatefulSet", "Job", "ReplicaSet", "ReplicationController")
)
# How controllers name pods, as far as a pattern of a rule can tell.
_POD_NAMES: Final = {
    "Pod": "{}",
    "StatefulSet": "{}-0",
    "Deployment": "{}-0000000000-00000",
    "CronJob": "{}-00000000-00000",
}
_CONTAINER_FIELDS: Final = (
    ("initContainers", "init container"),
    ("containers", "container"),
    ("ephemeralContainers", "ephemeral container"),
)
_RENDER: Final = "a template has to be rendered first: helm template, kustomize build"


@frozen
class Container:
    """One container. type: ``container``, ``init container`` or ``ephemeral container``."""

    name: str
    type: str


@frozen
class PodTemplate:
    """What one object says of its pods, or a pod of itself. All strings are hostile.

    document: which document of the file it is, from 1. line: where that begins, from 1.
    item: where it stands in a List, such as ``items[2]``, ``""`` if in none.
    kind, name, namespace: the object's own; the last two are ``""`` if it has none.
    pod: a name as its pods will have it.
    place: where its pods' annotations belong, such as ``spec.template.metadata.annotations``.
    annotations: the pods' annotations; those whose value is no text are in `problems` instead.
    elsewhere: place → annotations that stand there and do not reach a pod.
    problems: what Kubernetes would not take, one sentence each.
    """

    document: int
    line: int
    item: str
    kind: str
    name: str
    namespace: str
    pod: str
    place: str
    annotations: Mapping[str, str]
    containers: tuple[Container, ...]
    elsewhere: Mapping[str, Mapping[str, str]] = field(factory=dict)
    problems: tuple[str, ...] = ()


def read(data: bytes) -> tuple[PodTemplate, ...]:
    """Every pod and pod template in a file, in its order; at least one.

    Raises `ManifestError`: ``EXP001`` too large, ``EXP002`` neither YAML nor JSON, ``EXP003`` nested or
    multiplied beyond measure, ``EXP004`` not shaped as Kubernetes' API says, ``EXP005`` nothing with pods.
    """
    if len(data) > MAX_BYTES:
        raise ManifestError("EXP001", f"the file is larger than {MAX_BYTES} bytes", "split it")
    found: list[PodTemplate] = []
    other: dict[str, None] = {}
    containers = 0
    for document in _documents(data):
        for item, tree in _objects(document):
            template = _template(document, item, tree)
            if template is None:
                other[tree["kind"]] = None
                continue
            found.append(template)
            containers += len(template.containers)
            if containers > _MAX_CONTAINERS:
                raise ManifestError("EXP003", f"there are more than {_MAX_CONTAINERS} containers in it")
    if not found:
        kinds = list(other)
        holds = f"it holds {', '.join(quoted(kind, 60) for kind in kinds[:8])}" if kinds else "it is empty"
        raise ManifestError("EXP005", f"there is no pod and nothing that makes pods in the file: {holds}")
    return tuple(found)


# --- bytes → trees -------------------------------------------------------------------------------------


# id of a mapping → that mapping, so that its id is not used again, and the keys that it had more than once.
_Repeated = dict[int, tuple[dict[str, Any], list[str]]]


@frozen
class _Document:
    number: int
    line: int
    tree: Any
    repeated: _Repeated


def _documents(data: bytes) -> list[_Document]:
    """All documents that are not empty."""
    if data.lstrip()[:1] == b"{" or data[:4] == b"\xef\xbb\xbf{":
        document = _json(data)
        if document is not None:
            return [document]
    try:
        return _Builder().documents(data)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is not text"
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        hint = _RENDER if b"{{" in data else ""
        raise ManifestError("EXP002", f"the file is neither YAML nor JSON: {line}{reason}", hint) from None
    except UnicodeError:
        raise ManifestError("EXP002", "the file is neither YAML nor JSON: it is not Unicode text") from None


def _json(data: bytes) -> _Document | None:
    """The file as JSON, None if it is none. Read apart, because JSON may hold what no YAML can say."""
    repeated: _Repeated = {}

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, value in pairs:
            if key in tree:
                repeated.setdefault(id(tree), (tree, []))[1].append(key)
            tree[key] = value
        return tree

    try:
        return _Document(1, 1, json.loads(data, object_pairs_hook=mapping), repeated)
    except ValueError:  # also what is not UTF-8, and numbers of thousands of digits
        return None
    except RecursionError:
        raise ManifestError("EXP003", "the file is nested too deeply") from None


class _Anchor:
    """What an alias names, and how many nodes that has, repeated ones included; None while it is open."""

    __slots__ = ("size", "value")

    def __init__(self, value: Any, size: int | None) -> None:
        self.value = value
        self.size = size


class _Frame:
    """An open mapping or sequence, and the key whose value comes next."""

    __slots__ = ("anchor", "before", "key", "merged", "node")

    def __init__(self, node: Any, anchor: _Anchor | None, before: int) -> None:
        self.node = node
        self.anchor = anchor
        self.before = before
        self.key: Any = _NO_KEY
        self.merged: list[Any] = []


_NO_KEY: Final = object()
_MERGE: Final = object()


class _Builder:
    """Events of libyaml's parser → dicts with text keys, lists and scalars; an alias is what it names."""

    def __init__(self) -> None:
        self._nodes = 0
        self._stack: list[_Frame] = []
        self._anchors: dict[str, _Anchor] = {}
        self._repeated: _Repeated = {}
        self._root: Any = None

    def documents(self, data: bytes) -> list[_Document]:
        found: list[_Document] = []
        number = line = 0
        for event in yaml.parse(data, Loader=yaml.CBaseLoader):
            match event:
                case yaml.DocumentStartEvent():
                    number += 1
                    line = _line(event)
                    self._anchors.clear()
                    self._root = None
                case yaml.DocumentEndEvent():
                    if self._root is not None:
                        found.append(_Document(number, line, self._root, self._repeated))
                case yaml.ScalarEvent():
                    self._scalar(event)
                case yaml.AliasEvent():
                    self._alias(event)
                case yaml.MappingStartEvent():
                    self._begin({}, event)
                case yaml.SequenceStartEvent():
                    self._begin([], event)
                case yaml.CollectionEndEvent():
                    self._end(event)
        return found

    def _count(self, nodes: int, event: Any) -> None:
        self._nodes += nodes
        if self._nodes > _MAX_NODES:
            raise _too_much(event, f"there are more than {_MAX_NODES} nodes in it, aliases written out")

    def _scalar(self, event: Any) -> None:
        self._count(1, event)
        frame = self._stack[-1] if self._stack else None
        plain = event.tag is None and event.implicit[0]
        if frame is not None and type(frame.node) is dict and frame.key is _NO_KEY:
            self._key(frame, _MERGE if plain and event.value == "<<" else event.value)
            return
        value = resolve_scalar(event.value) if plain else event.value
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchor(value, 1)
        self._add(value)

    def _alias(self, event: Any) -> None:
        anchor = self._anchors.get(event.anchor)
        if anchor is None or anchor.size is None:
            _not_yaml(event, f"alias {quoted(event.anchor, 60)} names nothing that comes before it")
        self._count(anchor.size, event)
        frame = self._stack[-1] if self._stack else None
        if frame is not None and type(frame.node) is dict and frame.key is _NO_KEY:
            if type(anchor.value) is not str:
                _not_yaml(event, "a key must be text")
            self._key(frame, anchor.value)
            return
        self._add(anchor.value)

    def _begin(self, node: Any, event: Any) -> None:
        self._count(1, event)
        if len(self._stack) >= _MAX_DEPTH:
            raise _too_much(event, f"it is nested more than {_MAX_DEPTH} levels deep")
        if self._stack and type(self._stack[-1].node) is dict and self._stack[-1].key is _NO_KEY:
            _not_yaml(event, "a key must be text")
        anchor = None
        if event.anchor is not None:
            anchor = self._anchors[event.anchor] = _Anchor(node, None)
        self._stack.append(_Frame(node, anchor, self._nodes - 1))

    def _end(self, event: Any) -> None:
        frame = self._stack.pop()
        for operand in frame.merged:
            for part in operand if type(operand) is list else [operand]:
                if type(part) is not dict:
                    _not_yaml(event, "<< takes a mapping or a list of mappings")
                for key, value in part.items():
                    frame.node.setdefault(key, value)
        if frame.anchor is not None:
            frame.anchor.size = self._nodes - frame.before
        self._add(frame.node)

    def _key(self, frame: _Frame, key: Any) -> None:
        frame.key = key
        if key is not _MERGE and key in frame.node:
            self._repeated.setdefault(id(frame.node), (frame.node, []))[1].append(key)

    def _add(self, value: Any) -> None:
        if not self._stack:
            self._root = value
            return
        frame = self._stack[-1]
        if type(frame.node) is list:
            frame.node.append(value)
            return
        if frame.key is _MERGE:
            frame.merged.append(value)
        else:
            frame.node[frame.key] = value
        frame.key = _NO_KEY


def _line(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1


def _not_yaml(event: Any, reason: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=reason, problem_mark=event.start_mark)


def _too_much(event: Any, reason: str) -> ManifestError:
    return ManifestError("EXP003", f"the file is refused at line {_line(event)}: {reason}")


# --- trees → pods --------------------------------------------------------------------------------------


def _objects(document: _Document) -> list[tuple[str, dict[str, Any]]]:
    """The objects of one document, those of Lists in place of the Lists; each a mapping with a kind."""
    found = []
    pending: list[tuple[str, Any]] = [("", document.tree)]
    while pending:
        place, tree = pending.pop()
        if type(tree) is not dict:
            _misshapen(document, place, f"a Kubernetes object is a mapping, this is {_what(tree)}")
        kind = tree.get("kind")
        if type(kind) is not str or not kind:
            _misshapen(document, place, "there is no kind in it", "every Kubernetes object has a kind")
        items = tree.get("items")
        if kind.endswith("List") and type(items) is list:
            prefix = f"{place}.items" if place else "items"
            pending += [(f"{prefix}[{index}]", item) for index, item in enumerate(items)][::-1]
        else:
            found.append((place, tree))
    return found


def _template(document: _Document, item: str, tree: dict[str, Any]) -> PodTemplate | None:
    """What an object says of its pods; None if it is of a kind that has none."""
    kind: str = tree["kind"]
    steps = _TEMPLATES.get(kind, _USUAL_TEMPLATE)
    if kind not in _WORKLOADS and not _has_containers(tree, steps):
        return None
    read = _Reader(document, item)
    owners: list[tuple[str, dict[str, Any]]] = []
    template, place = tree, ""
    for step in steps:
        owners.append((place, template))
        template, place = read.mapping(template, step, place), _join(place, step)
    metadata = read.mapping(tree, "metadata", "")
    name = read.text(metadata, "name", "metadata")
    generated = read.text(metadata, "generateName", "metadata")
    pod_metadata = read.mapping(template, "metadata", place)
    pod_place = _join(place, "metadata.annotations")
    spec_place = _join(place, "spec")
    spec = read.mapping(template, "spec", place)
    annotations = read.annotations(pod_metadata, "annotations", pod_place, judge=True)
    containers, inner = read.containers(spec, spec_place)
    if not containers:
        _misshapen(document, item, f"{spec_place} has no containers", _RENDER)
    elsewhere = {}
    for owner_place, owner in owners:
        # Only where Kubernetes keeps metadata: a template's and an object's.
        own = owner.get("metadata")
        if type(own) is dict:
            where = _join(owner_place, "metadata.annotations")
            elsewhere[where] = read.annotations(own, "annotations", where)
    for where, holder, key in (
        *((_join(p, "metadata.labels"), o.get("metadata"), "labels") for p, o in owners),
        (_join(place, "metadata.labels"), pod_metadata, "labels"),
        *((_join(p, "annotations"), o, "annotations") for p, o in owners),
        (_join(place, "annotations"), template, "annotations"),
        (_join(spec_place, "annotations"), spec, "annotations"),
        *((f"{where}.annotations", container, "annotations") for where, container in inner),
    ):
        if type(holder) is dict and type(holder.get(key)) is dict:
            elsewhere[where] = read.annotations(holder, key, where)
    return PodTemplate(
        document=document.number,
        line=document.line,
        item=item,
        kind=kind,
        name=name or generated,
        namespace=read.text(metadata, "namespace", "metadata"),
        pod=_POD_NAMES.get(kind, "{}-00000").format(name) if name else f"{generated}00000",
        place=pod_place,
        annotations=annotations,
        containers=containers,
        elsewhere={where: found for where, found in elsewhere.items() if found},
        problems=tuple(read.problems),
    )


def _has_containers(tree: dict[str, Any], steps: tuple[str, ...]) -> bool:
    for step in (*steps, "spec"):
        inner = tree.get(step)
        if type(inner) is not dict:
            return False
        tree = inner
    return type(tree.get("containers")) is list


class _Reader:
    """Reads the parts of one object, and gathers what Kubernetes would not take."""

    def __init__(self, document: _Document, item: str) -> None:
        self._document = document
        self._item = item
        self.problems: list[str] = []

    def mapping(self, parent: dict[str, Any], key: str, place: str) -> dict[str, Any]:
        """A mapping, empty if it is absent or null."""
        value = parent.get(key)
        if value is None:
            return {}
        if type(value) is not dict:
            self._wrong(_join(place, key), "a mapping", value)
        return value

    def text(self, parent: dict[str, Any], key: str, place: str) -> str:
        """A string, empty if it is absent or null."""
        value = parent.get(key)
        if value is None:
            return ""
        if type(value) is not str:
            self._wrong(_join(place, key), "a string", value)
        return value

    def annotations(
        self, parent: dict[str, Any], key: str, place: str, *, judge: bool = False
    ) -> dict[str, str]:
        """Annotations whose values are text or null; with `judge` it is a problem what else is there."""
        value = parent.get(key)
        if value is None:
            return {}
        if type(value) is not dict:
            if judge:
                self._wrong(place, "a mapping", value)
            return {}
        found = {name: item or "" for name, item in value.items() if item is None or type(item) is str}
        if judge:
            repeated = [f"annotation {quoted(name)}" for name in self._repeated(value)]
            if key in self._repeated(parent):
                repeated.append(place)
            self.problems += [
                f"{what} is there more than once; kubectl refuses that, and else only the last one counts"
                for what in repeated
            ]
            for name, item in value.items():
                if name not in found:
                    self.problems.append(
                        f"annotation {quoted(name)} is {_what(item)}, and Kubernetes takes only text; put "
                        "the value in quotes"
                    )
        return found

    def containers(
        self, spec: dict[str, Any], place: str
    ) -> tuple[tuple[Container, ...], list[tuple[str, dict[str, Any]]]]:
        """The containers in the order in which a pod starts them, and each one's place and mapping."""
        found = []
        inner = []
        for key, kind in _CONTAINER_FIELDS:
            every = spec.get(key)
            if every is None:
                continue
            if type(every) is not list:
                self._wrong(_join(place, key), "a list", every)
            for index, container in enumerate(every):
                where = f"{_join(place, key)}[{index}]"
                if type(container) is not dict:
                    self._wrong(where, "a mapping", container)
                name = self.text(container, "name", where)
                if not name:
                    _misshapen(self._document, self._item, f"{where} has no name")
                found.append(Container(name, kind))
                inner.append((where, container))
        return tuple(found), inner

    def _repeated(self, mapping: dict[str, Any]) -> list[str]:
        _, keys = self._document.repeated.get(id(mapping), (mapping, []))
        return list(dict.fromkeys(keys))

    def _wrong(self, place: str, expected: str, value: Any) -> NoReturn:
        _misshapen(self._document, self._item, f"{place} must be {expected}, not {_what(value)}")


def _misshapen(document: _Document, item: str, reason: str, hint: str = "") -> NoReturn:
    where = f"document {document.number} (line {document.line})" + (f", {item}" if item else "")
    raise ManifestError("EXP004", f"{where}: {reason}", hint)


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _what(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a boolean", type(None): "nothing"}
    return names.get(type(value), "a number")


def in_namespace(template: PodTemplate, namespace: str) -> PodTemplate:
    """The same in `namespace` if it names none itself, as kubectl does."""
    return template if template.namespace else evolve(template, namespace=namespace)
