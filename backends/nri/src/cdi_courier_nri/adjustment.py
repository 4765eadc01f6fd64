"""From an Injection to the reply that delivers it. Pure; it decides nothing about who gets what.

One reply must never claim one key twice: the runtime takes that for a conflict of the plugin with itself and
fails the container (docs/facts.md#nri-ownership).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from . import messages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .edits import Adjusted, PreparedEdits

STATUS_ANNOTATION = "cdi-courier.io/status"
"""The marker on a container that was handled. Evidence for an audit, never an authorisation: a pod's author
can write it too."""


def by_names(names: Iterable[str], present: Collection[str] = ()) -> bytes:
    """A CreateContainerResponse that asks the runtime to inject `names`.

    names: qualified, without duplicates. present: names the runtime injects anyway, which are left out:
    a name injected twice doubles its hooks.
    """
    names = tuple(names)
    response = messages.CreateContainerResponse()
    adjust = response.adjust
    adjust.annotations[STATUS_ANNOTATION] = "injected:" + ",".join(names)
    for name in names:
        if name not in present:
            adjust.CDI_devices.add(name=name)
    data: bytes = response.SerializeToString()
    return data


def by_edits(
    names: Iterable[str], edits: PreparedEdits, container: Any, data: bytes | None = None
) -> tuple[bytes, Adjusted]:
    """A CreateContainerResponse that holds the edits of `names` themselves, and what is not in it.

    container: `messages.ContainerDetails`. data: the bytes that was read from. Raises `CdiError` as
    `PreparedEdits.encode`.
    """
    encoded, adjusted = edits.encode(container, data)
    marked = _marked_usual if encoded is edits.usual else _marked
    return marked(tuple(names), encoded), adjusted


def _marked(names: tuple[str, ...], encoded: bytes) -> bytes:
    marker = messages.ContainerAdjustment(annotations={STATUS_ANNOTATION: "injected:" + ",".join(names)})
    # Messages that follow each other are one message.
    response = messages.EncodedCreateContainerResponse(adjust=marker.SerializeToString() + encoded)
    data: bytes = response.SerializeToString()
    return data


_marked_usual = functools.lru_cache(16)(_marked)


def skipped(code: str) -> bytes:
    """A CreateContainerResponse that changes nothing but says that a request was left unanswered."""
    response = messages.CreateContainerResponse()
    response.adjust.annotations[STATUS_ANNOTATION] = f"skipped:{code}"
    data: bytes = response.SerializeToString()
    return data
