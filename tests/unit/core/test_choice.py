"""Which backend runs: order, readiness, fidelity, and what a forced one says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cdi_courier.choice import choose, forced, gather
from cdi_courier.errors import PluginError
from cdi_courier.hookspecs import Offer
from cdi_courier.plugins import Plugins
from cdi_courier.settings import Settings
from hypothesis import given, settings
from hypothesis import strategies as st

ORDER = ("nri", "cri_o_drop_in", "oci_hook")
NEEDS = ("nothing", "install", "reload", "restart", "impossible")


def offers(*made: Offer) -> dict[str, Offer]:
    return {offer.backend: offer for offer in made}


def test_the_configured_order_decides_among_ready_backends() -> None:
    """The first of the order that needs nothing is active."""
    found = choose(
        offers(Offer("oci_hook", "full", "nothing", ""), Offer("nri", "partial", "nothing", "")), ORDER
    )

    assert found.active == "nri"
    assert [offer.backend for offer in found.offers] == ["nri", "oci_hook"]


def test_fidelity_decides_among_backends_outside_the_order() -> None:
    """Backends that the order does not name come last, the one of full fidelity first."""
    found = choose(
        offers(
            Offer("a", "partial", "nothing", ""),
            Offer("b", "full", "nothing", ""),
            Offer("nri", "partial", "nothing", ""),
        ),
        ORDER,
    )

    assert [offer.backend for offer in found.offers] == ["nri", "b", "a"]


def test_a_backend_that_needs_something_is_not_active() -> None:
    """An unready backend of higher rank gives way to a ready one."""
    found = choose(
        offers(Offer("nri", "full", "restart", ""), Offer("oci_hook", "partial", "nothing", "")), ORDER
    )

    assert found.active == "oci_hook"


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*ORDER, "x", "y"]),
        st.tuples(st.sampled_from(["full", "partial"]), st.sampled_from(NEEDS)),
    )
)
def test_what_cannot_serve_is_never_chosen(made: dict[str, Any]) -> None:
    """Active is a backend that needs nothing, and None only if there is none."""
    found = choose({n: Offer(n, fidelity, needs, "") for n, (fidelity, needs) in made.items()}, ORDER)

    ready = {name for name, (_, needs) in made.items() if needs == "nothing"}
    assert (found.active in ready) if ready else (found.active is None)
    assert sorted(offer.backend for offer in found.offers) == sorted(made)


def test_a_forced_backend_that_can_serve_is_taken() -> None:
    """Forcing a ready backend gives its name, whatever the order."""
    found = forced("x", Plugins(), offers(Offer("x", "partial", "nothing", "")))

    assert found == "x"


BROKEN = PluginError("PLG001", "plugin bad cannot be loaded")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hook", "not built yet"),
        ("off", "disabled"),
        ("bad", "cannot be loaded"),
        ("none\x1b", "installed: hook"),
    ],
)
def test_a_forced_backend_that_cannot_serve_says_why(name: str, words: str) -> None:
    """Impossible, disabled, broken and absent backends are PLG003 with their reason."""
    plugins = Plugins(backends={"hook": SimpleNamespace()}, problems={"bad": BROKEN}, disabled=("off",))

    with pytest.raises(PluginError) as caught:
        forced(name, plugins, offers(Offer("hook", "partial", "impossible", "not built yet")))

    assert caught.value.code == "PLG003"
    assert words in caught.value.message
    assert "\x1b" not in str(caught.value)


def test_a_backend_that_fails_to_make_an_offer_hurts_no_other() -> None:
    """An exception of one backend is that backend's problem."""

    def fail(_: Settings) -> Offer:
        raise ZeroDivisionError("by \x1b zero")

    good = Offer("good", "full", "nothing", "")
    plugins = Plugins(
        backends={"bad": SimpleNamespace(offer=fail), "good": SimpleNamespace(offer=lambda _: good)}
    )

    found, problems = gather(plugins, Settings())

    assert found == {"good": good}
    assert problems["bad"].code == "PLG002"
    assert "ZeroDivisionError" in problems["bad"].message
