"""Annotation dialects: from a pod's annotations to the device names it asks for.

Light module. It knows keys and values; it does not know whether a device exists or who may have it.
Source of the key forms: docs/facts.md#annotation-keys.
"""

from __future__ import annotations

from cdi_courier.errors import AnnotationError, quoted
from cdi_courier.names import invalid_qualified

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    # One domain of one dialect: key prefixes with "does the container's name follow?", and the parser.
    KeyFamily = tuple[tuple[tuple[str, bool], ...], Callable[[str], list[str]]]
    # (key, value, parser) of each family that is present
    Asked = tuple[tuple[str, str, Callable[[str], list[str]]], ...]

_BLANKS = " \t\r\n"
_CONTAINER = "{container}"


class Dialect:
    """How one family of annotations is written; pure data, so that a plugin can supply one.

    name: what ``[annotations] dialects`` calls it.
    keys: key forms, the first one present wins; ``{domain}`` is replaced by the domain, ``{container}``
        (only at the end) by the container's name. A form that names the container is not looked at
        while the runtime does not tell the name.
    parse: annotation value → names, in order; raises `AnnotationError` for a value that does not parse.
        A blank value never reaches it: it is present and asks for nothing.
    domains: the domains it applies to; None means those of ``[annotations] domains``.
    """

    __slots__ = ("domains", "keys", "name", "parse")

    def __init__(
        self,
        name: str,
        keys: Sequence[str],
        parse: Callable[[str], list[str]],
        domains: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.keys = tuple(keys)
        self.parse = parse
        self.domains = None if domains is None else tuple(domains)


def comma_list(value: str) -> list[str]:
    """``"a/b=c, d/e=f"`` → names without the blanks around them; an empty item is an error (``ANN002``)."""
    items = [item.strip(_BLANKS) for item in value.split(",")]
    if "" in items:
        raise AnnotationError(
            "ANN002",
            f"item {items.index('') + 1} of the list {quoted(value)} is empty",
            "remove the superfluous comma",
        )
    return items


NVIDIA = Dialect("nvidia", ("{domain}/container.{container}", "{domain}/pod", "{domain}"), comma_list)


def compile_keys(dialects: Iterable[Dialect], domains: Sequence[str]) -> tuple[KeyFamily, ...]:
    """What `requested_devices` looks up: one family a domain, all domains of a dialect before the next."""
    families: list[KeyFamily] = []
    for dialect in dialects:
        for domain in domains if dialect.domains is None else dialect.domains:
            forms = []
            for key in dialect.keys:
                prefix = key.replace("{domain}", domain)
                scoped = prefix.endswith(_CONTAINER)
                forms.append((prefix.removesuffix(_CONTAINER), scoped))
            families.append((tuple(forms), dialect.parse))
    return tuple(families)


def asked(annotations: Mapping[str, str], container: str, families: Iterable[KeyFamily]) -> Asked:
    """The annotations that decide, as (key, value, parser): within a family the first key present."""
    found: Asked = ()
    for forms, parse in families:
        for prefix, scoped in forms:
            if scoped:
                if not container:
                    continue
                key = prefix + container
            else:
                key = prefix
            value = annotations.get(key)
            if value is not None:
                found += ((key, value, parse),)
                break
    return found


def needles(families: Iterable[KeyFamily]) -> tuple[bytes, ...]:
    """Bytes of which at least one is in every encoding that holds one of these keys as it is.

    ``b""``, which is in everything, where a key form has no fixed beginning.
    """
    prefixes = {prefix.encode("utf-8", "surrogatepass") for forms, _ in families for prefix, _ in forms}
    return tuple(sorted(p for p in prefixes if not any(o in p for o in prefixes if o != p)))


def requested_devices(
    annotations: Mapping[str, str],
    container: str,
    families: Iterable[KeyFamily],
    *,
    max_names: int = 64,
    max_length: int = 4096,
) -> dict[str, str]:
    """The qualified names asked for, in order and without duplicates, each with the key that asks for it.

    Within a family the first key present decides, even if its value is blank; families are concatenated.
    Raises `AnnotationError`: ``ANN001`` not a qualified name, ``ANN002`` empty item, ``ANN003`` value longer
    than `max_length` bytes, ``ANN004`` more than `max_names` names.
    """
    return devices_asked(asked(annotations, container, families), max_names, max_length)


def devices_asked(found: Asked, max_names: int, max_length: int) -> dict[str, str]:
    """`requested_devices` of what `asked` has found. Raises the same."""
    requested: dict[str, str] = {}
    for key, value, parse in found:
        for name in _names_in_value(key, value, parse, max_length):
            requested.setdefault(name, key)
    if len(requested) > max_names:
        keys = ", ".join(quoted(key) for key in dict.fromkeys(requested.values()))
        raise AnnotationError(
            "ANN004",
            f"annotation {keys} asks for {len(requested)} devices, more than {max_names}",
            "ask for fewer devices or raise [annotations] max_names",
        )
    return requested


def _names_in_value(
    key: str, value: str, parse: Callable[[str], list[str]], max_length: int
) -> Sequence[str]:
    """The names that one annotation's value holds, in order. Raises as `requested_devices` for that alone."""
    # A character is at least one byte: the encoder sees only what could still fit.
    if len(value) > max_length or len(value.encode("utf-8", "surrogatepass")) > max_length:
        raise AnnotationError(
            "ANN003",
            f"annotation {quoted(key)} is longer than {max_length} bytes",
            "ask for fewer devices or raise [annotations] max_length",
            annotation=key,
        )
    if not value.strip(_BLANKS):
        return []
    try:
        names = parse(value)
    except AnnotationError as error:
        raise AnnotationError(
            error.code, f"annotation {quoted(key)}: {error.message}", error.hint, annotation=key
        ) from None
    for name in names:
        reason = invalid_qualified(name)
        if reason is not None:
            raise AnnotationError(
                "ANN001",
                f"annotation {quoted(key)}: {quoted(name)} is not a qualified CDI device name: {reason}",
                "write VENDOR/CLASS=NAME, for example management.nvidia.com/gpu=all",
                annotation=key,
            )
    return names
