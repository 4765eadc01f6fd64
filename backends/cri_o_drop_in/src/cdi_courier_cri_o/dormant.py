"""A CRI-O that does not run, described from its files and its program; what only it could tell is missing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from cdi_courier.host import crio
from cdi_courier.host.answers import Findings
from cdi_courier.host.model import Runtime

from . import configuration, dryrun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.settings import Settings

_KEY: Final = "cri-o"
_SOURCE: Final = "CRI-O's files; it does not run"
_FIRST_WITH_NRI_ON: Final = (1, 30, 0)


def describe(settings: Settings) -> Sequence[Runtime]:
    """The CRI-O whose files or program are here; none if neither is. Raises `HostError` ``CRI103``."""
    own = settings.runtimes.get(_KEY)
    main = own.config if own and own.config else crio.DEFAULT_CONFIG
    program = dryrun.program(None)
    if not program and not os.path.exists(main) and not os.path.isdir(settings.cri_o_drop_in.config_dir):
        return ()
    findings = Findings()
    findings.learn("config", main, "[runtimes] config" if own and own.config else "where it lies by default")
    findings.learn("config_exists", os.path.exists(main), main)
    version = dryrun.version(program) if program else ""
    findings.version = version
    # Before the files, because NRI is nothing that they could give to a version without it.
    crio.learn_from_version(findings)
    runtime = Runtime(_KEY, "cri-o", version, "", findings.facts)
    found = configuration.from_files(runtime, settings)
    stored = configuration.merged([*(file.document for file in found.files), found.ours])
    crio.learn_from_config(stored, findings, _SOURCE)
    numbers = runtime.version_tuple
    if numbers is not None:
        state = "on" if numbers >= _FIRST_WITH_NRI_ON else "off"
        findings.learn("nri", state, f"CRI-O {version} does not run; that is its default")
    return (Runtime(_KEY, "cri-o", version, "", findings.facts, ("CRI-O does not run",)),)
