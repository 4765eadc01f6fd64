"""A container's OCI config in, the edited config out: the core of every entry point that edits configs.

Light module. It knows neither where a config comes from nor where it goes. What the compiled table cannot
answer for certain it leaves to the slow way (`SlowPath`): the full pipeline, whose result goes through
`put_in` as well.
"""

from __future__ import annotations

from cdi_courier.annotations import asked, requested_devices
from cdi_courier.errors import CdiError, CourierError, PolicyDenied
from cdi_courier.oci import apply_edits, has_user_namespace
from cdi_courier.policy import require
from cdi_courier.request import ContainerRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from cdi_courier.request import Origin
    from cdi_courier.table import Table

    Json = dict[str, Any]

STATUS_ANNOTATION = "cdi-courier.io/status"
"""The marker on a container that was handled. Evidence for an audit, never an authorisation."""


class SlowPath(Exception):  # noqa: N818 - no error: another way has the answer
    """The table cannot tell; the full pipeline can."""


class Edited:
    """An answer that changes the config.

    config: the new one. names: of the devices put in; empty if they were skipped because of `skipped`.
    env: the variables put in, ``NAME=value``, also those that the config had already.
    """

    __slots__ = ("config", "env", "names", "skipped")

    def __init__(
        self,
        config: Json,
        names: Iterable[str],
        skipped: CourierError | None = None,
        *,
        env: Iterable[str] = (),
    ) -> None:
        self.config = config
        self.names = tuple(names)
        self.skipped = skipped
        self.env = tuple(env)


def request_of(
    config: Any, origin: Origin, *, namespace: str = "", pod: str = "", container: str = ""
) -> ContainerRequest:
    """Who asks, by the config's annotations. The names are what the entry point knows of them for certain.

    Raises `CdiError` ``CDI018`` for a config that is no object, or whose annotations are not strings.
    """
    if not isinstance(config, dict):
        raise _misshapen("it is not an object")
    annotations = config.get("annotations")
    if annotations is None:
        annotations = {}
    if not isinstance(annotations, dict) or not all(isinstance(v, str) for v in annotations.values()):
        raise _misshapen("annotations is not an object of strings")
    return ContainerRequest(annotations, namespace=namespace, pod=pod, container=container, origin=origin)


def edit(config: Json, request: ContainerRequest, table: Table, *, nested: bool = False) -> Edited | None:
    """The config with what `request` asks for; None if it asks for nothing. `config` is not changed.

    nested: as in `put_in`. Raises as `grant`, and `CdiError` ``CDI017`` and ``CDI018``.
    """
    granted = grant(request, table)
    if granted is None:
        return None
    if isinstance(granted, CourierError):
        return skip(config, granted)
    return put_in(config, granted.names, granted.edits, nested=nested)


class Granted:
    """What a container gets. names: of the devices. edits: theirs, merged, to be changed by nobody."""

    __slots__ = ("edits", "names")

    def __init__(self, names: Iterable[str], edits: Json) -> None:
        self.names = tuple(names)
        self.edits = edits


def grant(request: ContainerRequest, table: Table) -> Granted | CourierError | None:
    """What the table says of a request; None if it asks for nothing, an error if that is to be skipped.

    Raises `SlowPath` where the table cannot tell, and as the full pipeline does: `AnnotationError`,
    `PolicyDenied` unless the settings say to skip.
    """
    if asked(request.annotations, request.container, table.foreign):
        raise SlowPath
    requested = requested_devices(
        request.annotations,
        request.container,
        table.families,
        max_names=table.max_names,
        max_length=table.max_length,
    )
    if not requested:
        return None
    try:
        require(table.policy(), request, requested)
    except PolicyDenied as error:
        if table.skip_denied:
            return error
        raise
    edits = table.resolve(requested)
    if edits is None:
        raise SlowPath
    return Granted(requested, edits)


def put_in(config: Json, names: Iterable[str], edits: Json, *, nested: bool = False) -> Edited:
    """The config with merged `edits` applied and the marker that says so.

    nested: the engine itself runs in a user namespace, such as a rootless one. There, and for containers
    with a user namespace of their own, nodes cannot be made: OCI runtimes bind-mount the host's node of the
    same path, so one of another path becomes a bind mount.

    A hook that the config has already, to the letter, is not added: the engine may have injected the device
    itself. Nor are cgroup rules that are the config's last ones already, so that editing twice is editing
    once. Everything else in edits replaces its like. Raises `CdiError` ``CDI017``, ``CDI018``.
    """
    names = tuple(names)
    wanted = edits.get("hooks")
    if wanted:
        edits = {**edits, "hooks": [hook for hook in wanted if not has_hook(config, hook)]}
    edited = apply_edits(config, edits)
    _drop_repeated_rules(config, edited)
    bound = _of_another_path(edits.get("deviceNodes") or [])
    if bound and (nested or has_user_namespace(edited)):
        _bind_nodes(edited, bound)
    return Edited(_marked(edited, "injected:" + ",".join(names)), names, env=edits.get("env") or ())


def skip(config: Json, error: CourierError) -> Edited:
    """The config without devices, because the settings say so, and with the marker that says why."""
    return Edited(_marked({**config}, f"skipped:{error.code}"), (), error)


def _drop_repeated_rules(config: Json, edited: Json) -> None:
    """Take the appended cgroup rules away if the config ended with just these: the last match decides."""
    before, after = _rules(config), _rules(edited)
    added = len(after) - len(before)
    if 0 < added <= len(before) and after[-added:] == before[-added:]:
        del after[-added:]


def _rules(config: Json) -> list[Any]:
    found: Any = config
    for key in ("linux", "resources", "devices"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, list) else []


def _of_another_path(nodes: Iterable[Json]) -> dict[str, str]:
    """Path → path on the host, of nodes whose two differ; of several with one path the last counts."""
    every = {node["path"]: node.get("hostPath") or node["path"] for node in nodes}
    return {path: host_path for path, host_path in every.items() if host_path != path}


def _bind_nodes(config: Json, bound: dict[str, str]) -> None:
    """Turn these nodes into bind mounts; what their cgroup rules allow stays."""
    linux = config["linux"]
    linux["devices"] = [device for device in linux["devices"] if device.get("path") not in bound]
    mounts = [
        {
            "hostPath": source,
            "containerPath": path,
            "type": "bind",
            "options": ["bind", "rw", "nosuid", "noexec"],
        }
        for path, source in bound.items()
    ]
    # Alone with the mounts, or a node would have its owners mapped, which its file system may not allow.
    config["mounts"] = apply_edits({"mounts": config.get("mounts")}, {"mounts": mounts})["mounts"]


def _misshapen(what: str) -> CdiError:
    return CdiError("CDI018", f"the OCI config is not usable: {what}")


def has_hook(config: Json, wanted: Json) -> bool:
    """Whether the config has a CDI hook already, to the letter."""
    hooks = config.get("hooks")
    present = hooks.get(wanted["hookName"]) if isinstance(hooks, dict) else None
    if not isinstance(present, list):
        return False
    plain = {key: value for key, value in wanted.items() if key != "hookName"}
    return any(
        isinstance(hook, dict)
        and {key: value for key, value in hook.items() if value not in (None, [])} == plain
        for hook in present
    )


def _marked(config: Json, status: str) -> Json:
    return {**config, "annotations": {**(config.get("annotations") or {}), STATUS_ANNOTATION: status}}
