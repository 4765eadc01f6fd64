"""Which backend serves a runtime, and which would serve it best: docs/choosing.md."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from cdi_courier.choice import choose, choose_all, gather
from cdi_courier.errors import PluginError
from cdi_courier.hookspecs import Offer
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.plugins import Plugins
from cdi_courier.settings import RuntimeSettings, Settings
from cdi_courier_cri_o.backend import CriODropInBackend
from cdi_courier_nri.backend import NriBackend
from cdi_courier_oci_hook import wrapping
from cdi_courier_oci_hook.backend import OciHookBackend
from hypothesis import given, settings
from hypothesis import strategies as st

SOCKET = "/var/run/nri/nri.sock"
NEEDS = ("nothing", "install", "reload", "restart", "impossible")


def runtime(kind: str, version: str, /, **facts: Any) -> Runtime:
    return Runtime(
        key=kind,
        kind=kind,  # type: ignore[arg-type]
        version=version,
        facts={name: Fact(value, "a test") for name, value in facts.items()},
    )


def installed(without: tuple[str, ...] = (), **more: Any) -> Plugins:
    """All three backends."""
    backends = {"nri": NriBackend(), "oci_hook": OciHookBackend(), "cri_o_drop_in": CriODropInBackend()}
    return Plugins({name: b for name, b in backends.items() if name not in without}, **more)


def with_settings(**sections: dict[str, Any]) -> Settings:
    made = Settings()
    for name, values in sections.items():
        if name == "runtimes":
            theirs = {key: RuntimeSettings(**value) for key, value in values.items()}
            made = attrs.evolve(made, runtimes=theirs)
        else:
            made = attrs.evolve(made, **{name: attrs.evolve(getattr(made, name), **values)})
    return made


ON = {"nri": "on", "nri_socket": SOCKET}
OFF = {"nri": "off"}


def handlers(kind: str, type_: str = "io.containerd.runc.v2", default: str = "cdi-courier") -> dict[str, Any]:
    """The facts of a runtime that our wrapper is installed in front of."""
    gate = f"/var/lib/cdi-courier/bin/cdi-courier-{kind}"
    found = {"runc": {"type": type_, "path": ""}, "cdi-courier": {"type": type_, "path": gate}}
    return {"handlers": found, "default_handler": default}


HANDLER = handlers("containerd")

ROWS: list[tuple[str, Runtime, dict[str, Any], str | None, str | None, str]] = [
    # what, runtime, settings, active, recommended, a word of the reason or advice
    # containerd
    ("1.6", runtime("containerd", "1.6.20~ds1", nri="absent"), {}, None, "oci_hook", "wrapper"),
    ("1.6 unprobed", runtime("containerd", "1.6.20~ds1"), {}, None, "oci_hook", "since 1.7"),
    ("1.6 wrapped", runtime("containerd", "1.6.20", nri="absent", **HANDLER), {}, "oci_hook", "oci_hook", ""),
    ("1.7 off", runtime("containerd", "1.7.24~ds1", **OFF), {}, None, "nri", "restarted"),
    ("1.7 on", runtime("containerd", "1.7.24~ds1", **ON), {}, "nri", "nri", "by edits"),
    ("1.7.0 on", runtime("containerd", "1.7.0", **ON), {}, "nri", "nri", "by edits"),
    ("1.7.30 on", runtime("containerd", "1.7.30", **ON), {}, "nri", "nri", "has not said"),
    (
        "1.7.30 CDI off",
        runtime("containerd", "1.7.30", cdi_enabled=False, **ON),
        {},
        "nri",
        "nri",
        "its CDI is off",
    ),
    ("1.7.30 CDI on", runtime("containerd", "1.7.30", cdi_enabled=True, **ON), {}, "nri", "nri", "by names"),
    ("1.7 unknown", runtime("containerd", "1.7.24"), {}, None, "nri", "could not be learnt"),
    (
        "1.7 off, wrapped",
        runtime("containerd", "1.7.24", **OFF, **HANDLER),
        {},
        "oci_hook",
        "nri",
        "runs the wrapper",
    ),
    ("1.7 on, wrapped", runtime("containerd", "1.7.24", **ON, **HANDLER), {}, "nri", "nri", "NRI is on"),
    ("2.0 on", runtime("containerd", "v2.0.5", **ON), {}, "nri", "nri", "by edits"),
    ("2.1 on", runtime("containerd", "2.1.9", **ON), {}, "nri", "nri", "by names"),
    ("2.2 on", runtime("containerd", "2.2.1-0ubuntu1~24.04.2", **ON), {}, "nri", "nri", "by names"),
    (
        "2.1 other dirs",
        runtime("containerd", "2.1.9", cdi_spec_dirs=["/opt/cdi"], **ON),
        {},
        "nri",
        "nri",
        "/opt/cdi",
    ),
    (
        "2.1 our dirs are its",
        runtime("containerd", "2.1.9", cdi_spec_dirs=["/opt/cdi"], **ON),
        {"cdi": {"dirs": ("/opt/cdi",)}},
        "nri",
        "nri",
        "by names",
    ),
    ("2.1 off", runtime("containerd", "2.1.9", **OFF), {}, None, "nri", "restarted"),
    (
        "2.1 no connections",
        runtime("containerd", "2.1.9", nri="off", nri_connections=False),
        {},
        None,
        "oci_hook",
        "disable_connections",
    ),
    (
        "2.1 other socket",
        runtime("containerd", "2.1.9", nri="on", nri_socket="/elsewhere/nri.sock"),
        {},
        None,
        "oci_hook",
        "[nri] sockets does not name",
    ),
    (
        "2.1 other socket, ours",
        runtime("containerd", "2.1.9", nri="on", nri_socket="/elsewhere/nri.sock"),
        {"nri": {"sockets": ("/elsewhere/nri.sock",)}},
        "nri",
        "nri",
        "",
    ),
    (
        "2.3 validator",
        runtime("containerd", "2.3.0", nri_validator={"reject_oci_hook_adjustment": True}, **ON),
        {"nri": {"delivery": "edits"}},
        "nri",
        "nri",
        "rejects hooks",
    ),
    (
        "k3s off",
        runtime("containerd", "2.1.5-k3s1", config_template="/x/config-v3.toml.tmpl", **OFF),
        {},
        None,
        "nri",
        "config-v3.toml.tmpl",
    ),
    (
        "k0s off",
        runtime("containerd", "1.7.24", distribution="k0s", **OFF),
        {},
        None,
        "nri",
        "k0s generates its configuration",
    ),
    (
        "k3s without NRI",
        runtime("containerd", "1.6.28-k3s1", distribution="k3s", nri="absent"),
        {},
        None,
        None,
        "no installed backend",
    ),
    ("version unknown", runtime("containerd", "", **ON), {}, "nri", "nri", "by edits"),
    # CRI-O
    ("crio 1.24", runtime("cri-o", "1.24.6", nri="absent"), {}, None, "cri_o_drop_in", "handler"),
    ("crio 1.25", runtime("cri-o", "1.25.0"), {}, None, "cri_o_drop_in", "handler"),
    ("crio 1.26 off", runtime("cri-o", "1.26.4", **OFF), {}, None, "cri_o_drop_in", "turns NRI on"),
    ("crio 1.29 off", runtime("cri-o", "1.29.2", **OFF), {}, None, "cri_o_drop_in", "turns NRI on"),
    ("crio 1.30 on", runtime("cri-o", "1.30.0", **ON), {}, "nri", "nri", "by edits"),
    ("crio 1.33 on", runtime("cri-o", "1.33.1", **ON), {}, "nri", "nri", "by edits"),
    ("crio 1.34 on", runtime("cri-o", "1.34.0", **ON), {}, "nri", "nri", "by names"),
    ("crio 1.36 on", runtime("cri-o", "1.36.3", **ON), {}, "nri", "nri", "by names"),
    ("crio 1.36 off", runtime("cri-o", "1.36.3", **OFF), {}, None, "cri_o_drop_in", "restarted"),
    (
        "crio 1.36 mode handler",
        runtime("cri-o", "1.36.3", **OFF),
        {"cri_o_drop_in": {"mode": "handler"}},
        None,
        "cri_o_drop_in",
        "registers",
    ),
    (
        "crio 1.36 mode hook",
        runtime("cri-o", "1.36.3", **OFF),
        {"cri_o_drop_in": {"mode": "hook"}},
        None,
        "cri_o_drop_in",
        "nothing is restarted",
    ),
    (
        "crio 1.24 mode nri",
        runtime("cri-o", "1.24.6"),
        {"cri_o_drop_in": {"mode": "nri"}},
        None,
        "oci_hook",
        "has no NRI",
    ),
    ("crio 1.19", runtime("cri-o", "1.19.0"), {}, None, "oci_hook", "not supported"),
    # Podman, Docker
    ("podman 4.3", runtime("podman", "4.3.1", rootless=False), {}, None, "oci_hook", "precreate"),
    ("podman rootless", runtime("podman", "5.4.2", rootless=True), {}, None, "oci_hook", "precreate"),
    ("docker", runtime("docker", "29.0.0"), {}, None, "oci_hook", "wrapper"),
    ("docker's restart", runtime("docker", "29.0.0"), {}, None, "oci_hook", "live-restore"),
    (
        "docker wrapped",
        runtime("docker", "29.0.0", **handlers("docker", "oci")),
        {},
        "oci_hook",
        "oci_hook",
        "runs the",
    ),
    (
        "1.6 wrapped beside the default",
        runtime("containerd", "1.6.20", nri="absent", **handlers("containerd", default="runc")),
        {},
        None,
        "oci_hook",
        "restarted",
    ),
    (
        "1.6 wrapped by name",
        runtime("containerd", "1.6.20", nri="absent", **handlers("containerd", default="runc")),
        {"oci_hook": {"handler_mode": "named"}},
        "oci_hook",
        "oci_hook",
        "handler cdi-courier runs the wrapper",
    ),
    (
        "1.6 another gate",
        runtime("containerd", "1.6.20", nri="absent", **HANDLER),
        {"oci_hook": {"gate_dir": "/elsewhere"}},
        None,
        "oci_hook",
        "restarted",
    ),
    (
        "1.6 kata",
        runtime(
            "containerd",
            "1.6.20",
            nri="absent",
            handlers={"kata": {"type": "io.containerd.kata.v2", "path": ""}},
            default_handler="kata",
        ),
        {},
        None,
        None,
        "calls no runc",
    ),
    ("docker rootless", runtime("docker", "29.0.0", rootless=True), {}, None, None, "rootless"),
    # settings
    (
        "ignored",
        runtime("containerd", "2.1.9", **ON),
        {"runtimes": {"containerd": {"ignore": True}}},
        None,
        None,
        "ignore",
    ),
    (
        "demanded and ready",
        runtime("containerd", "2.1.9", **ON, **HANDLER),
        {"runtimes": {"containerd": {"backend": "oci_hook"}}},
        "oci_hook",
        "oci_hook",
        "[runtimes] demands oci_hook",
    ),
    (
        "demanded, not ready",
        runtime("containerd", "2.1.9", **ON),
        {"runtimes": {"containerd": {"backend": "oci_hook"}}},
        None,
        "oci_hook",
        "no backend can serve now",
    ),
    (
        "demanded by socket",
        runtime("containerd", "2.1.9", **ON, **HANDLER),
        {"runtimes": {SOCKET: {"backend": "oci_hook"}, "containerd": {"ignore": True}}},
        "oci_hook",
        "oci_hook",
        "",
    ),
    (
        "demanded for another kind",
        runtime("containerd", "2.1.9", **ON),
        {"runtimes": {"cri-o": {"backend": "oci_hook"}}},
        "nri",
        "nri",
        "",
    ),
    (
        "demanded, unknown",
        runtime("containerd", "2.1.9", **ON),
        {"runtimes": {"containerd": {"backend": "none-such"}}},
        None,
        None,
        "there is no backend",
    ),
    (
        "demanded for all",
        runtime("containerd", "2.1.9", **ON),
        {"backends": {"choose": "oci_hook"}},
        None,
        "oci_hook",
        "[backends] choose demands oci_hook",
    ),
    (
        "another order",
        runtime("containerd", "2.1.9", **ON, **HANDLER),
        {"backends": {"order": ("oci_hook", "nri")}},
        "oci_hook",
        "oci_hook",
        "runs the wrapper",
    ),
]


@pytest.mark.parametrize(
    ("found", "told", "active", "recommended", "word"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_the_decision_table(
    monkeypatch: pytest.MonkeyPatch,
    found: Runtime,
    told: dict[str, Any],
    active: str | None,
    recommended: str | None,
    word: str,
) -> None:
    """Every row has its active and its recommended backend, and a person is told why."""
    monkeypatch.setattr(wrapping, "_is_gate", lambda _: True)
    choice = choose(installed(), found, with_settings(**told))

    assert (choice.active, choice.recommended) == (active, recommended)
    assert word in " ".join([choice.reason, choice.advice, *(offer.reason for offer in choice.offers)])


@pytest.mark.parametrize("kind", ["containerd", "cri-o", "docker", "podman"])
def test_a_missing_package_is_no_choice(kind: str) -> None:
    """A backend that is not installed is neither active nor recommended."""
    choice = choose(installed(without=("nri",)), runtime(kind, "2.1.9", **ON), Settings())

    assert "nri" not in {choice.active, choice.recommended}
    assert all(offer.backend != "nri" for offer in choice.offers)


def test_nothing_installed_is_said() -> None:
    """Without any backend there is no choice, and the reason says so."""
    choice = choose(Plugins(), runtime("containerd", "2.1.9", **ON), Settings())

    assert (choice.active, choice.recommended) == (None, None)
    assert "none is installed" in choice.reason


def backend(name: str, offer: Any) -> Any:
    def answer(*_: object) -> Any:
        if isinstance(offer, Exception):
            raise offer
        return offer

    return SimpleNamespace(name=name, offer=answer)


@pytest.mark.parametrize(
    "wrong",
    [RuntimeError("bro\nken"), None, Offer("other", "full", "nothing", ""), Offer("bad", "full", "soon", "")],  # type: ignore[arg-type]
    ids=["raises", "none", "another's name", "unknown need"],
)
def test_a_backend_that_fails_to_offer_hurts_no_other(wrong: Any) -> None:
    """Its error is told on one line; the others are asked and chosen as ever."""
    good = Offer("good", "full", "nothing", "here")
    plugins = Plugins({"bad": backend("bad", wrong), "good": backend("good", good)})

    choice = choose(plugins, runtime("containerd", "2.1.9"), Settings())

    assert choice.active == "good"
    assert choice.problems["bad"].code == "PLG002"
    assert "\n" not in choice.problems["bad"].message


def test_third_party_backends_take_part() -> None:
    """One that the order does not name comes after those that it names, however good it is."""
    theirs = Offer("theirs", "full", "nothing", "")
    plugins = Plugins({"theirs": backend("theirs", theirs), "nri": NriBackend()})

    with_nri = choose(plugins, runtime("containerd", "2.1.9", **ON), Settings())
    without = choose(plugins, runtime("docker", "29.0.0"), Settings())

    assert (with_nri.active, without.active) == ("nri", "theirs")


def test_disabled_and_broken_backends_are_named() -> None:
    """Whoever asks why a backend is not chosen finds it among the problems, with what to do."""
    broken = PluginError("PLG001", "plugin x is broken")
    plugins = installed(without=("nri",), disabled=("nri",), problems={"x": broken})

    choice = choose(plugins, runtime("containerd", "2.1.9", **ON), Settings())

    assert "[backends] disabled" in choice.problems["nri"].hint
    assert choice.problems["x"] is broken


OFFERS = st.dictionaries(
    st.sampled_from(["nri", "oci_hook", "cri_o_drop_in", "a", "b"]),
    st.tuples(st.sampled_from(["full", "partial"]), st.sampled_from(NEEDS)),
)


@settings(max_examples=200, deadline=None)
@given(OFFERS)
def test_the_choice_follows_its_two_rules(made: dict[str, Any]) -> None:
    """Active needs nothing and is first in order; recommended is possible and nothing has more fidelity."""
    offers = {n: Offer(n, fidelity, needs, n) for n, (fidelity, needs) in made.items()}
    plugins = Plugins({n: backend(n, offer) for n, offer in offers.items()})
    order = Settings().backends.order

    choice = choose(plugins, runtime("containerd", "2.1.9"), Settings())

    ready = [o for o in offers.values() if o.needs == "nothing"]
    possible = [o for o in offers.values() if o.needs != "impossible"]
    assert (choice.active is None) is (not ready)
    assert (choice.recommended is None) is (not possible)
    if choice.active:
        place = [order.index(o.backend) if o.backend in order else 9 for o in ready]
        mine = offers[choice.active]
        assert mine.needs == "nothing"
        assert (order.index(mine.backend) if mine.backend in order else 9) == min(place)
    if choice.recommended:
        best = offers[choice.recommended]
        assert best.fidelity == "full" or all(o.fidelity != "full" for o in possible)


def test_each_runtime_has_a_choice_of_its_own() -> None:
    """containerd and Podman on one host can have different backends."""
    choices = choose_all(
        installed(), [runtime("containerd", "2.1.9", **ON), runtime("podman", "5.4.2")], Settings()
    )

    assert [choice.recommended for choice in choices] == ["nri", "oci_hook"]


def test_asking_touches_no_offer_of_a_disabled_backend() -> None:
    """What is disabled is not asked, only named."""
    offers, problems = gather(Plugins(disabled=("nri",)), runtime("containerd", "2.1.9"), Settings())

    assert (offers, list(problems)) == ({}, ["nri"])
