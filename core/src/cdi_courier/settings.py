"""The configuration: every key, its type, its default, and the files they are read from.

The attrs classes below are the schema; they drive reading, checking and (by their metadata) documentation.
This module knows nothing of what the settings do. Reading order and merging: `load`.
"""

# Without annotations as strings, which would have to be read again: attrs sees the schema's types themselves.

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import attrs
from attrs import field, frozen

from cdi_courier import policy
from cdi_courier.errors import SettingsError, quoted
from cdi_courier.names import split_device

SYSTEM_DIR = "/etc/cdi-courier"

RUNTIME_KINDS = ("containerd", "cri-o", "docker", "podman")


# --- checks of single values: each raises ValueError with what is allowed -----------------------------

_Check = Any  # Callable[[object, attrs.Attribute, value], None]; attrs' own type is generic in the value


def _between(low: float, high: float | None = None) -> _Check:
    allowed = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"

    def check(_: object, __: object, value: float) -> None:
        # `not <=` instead of `>`: a NaN is refused too.
        if not low <= value or not (high is None or value <= high) or value == float("inf"):
            raise ValueError(f"a number {allowed}")

    return check


def _matching(pattern: str, allowed: str) -> _Check:
    compiled = re.compile(pattern, re.ASCII)

    def check(_: object, __: object, value: str) -> None:
        if not compiled.fullmatch(value):
            raise ValueError(allowed)

    return check


def _absolute(_: object, __: object, value: str) -> None:
    if not value.startswith("/") or "\0" in value:
        raise ValueError("an absolute path")


def _each(check: _Check) -> _Check:
    def check_all(instance: object, attribute: object, values: tuple[Any, ...]) -> None:
        for value in values:
            check(instance, attribute, value)

    return check_all


def _some(_: object, __: object, values: Sequence[object]) -> None:
    if not values:
        raise ValueError("at least one item; leave the key out for the default")


def _device_pattern(_: object, __: object, value: str) -> None:
    if value != "*" and not split_device(value)[0]:
        raise ValueError('"*" or VENDOR/CLASS=NAME, each part with the globs * ? [..]')


def _log_target(_: object, __: object, value: str) -> None:
    if value != "journal" and (not value.startswith("/") or "\0" in value):
        raise ValueError('"journal" or an absolute file')


# An annotation key has one slash at most and 63 characters behind it; the domain is what stands before.
_domain = _matching(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", "a DNS name without a slash")
_is_listen = _matching(
    r"|unix:/[^\0]+|(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}", '"", "HOST:PORT" or "unix:/path"'
)


def _listen(instance: object, attribute: object, value: str) -> None:
    _is_listen(instance, attribute, value)
    host, colon, port = value.rpartition(":")
    if not colon or value.startswith("unix:"):
        return
    import ipaddress  # a millisecond, for the few who set this

    # Whoever connects is answered, in the clear; what leaves the host does so through something that knows
    # who asks.
    try:
        local = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = False
    if not local or not 0 < int(port) < 65536:
        raise ValueError("a loopback address such as 127.0.0.1:9465 or [::1]:9465, or unix:/path")


def _key(default: Any, doc: str, *checks: _Check) -> Any:
    """One key: its default, a sentence for the reference, and its checks beyond the type."""
    return field(default=default, validator=list(checks) or None, metadata={"doc": doc})


# --- the schema ----------------------------------------------------------------------------------------

# Nobody prints them, and a repr is a third of what it takes to make a class, which every start waits for.


@frozen(repr=False)
class BackendsSettings:
    """``[backends]``: which ways of delivery may be used, and in which order."""

    choose: str = _key("auto", "auto, or the one backend to use; one that cannot serve is an error")
    order: tuple[str, ...] = _key(("nri", "cri_o_drop_in", "oci_hook"), "preference among equals")
    disabled: tuple[str, ...] = _key((), "entry-point names of plugins that are never imported")


@frozen(repr=False)
class RuntimeSettings:
    """``[runtimes] KEY``: what is known better than can be found out about one runtime."""

    backend: str = _key("", "the one backend for this runtime")
    ignore: bool = _key(False, "leave this runtime alone")
    endpoint: str = _key("", "its socket, if not where it is usually")
    config: str = _key("", "its configuration file, if not where it is usually")
    restart: str = _key("", "the command that restarts it")


@frozen(repr=False)
class DeliverySettings:
    """``[delivery]``: what happens when a request cannot be answered in full."""

    undeliverable: Literal["fail", "warn"] = _key(
        "fail", "the chosen way cannot carry an edit; warn starts the container without it"
    )
    on_denied: Literal["fail", "skip"] = _key(
        "fail", "the policy denies a device; skip starts the container without any"
    )
    on_unresolvable: Literal["fail", "skip"] = _key(
        "fail", "a device is not known; skip starts the container without any"
    )


@frozen(repr=False)
class AnnotationsSettings:
    """``[annotations]``: which annotations are answered."""

    dialects: tuple[str, ...] = _key(
        ("nvidia",), "nvidia, device-injector, and those of plugins, in this order"
    )
    domains: tuple[str, ...] = _key(("nvidia.cdi.k8s.io",), "the nvidia dialect's domains", _each(_domain))
    max_names: int = _key(64, "devices a container", _between(1))
    max_length: int = _key(4096, "bytes of one value", _between(1))


@frozen(repr=False)
class CdiSettings:
    """``[cdi]``: where spec files lie and which are believed."""

    dirs: tuple[str, ...] = _key(
        ("/etc/cdi", "/var/run/cdi"),
        "folders of spec files; later ones have precedence",
        _some,
        _each(_absolute),
    )
    trust: Literal["root-owned", "any"] = _key(
        "root-owned", "whose spec files are believed: those that root alone can write, or any"
    )
    max_file_size: int = _key(2097152, "bytes of one spec file", _between(1))


@frozen(repr=False)
class PolicyRule:
    """``[[policy.rules]]``: one rule; an absent list matches anything."""

    action: Literal["allow", "deny"] = field(metadata={"doc": "what a match means"})
    namespaces: tuple[str, ...] = _key(policy.ANY, "globs * ? [..]")
    pods: tuple[str, ...] = _key(policy.ANY, "globs * ? [..]")
    containers: tuple[str, ...] = _key(policy.ANY, "globs * ? [..]")
    devices: tuple[str, ...] = _key(
        policy.ANY, '"*" or VENDOR/CLASS=NAME, each part globbed by itself', _each(_device_pattern)
    )


@frozen(repr=False)
class PolicySettings:
    """``[policy]``: who may have what."""

    default: Literal["deny", "allow"] = _key("deny", "when no rule matches")
    local: Literal["deny", "allow"] = _key("allow", "containers that are not Kubernetes'")
    rules: tuple[PolicyRule, ...] = _key((), "first match wins; the built-in rule is always last")
    # Not a key of the files: where each rule stands, for the refusal's text.
    sources: tuple[str, ...] = field(default=(), metadata={"internal": True})

    def compiled(self) -> policy.Policy:
        """The policy that these settings describe."""
        rules = [
            policy.Rule(
                rule.action,
                namespaces=rule.namespaces,
                pods=rule.pods,
                containers=rule.containers,
                devices=rule.devices,
                source=source,
            )
            for rule, source in zip(self.rules, self.sources, strict=True)
        ]
        return policy.Policy(rules, default=self.default, local=self.local)


@frozen(repr=False)
class NriSettings:
    """``[nri]``: the NRI backend."""

    sockets: tuple[str, ...] = _key(("/var/run/nri/nri.sock",), "one session each", _some, _each(_absolute))
    plugin_name: str = _key(
        "cdi-courier", "as runtimes call it", _matching(r"[A-Za-z0-9_.+-]+", "letters, digits, _ . + -")
    )
    plugin_index: str = _key(
        "10",
        "its place among a runtime's plugins, two digits",
        _matching(r"[0-9]{2}", 'two digits in quotes, such as "10"'),
    )
    delivery: Literal["auto", "names", "edits"] = _key(
        "auto", "what is sent to the runtime: CDI device names or the edits"
    )
    deadline: float = _key(0.7, "share of a request's timeout after which it is refused", _between(0.1, 0.9))
    reconnect_max: float = _key(5.0, "seconds at most between attempts to connect", _between(0.1, 3600))


@frozen(repr=False)
class OciHookSettings:
    """``[oci_hook]``: the OCI hook backend."""

    log: str = _key("journal", "where refusals are written: journal, or an absolute file", _log_target)
    device_cgroup: Literal["enforce", "best-effort"] = _key(
        "enforce", "best-effort goes on where a live container's device cgroup cannot be changed"
    )
    timeout: int = _key(10, "seconds that a runtime grants the hook", _between(1))
    gate_dir: str = _key("/var/lib/cdi-courier/bin", "where the runtime wrapper lies", _absolute)
    handler: str = _key(
        "cdi-courier",
        "the name of the wrapper's handler",
        _matching(r"[A-Za-z0-9_.-]+", "letters, digits, _ . -"),
    )
    handler_mode: Literal["default", "named"] = _key(
        "default", "whether pods get the wrapper by default, or by naming it in a RuntimeClass"
    )


@frozen(repr=False)
class CriODropInSettings:
    """``[cri_o_drop_in]``: the CRI-O backend."""

    mode: Literal["auto", "nri", "handler", "hook"] = _key("auto", "what CRI-O is made to run")
    config_dir: str = _key("/etc/crio/crio.conf.d", "CRI-O's drop-in folder", _absolute)


@frozen(repr=False)
class ProbeSettings:
    """``[probe]``: looking for runtimes."""

    timeout: float = _key(2.0, "seconds, one probe", _between(0.1, 3600))
    interval: float = _key(30.0, "seconds between looks", _between(1, 86400))


@frozen(repr=False)
class ServiceSettings:
    """``[service]``: the daemon."""

    state_dir: str = _key(
        "/run/cdi-courier", "lock, table, status socket; rootless: in the user's runtime folder", _absolute
    )
    log_level: Literal["debug", "info", "warning", "error"] = _key("info", "the least that is logged")
    log_format: Literal["auto", "text", "json"] = _key("auto", "auto: journal fields under systemd")


@frozen(repr=False)
class MetricsSettings:
    """``[metrics]``: the Prometheus endpoint."""

    listen: str = _key("", 'off when empty, else a loopback "HOST:PORT" or "unix:/path"', _listen)


@frozen(repr=False)
class Settings:
    """Every setting. `files` are those that were read, in order."""

    backends: BackendsSettings = field(factory=BackendsSettings)
    runtimes: Mapping[str, RuntimeSettings] = field(factory=dict)
    delivery: DeliverySettings = field(factory=DeliverySettings)
    annotations: AnnotationsSettings = field(factory=AnnotationsSettings)
    cdi: CdiSettings = field(factory=CdiSettings)
    policy: PolicySettings = field(factory=PolicySettings)
    nri: NriSettings = field(factory=NriSettings)
    oci_hook: OciHookSettings = field(factory=OciHookSettings)
    cri_o_drop_in: CriODropInSettings = field(factory=CriODropInSettings)
    probe: ProbeSettings = field(factory=ProbeSettings)
    service: ServiceSettings = field(factory=ServiceSettings)
    metrics: MetricsSettings = field(factory=MetricsSettings)
    files: tuple[str, ...] = field(default=(), metadata={"internal": True})


# --- reading -------------------------------------------------------------------------------------------


def default_dir() -> str:
    """The folder of the configuration files: system-wide, or the user's own when rootless."""
    if os.geteuid() == 0:
        return SYSTEM_DIR
    import platformdirs  # only for users

    return platformdirs.user_config_dir("cdi-courier")


def default_files(base: str | None = None) -> list[str]:
    """The configuration files that exist in `base` (None: `default_dir`), in reading order."""
    base = base or default_dir()
    main, more = os.path.join(base, "config.toml"), os.path.join(base, "conf.d")
    files = [main]
    try:
        os.stat(main)
    except FileNotFoundError:
        files = []
    except OSError:
        pass  # reading it says why it cannot be
    try:
        # Bytewise, whatever the locale: the order decides which file wins.
        names = sorted((n for n in os.listdir(more) if n.endswith(".toml")), key=os.fsencode)
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise SettingsError(
            "SET001", f"cannot list {more}: {error.strerror}", "run as root, or fix the folder"
        ) from None
    return files + [os.path.join(more, name) for name in names]


def load(files: Iterable[str | os.PathLike[str]] | None = None) -> Settings:
    """The settings of `files` (None: `default_files`), merged in order over the defaults.

    Scalars and arrays of a later file replace those of an earlier one; ``policy.rules`` of a later file are
    tried before those of earlier files; ``runtimes`` entries merge key by key.
    Raises `SettingsError`: ``SET001`` unreadable, ``SET002`` not TOML, ``SET003`` unknown table or key,
    ``SET004`` wrong type or value; each names file, line and key and what is allowed.
    """
    paths = default_files() if files is None else [os.fspath(path) for path in files]
    sections: dict[str, dict[str, Any]] = {}
    runtimes: dict[str, dict[str, Any]] = {}
    rules: list[PolicyRule] = []
    sources: list[str] = []
    for path in paths:
        text = _read(path)
        values = _File(path, text).values()
        for key, changed in values.pop("runtimes", {}).items():
            runtimes.setdefault(key, {}).update(changed)
        found = values.get("policy", {}).pop("rules", ())
        rules[:0] = found
        sources[:0] = [f"rule {number} of {path}" for number in range(1, len(found) + 1)]
        for name, section in values.items():
            sections.setdefault(name, {}).update(section)
    if rules:
        sections.setdefault("policy", {}).update(rules=tuple(rules), sources=tuple(sources))
    if os.geteuid() != 0:
        import platformdirs

        runtime_dir = platformdirs.user_runtime_dir("cdi-courier")
        sections.setdefault("service", {}).setdefault("state_dir", runtime_dir)
    types = {a.name: _type_of(a) for a in attrs.fields(Settings)}
    return Settings(
        **{name: types[name](**section) for name, section in sections.items()},
        runtimes={key: RuntimeSettings(**value) for key, value in runtimes.items()},
        files=tuple(paths),
    )


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode()
    except OSError as error:
        raise SettingsError(
            "SET001",
            f"cannot read {path}: {error.strerror}",
            "make it a file that this user may read, or name another with --config",
            file=path,
        ) from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            "SET002", f"{path}: byte {error.start} is not UTF-8", "save the file as UTF-8", file=path
        ) from None


_Path = tuple["str | int", ...]


class _File:
    """One file being checked: turns its values into typed ones and says where a wrong one stands."""

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self._text = text

    def values(self) -> dict[str, dict[str, Any]]:
        """Section → key → typed value, only for what the file sets."""
        try:
            document = tomllib.loads(self._text)
        except (ValueError, RecursionError) as error:  # also for a number of too many digits
            raise SettingsError("SET002", f"{self._path} is not TOML: {error}", file=self._path) from None
        result = {}
        for name, table in document.items():
            attribute = self._attribute(Settings, (name,), "table")
            if name == "runtimes":
                result[name] = self._runtimes(table)
            else:
                result[name] = self._section(_type_of(attribute), table, (name,))
        return result

    def _runtimes(self, table: Any) -> dict[str, Any]:
        self._expect_table(table, ("runtimes",))
        for key in table:
            if key not in RUNTIME_KINDS and not key.startswith("/"):
                allowed = f"{', '.join(RUNTIME_KINDS)}, or an absolute socket path"
                raise self._error("SET003", ("runtimes", key), f"no runtime is called so; allowed: {allowed}")
        return {key: self._section(RuntimeSettings, value, ("runtimes", key)) for key, value in table.items()}

    def _section(self, cls: type, table: Any, path: _Path) -> dict[str, Any]:
        self._expect_table(table, path)
        result = {}
        for key, raw in table.items():
            attribute = self._attribute(cls, (*path, key), "key")
            if attribute.name == "rules":
                result[key] = self._rules(raw, (*path, key))
            else:
                result[key] = self._value(attribute, raw, (*path, key))
        return result

    def _rules(self, raw: Any, path: _Path) -> tuple[PolicyRule, ...]:
        if not isinstance(raw, list):
            raise self._error("SET004", path, f"expected tables [[policy.rules]], not {_describe(raw)}")
        rules = []
        for index, table in enumerate(raw):
            values = self._section(PolicyRule, table, (*path, index))
            if "action" not in values:
                raise self._error("SET004", (*path, index), 'the rule lacks action = "allow" or "deny"')
            rules.append(PolicyRule(**values))
        return tuple(rules)

    def _attribute(self, cls: type, path: _Path, what: str) -> "attrs.Attribute[Any]":
        known: dict[str, attrs.Attribute[Any]] = {
            a.name: a for a in attrs.fields(cls) if not a.metadata.get("internal")
        }
        attribute = known.get(str(path[-1]))
        if attribute is None:
            allowed = ", ".join(known)
            raise self._error("SET003", path, f"there is no such {what}; allowed here: {allowed}")
        return attribute

    def _value(self, attribute: "attrs.Attribute[Any]", raw: Any, path: _Path) -> Any:
        type_ = _type_of(attribute)
        try:
            value = _structured(raw, type_)
        except (TypeError, OverflowError):  # a whole number may be too large to be a float
            raise self._error("SET004", path, f"expected {_expected(type_)}, not {_describe(raw)}") from None
        try:
            if attribute.validator is not None:
                attribute.validator(None, attribute, value)
        except ValueError as error:
            raise self._error("SET004", path, f"expected {error}, not {_describe(raw)}") from None
        return value

    def _expect_table(self, value: Any, path: _Path) -> None:
        if not isinstance(value, dict):
            raise self._error("SET004", path, f"expected a table, not {_describe(value)}")

    def _error(self, code: str, path: _Path, problem: str) -> SettingsError:
        line = _line_of(self._text, path)
        key = ".".join(f"[{p + 1}]" if isinstance(p, int) else p for p in path).replace(".[", "[")
        return SettingsError(code, f"{self._path}, line {line}, {key}: {problem}", file=self._path, key=key)


def _line_of(text: str, path: _Path) -> int:
    """The line, from 1, in which the value at `path` begins.

    TOML is read top to bottom, so the value begins in the first line after the longest readable beginning
    of the file that does not hold it. Only errors pay for this.
    """
    lines = text.splitlines(keepends=True)
    begin = 0
    for end in range(1, len(lines) + 1):
        try:
            document: Any = tomllib.loads("".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue  # inside an array or a string of several lines
        try:
            for part in path:
                document = document[part]
        except (KeyError, IndexError, TypeError):
            begin = end
        else:
            break
    return begin + 1


# --- types ---------------------------------------------------------------------------------------------


def _structured(value: Any, type_: Any) -> Any:
    """A value of TOML as one of a setting's type; raises TypeError if it is none.

    The settings have few types, and a library that knows all of them would take longer to load than all
    settings take to read.
    """
    origin = get_origin(type_)
    if origin is Literal:
        if type(value) is str and value in get_args(type_):
            return value
    elif origin is tuple:
        if type(value) is list:
            (item, _) = get_args(type_)
            return tuple(_structured(element, item) for element in value)
    # `type is`, not isinstance: True is no number. TOML writes 2 for 2.0.
    elif type(value) is type_ or (type_ is float and type(value) is int):
        return type_(value)
    raise TypeError(f"{value!r} is no {type_}")


_TYPE_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _type_of(attribute: "attrs.Attribute[Any]") -> Any:
    return attribute.type


def _expected(type_: Any) -> str:
    if get_origin(type_) is Literal:
        return "one of " + ", ".join(map(quoted, get_args(type_)))
    if get_origin(type_) is tuple:
        return "an array of strings"
    return _TYPE_NAMES[type_]


def _describe(value: Any) -> str:
    """The wrong value, for the message."""
    if isinstance(value, str):
        return quoted(value, 60)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "the array " + quoted(str(value), 60).strip('"')
    return str(value)


def override(section: str, key: str, value: object, option: str) -> Any:
    """`value` given by the command line instead of ``[section] key``, checked as a file's would be.

    Raises `SettingsError` ``SET004`` that names the option.
    """
    table = attrs.fields_dict(Settings)[section].type
    attribute = attrs.fields_dict(table)[key]  # type: ignore[arg-type]
    try:
        if attribute.validator is not None:
            attribute.validator(None, attribute, value)
    except ValueError as error:
        shown = value[0] if isinstance(value, tuple) else value
        raise SettingsError("SET004", f"{option}: expected {error}, not {_describe(shown)}") from None
    return value
