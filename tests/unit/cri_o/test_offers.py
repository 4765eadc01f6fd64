"""Which way CRI-O is made to deliver, whether it does so by now, and what will end it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier.hookspecs import Offer
from cdi_courier.host import listeners
from cdi_courier_cri_o import offers, ways
from support import fake_crio

from .conftest import NRI_OFF, PLAIN, Site

ON = NRI_OFF.replace("enable_nri = false", "enable_nri = true")


def handled(site: Site, **changed: str) -> str:
    """What CRI-O says once the handler is in effect."""
    gate = site.root / "bin/cdi-courier-cri-o"
    gate.parent.mkdir(exist_ok=True)
    gate.write_text("#!/bin/sh\n")
    gate.chmod(0o755)
    runtime = PLAIN.replace('default_runtime = "runc"', 'default_runtime = "cdi-courier"')
    text = runtime + f'[crio.runtime.runtimes.cdi-courier]\nruntime_path = "{gate}"\nruntime_type = "oci"\n'
    for old, new in changed.items():
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("version", "mode", "restart", "chosen"),
    [
        pytest.param("1.22.0", "auto", True, "hook", id="1.22"),
        pytest.param("1.23.5", "auto", True, "hook", id="1.23"),
        pytest.param("1.24.6", "auto", True, "handler", id="1.24"),
        pytest.param("1.25.3", "auto", True, "handler", id="1.25"),
        pytest.param("1.26.0", "auto", True, "nri", id="1.26"),
        pytest.param("1.33.1", "auto", True, "nri", id="1.33"),
        pytest.param("1.36.3", "auto", True, "nri", id="1.36"),
        pytest.param("1.36.3", "auto", False, "hook", id="1.36 without restart"),
        pytest.param("1.24.6", "auto", False, "hook", id="1.24 without restart"),
        pytest.param("1.36.3", "nri", False, "", id="nri without restart"),
        pytest.param("1.36.3", "handler", True, "handler", id="1.36 handler"),
        pytest.param("1.36.3", "hook", True, "hook", id="1.36 hook"),
        pytest.param("1.25.3", "nri", True, "", id="1.25 nri"),
        pytest.param("1.23.5", "handler", True, "", id="1.23 handler"),
        pytest.param("1.19.0", "auto", True, "", id="1.19"),
        pytest.param("", "auto", True, "", id="unknown"),
        pytest.param("", "nri", True, "nri", id="unknown nri"),
        pytest.param("", "handler", True, "handler", id="unknown handler"),
    ],
)
def test_the_way_follows_from_version_mode_and_restart(
    site: Site, version: str, mode: str, restart: bool, chosen: str
) -> None:
    """The best that the version has, unless the settings demand one; whatever cannot be has its reason."""
    site.version = version
    site.told(cri_o_drop_in={"mode": mode})
    found, reasons = offers.choose(site.runtime(), site.settings, restart=restart)

    assert found == chosen
    assert all(reasons.values())
    assert chosen or reasons


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"backends": {"disabled": ("nri",)}}, "disabled", id="disabled"),
        pytest.param({"absent": True}, "not installed", id="not installed"),
        pytest.param({"live": "nri_disable_connections = true\n"}, "nri_disable_connections", id="closed"),
    ],
)
def test_where_nri_is_unwanted_or_impossible_the_handler_is_offered(
    site: Site, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    """The offer says why it is not NRI."""
    site.live = NRI_OFF + change.pop("live", "")
    if change.pop("absent", False):
        monkeypatch.setattr(ways, "has_nri", lambda: False)
    site.told(**change)
    made = site.offer()

    assert (made.needs, made.fidelity, made.via) == ("restart", "full", "oci_hook")
    assert says in made.reason


def test_an_nri_socket_that_another_runtime_holds_is_left_to_it(site: Site, tmp_path: Path) -> None:
    """NRI would take the file away from under it; so the handler is offered, and NRI by force is refused."""
    socket = tmp_path / "nri.sock"
    site.live = NRI_OFF.replace("/nonexistent/nri.sock", str(socket))
    with fake_crio.listening(socket):
        made = site.offer()
        site.told(cri_o_drop_in={"mode": "nri"})
        error = site.refused()
    fake_crio.stale(socket)
    site.told(cri_o_drop_in={"mode": "auto"})

    assert made.via == "oci_hook"
    assert "another runtime listens at" in made.reason
    assert (error.code, str(socket) in error.message) == ("CRI101", True)
    assert site.offer().via == "nri"


def test_what_the_kernel_does_not_tell_is_no_listener(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its answer nothing is denied."""

    def fail() -> Any:
        raise OSError

    monkeypatch.setattr(listeners, "_listening", fail)

    assert site.offer().via == "nri"


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        pytest.param('runtime_type = "vm"', "of type vm", id="vm"),
        pytest.param('runtime_path = "/usr/bin/runsc"', "does not work as runc does", id="gvisor"),
    ],
)
def test_a_default_handler_that_is_not_like_runc_gets_no_wrapper(site: Site, handler: str, says: str) -> None:
    """Edits of a bundle mean nothing to it."""
    site.version = "1.25.0"
    key = handler.partition(" = ")[0]
    lines = [handler if line.startswith(key) else line for line in PLAIN.splitlines()]
    site.live = "\n".join(lines)
    made = site.offer()

    assert (made.needs, made.fidelity) == ("install", "partial")
    assert says in offers.choose(site.runtime(), site.settings)[1]["handler"]


# What is in effect


def test_nri_that_was_on_before_is_not_ours(site: Site) -> None:
    """There is nothing to arrange, and nothing is planned."""
    site.live = ON
    plan = site.plan()

    assert site.offer() == Offer(
        offers.NAME, "partial", "impossible", "NRI is on already; there is nothing to arrange"
    )
    assert (plan.files, plan.notes) == ((), ("cri-o serves NRI already",))


def test_nri_that_the_drop_in_has_turned_on_is_in_effect(site: Site) -> None:
    """The offer needs nothing, and the same plan again changes nothing."""
    site.apply(site.plan())
    site.live = ON
    made = site.offer()

    assert (made.needs, made.via, made.warning) == ("nothing", "nri", "")
    assert site.plan().files == ()


def test_a_socket_that_cri_o_does_not_serve_is_not_nri(site: Site) -> None:
    """What GET /config says is no proof; the description has looked at the socket."""
    site.apply(site.plan())
    site.live = ON
    runtime = attrs.evolve(site.runtime(), problems=("HST106: CRI-O has NRI on, but nobody listens",))
    made = offers.offer(runtime, site.settings)

    assert (made.needs, "nobody listens" in made.reason) == ("restart", True)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param({}, "is in effect", id="in effect"),
        pytest.param(
            {'default_runtime = "cdi-courier"': 'default_runtime = "runc"'},
            "runc is the default",
            id="not default",
        ),
        pytest.param({"/bin/cdi-courier-cri-o": "/elsewhere/gate"}, "registers", id="somebody else's"),
        pytest.param({"bin/cdi-courier-cri-o": "bin/gone"}, "is missing", id="gate gone"),
    ],
)
def test_a_handler_is_in_effect_where_it_is_the_default_and_its_gate_is_there(
    site: Site, changed: dict[str, str], says: str
) -> None:
    """Else the offer says what is missing."""
    site.version = "1.25.0"
    site.live = handled(site, **changed)
    site.drop_in.write_text("")
    made = site.offer()

    assert says in made.reason
    assert (made.needs == "nothing") is (says == "is in effect")
    assert made.via == "oci_hook"


def test_a_handler_by_name_need_not_be_the_default(site: Site) -> None:
    """Pods get it by a RuntimeClass."""
    site.version = "1.25.0"
    site.told(oci_hook={"handler_mode": "named"})
    site.live = handled(site, **{'default_runtime = "cdi-courier"': 'default_runtime = "runc"'})
    site.drop_in.write_text("")

    assert site.offer().needs == "nothing"


def test_a_handler_stays_also_where_nri_could_be_turned_on(site: Site) -> None:
    """It delivers everything, so nothing is restarted for another way."""
    site.live = handled(site) + "[crio.nri]\nenable_nri = false\n"
    site.drop_in.write_text("")
    made = site.offer()

    assert (made.needs, made.via) == ("nothing", "oci_hook")


def test_what_a_reload_shows_is_not_in_effect(site: Site) -> None:
    """A CRI-O that has started before the drop-in was written still needs its restart."""
    site.version = "1.25.0"
    site.live = handled(site)
    site.drop_in.write_text("")
    before = site.offer(pid=os.getpid())
    os.utime(site.drop_in, (1e9, 1e9))
    after = site.offer(pid=os.getpid())

    assert before.needs == "restart"
    assert "has not been restarted" in before.reason
    assert after.needs == "nothing"


@pytest.mark.parametrize("pid", [2**31 - 1, 0], ids=["gone", "none"])
def test_a_process_that_cannot_be_looked_at_is_not_called_old(site: Site, pid: int) -> None:
    """What is not known is not denied."""
    site.drop_in.write_text("")

    assert not offers.is_older(pid, str(site.drop_in))


def test_a_hook_in_a_watched_directory_is_in_effect(site: Site, tmp_path: Path) -> None:
    """Its file is all that it needs."""
    site.told(cri_o_drop_in={"mode": "hook"})
    hooks = [str(tmp_path / "hooks.d")]
    before = site.offer(hooks_dirs=hooks)
    (tmp_path / "hooks.d").mkdir()
    (tmp_path / "hooks.d/cdi-courier.json").write_text("{}")
    after = site.offer(hooks_dirs=hooks)

    assert (before.needs, after.needs) == ("install", "nothing")
    assert (before.fidelity, after.fidelity) == ("partial", "partial")


# What will end it


@pytest.mark.parametrize(
    ("mode", "spoil", "says"),
    [
        pytest.param("nri", None, "is gone", id="gone"),
        pytest.param("nri", "[crio.nri]\nenable_nri = false", "[crio.nri] enable_nri", id="nri off"),
        pytest.param("nri", "[crio.nri]\nnri_plugin_dir = '/x'", "", id="nri otherwise"),
        pytest.param("handler", None, "is gone", id="handler gone"),
        pytest.param("handler", "crio.runtime.default_runtime = 'x'", "default_runtime", id="default"),
        pytest.param("handler", "crio.runtime.runtimes.cdi-courier = {}", "runtimes.cdi-courier", id="table"),
        pytest.param("handler", "crio.runtime.runtimes.other = {}", "", id="another handler"),
        pytest.param("handler", "[[[", "not TOML", id="broken"),
    ],
)
def test_what_will_end_it_at_the_next_restart_is_a_warning(
    site: Site, mode: str, spoil: str | None, says: str
) -> None:
    """As long as CRI-O runs it delivers; the daemon logs the warning and doctor shows it."""
    site.live = ON if mode == "nri" else handled(site)
    site.version = "1.28.2" if mode == "nri" else "1.25.0"
    site.drop_in.write_text("")
    if mode == "nri":
        site.live = NRI_OFF
        site.drop_in.unlink()
        site.apply(site.plan())
        site.live = ON
    if spoil is None:
        site.drop_in.unlink()
    else:
        (site.folder / "99-later.conf").write_text(spoil)
    made = site.offer()

    assert made.needs == "nothing"
    assert says in made.warning
    assert bool(made.warning) is bool(says)
