"""A CRI-O that does not run: what its files and its program tell of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from cdi_courier.host.model import Runtime
from cdi_courier.settings import RuntimeSettings
from cdi_courier_cri_o.backend import CriODropInBackend

from .conftest import Site

Program = Callable[[str], Path]


def found(site: Site) -> list[Runtime]:
    site.settings = attrs.evolve(site.settings, runtimes={"cri-o": RuntimeSettings(config=str(site.main))})
    return list(CriODropInBackend().dormant(site.settings))


def test_its_files_tell_what_it_will_run_with(site: Site, program: Program) -> None:
    """Each fact says that it comes from there; the drop-in counts with the others."""
    program("echo 'crio version 1.28.1'")
    site.main.write_text(site.live or "")
    site.drop_in.write_text("[crio.nri]\nenable_nri = true\n")
    (runtime,) = found(site)

    assert (runtime.key, runtime.endpoint, runtime.version) == ("cri-o", "", "1.28.1")
    assert runtime.get("nri") == "on"
    assert runtime.get("default_handler") == "runc"
    assert runtime.get("hooks_dirs") == ["/usr/share/containers/oci/hooks.d"]
    assert "does not run" in runtime.facts["nri"].source
    assert runtime.problems == ("CRI-O does not run",)


@pytest.mark.parametrize(
    ("version", "nri"), [("1.25.1", "absent"), ("1.26.0", "off"), ("1.30.0", "on"), ("", None)]
)
def test_what_files_do_not_say_is_the_versions_default(
    site: Site, program: Program, version: str, nri: str | None
) -> None:
    """Of an unknown version nothing is taken for granted."""
    program(f"echo 'crio version {version}'")
    (runtime,) = found(site)

    assert runtime.get("nri") == nri


def test_files_do_not_give_an_old_version_nri(site: Site, program: Program) -> None:
    """What a newer CRI-O's files enable, one before 1.26 does not know."""
    program("echo 'crio version 1.25.1'")
    site.drop_in.write_text("[crio.nri]\nenable_nri = true\n")
    (runtime,) = found(site)

    assert runtime.get("nri") == "absent"


def test_a_host_without_cri_o_has_none(site: Site) -> None:
    """Neither a program nor a file of it is here."""
    site.folder.rmdir()

    assert found(site) == []


def test_a_drop_in_of_ours_that_is_broken_is_passed_over(site: Site) -> None:
    """It will be written anew."""
    site.drop_in.write_text("[[[")

    assert len(found(site)) == 1


def test_it_can_be_planned_for(site: Site, program: Program) -> None:
    """What nobody could verify is among the notes."""
    program('case $1 in --version) echo "crio version 1.26.1";; *) cat "$4"/90-cdi-courier.conf;; esac')
    (runtime,) = found(site)
    plan = CriODropInBackend().plan(runtime, site.settings)

    assert [change.path for change in plan.files] == [str(site.drop_in)]
    assert any("CRI-O does not run" in note for note in plan.notes)
