"""The dialects that come with cdi-courier, offered through the same hook as a plugin's.

``device-injector`` is the ``cdi-devices`` family of the NRI sample plugin of that name: a YAML list, keys of
two generations tried in turn (docs/facts.md#device-injector-annotations).
"""

from __future__ import annotations

from cdi_courier.annotations import NVIDIA, Dialect
from cdi_courier.errors import AnnotationError, quoted
from cdi_courier.hookspecs import hookimpl

_OLD = "cdi-devices.nri.io"
_FORMS = ("/container.{container}", "/pod", "")


@hookimpl
def cdi_courier_dialects() -> tuple[Dialect, ...]:
    """Both built-in dialects."""
    return (NVIDIA, DEVICE_INJECTOR)


def yaml_list(value: str) -> list[str]:
    """A YAML or JSON list of names; ``null`` and ``[]`` ask for nothing; anything else is ``ANN005``."""
    import yaml  # loaded with the first spec file, and not before the daemon has registered

    try:
        # Like the plugin it is compatible with, only the first document counts.
        document = next(yaml.compose_all(value, Loader=yaml.CSafeLoader), None)
    except UnicodeError:
        # An OCI config is JSON, which can hold half a surrogate pair; libyaml takes only what UTF-8 can say.
        raise AnnotationError("ANN005", f"{quoted(value)} is not Unicode text", _HINT) from None
    except (yaml.YAMLError, RecursionError) as error:
        problem = getattr(error, "problem", None) or "nested too deeply"
        raise AnnotationError("ANN005", f"{quoted(value)} is not YAML: {problem}", _HINT) from None
    # Only a plain null is one: in quotes it is a string, and no list.
    if document is None or document.tag == "tag:yaml.org,2002:null":
        return []
    items = document.value if isinstance(document, yaml.SequenceNode) else None
    if items is None or not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise AnnotationError("ANN005", f"{quoted(value)} is not a list of strings", _HINT)
    return [item.value for item in items]


_HINT = 'write a YAML list, for example ["vendor.com/class=name"]'

DEVICE_INJECTOR = Dialect(
    "device-injector",
    tuple(domain + form for form in _FORMS for domain in ("{domain}", _OLD)),
    yaml_list,
    domains=("cdi-devices.noderesource.dev",),
)
