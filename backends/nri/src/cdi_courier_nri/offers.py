"""What the NRI backend can do for a runtime that has been described. It asks and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdi_courier.hookspecs import Needs, Offer

from . import NAME, runtimes
from .edits import PreparedEdits

if TYPE_CHECKING:
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injection
    from cdi_courier.settings import Settings


def offer(runtime: Runtime, settings: Settings) -> Offer:
    """Ready where NRI is on and ours; a restart away where it is off; else impossible, with the reason."""
    # Here, because it is needed first when the host has been described, and the sockets come before that.
    from cdi_courier.host.model import FIRST_WITH_NRI

    since = FIRST_WITH_NRI.get(runtime.kind)
    if since is None:
        return _offer("impossible", f"{runtime.kind} has no NRI that could carry devices")
    version = runtime.version_tuple
    if version is not None and version < since:
        first = ".".join(map(str, since[:2]))
        return _offer("impossible", f"{runtime.kind} has NRI since {first}, this is {runtime.version}")
    state = runtime.get("nri", "unknown")
    if state == "absent":
        return _offer("impossible", f"this {runtime.kind} has no NRI")
    if runtime.get("nri_connections") is False:
        return _offer(
            "impossible", "NRI lets in only plugins that the runtime launches (disable_connections)"
        )
    if state == "on":
        return _ready(runtime, settings)
    if runtime.kind == "cri-o":
        return _offer("impossible", "NRI is off; backend cri_o_drop_in turns it on")
    what = "NRI is off" if state == "off" else "whether NRI is on could not be learnt"
    if template := runtime.get("config_template"):
        return _offer("restart", f"{what}; its configuration is generated from {template}")
    if distribution := runtime.get("distribution"):
        return _offer("restart", f"{what}; {distribution} generates its configuration")
    return _offer(
        "restart", f"{what}; a drop-in for {runtime.get('config', 'its configuration')} turns it on"
    )


def _ready(runtime: Runtime, settings: Settings) -> Offer:
    socket = runtime.get("nri_socket")
    ours = {os.path.realpath(path) for path in settings.nri.sockets}
    if socket is not None and os.path.realpath(socket) not in ours:
        return _offer("impossible", f"NRI is on at {socket}, which [nri] sockets does not name")
    rejects = runtime.get("nri_validator", {})
    how, why = delivery(runtime, settings)
    if how == "edits" and rejects.get("reject_oci_hook_adjustment"):
        why += "; its validator rejects hooks, so devices with hooks fail"
    return _offer("nothing", f"NRI is on; delivering by {how}: {why}")


def delivery(runtime: Runtime, settings: Settings) -> tuple[str, str]:
    """Names or edits for this runtime, and why."""
    if settings.nri.delivery != "auto":
        return settings.nri.delivery, f'[nri] delivery = "{settings.nri.delivery}"'
    return runtimes.delivery(
        runtime.kind,
        runtime.version,
        settings.cdi.dirs,
        runtime_dirs=runtime.get("cdi_spec_dirs"),
        cdi_enabled=runtime.get("cdi_enabled"),
    )


def undeliverable(runtime: Runtime, injection: Injection, settings: Settings) -> Sequence[tuple[str, str]]:
    """What edits lose on this runtime in a container that has nothing yet; names lose nothing."""
    if delivery(runtime, settings)[0] == "names":
        return ()
    nri = runtimes.nri_version(runtime.kind, runtime.version, "")
    return PreparedEdits(injection.edits, nri).lost


def _offer(needs: Needs, reason: str) -> Offer:
    return Offer(NAME, "full", needs, reason)
