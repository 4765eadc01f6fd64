"""Decides what a runtime's containers are sent, and whether they are this plugin's at all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from . import NAME, runtimes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdi_courier.hookspecs import Choice
    from cdi_courier.settings import Settings

    from .session import Configured

logger = logging.getLogger("cdi_courier.nri")

_UNKNOWN: Final = "the runtime has not introduced itself"


@frozen
class Mode:
    """What a runtime is sent. idle: why its containers are left alone instead; empty if they are not."""

    delivery: runtimes.Delivery
    why: str
    nri: tuple[int, int]
    idle: str

    def tell(self) -> None:
        """Log it."""
        if self.idle:
            logger.warning("this runtime's containers are left alone: %s", self.idle)
        else:
            logger.info("delivering by %s: %s", self.delivery, self.why)


def before_introduction(settings: Settings) -> Mode:
    """What can be said of a runtime that is not known."""
    return Mode("names" if settings.nri.delivery == "names" else "edits", _UNKNOWN, (0, 0), "")


def decide(info: Configured, path: str, settings: Settings, found: Choice | None) -> Mode:
    """What a runtime is sent that has introduced itself.

    path: its NRI socket, by which ``[runtimes]`` may know it. found: what has been chosen for it, if it has
    been described.
    """
    name, version = info.runtime_name, info.runtime_version
    nri = runtimes.nri_version(name, version, info.nri_version)
    endpoint = found.runtime.endpoint if found else ""
    idle = _why_idle(settings.runtimes, (endpoint, path, runtimes.kind(name)))
    if found is not None and found.is_served_by(NAME):
        idle = ""  # also where another backend is demanded, which has only arranged that this one serves
    elif not idle and found is not None and found.active is not None:
        idle = f"backend {found.active} serves them"
    if settings.nri.delivery != "auto":
        return Mode(settings.nri.delivery, f'[nri] delivery = "{settings.nri.delivery}"', nri, idle)
    delivery, why = runtimes.delivery(
        name,
        version,
        settings.cdi.dirs,
        runtime_dirs=found.runtime.get("cdi_spec_dirs") if found else None,
        cdi_enabled=found.runtime.get("cdi_enabled") if found else None,
    )
    return Mode(delivery, why, nri, idle)


def _why_idle(known: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Why the settings want this runtime's containers left alone; empty if they do not.

    keys: what ``[runtimes]`` may call it, the first that it has counts: a path beats a kind.
    """
    for key in keys:
        runtime = known.get(key)
        if runtime is not None:
            if runtime.ignore:
                return f'[runtimes] "{key}" says ignore'
            if runtime.backend not in ("", NAME):
                return f'[runtimes] "{key}" gives them to backend {runtime.backend}'
            break
    return ""
