"""Which table of [runtimes] is a runtime's, and what it settles."""

from __future__ import annotations

import attrs
import pytest
from cdi_courier.host import configured
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.settings import RuntimeSettings, Settings

RUNTIME = Runtime(
    "/run/a.sock",
    "containerd",
    endpoint="/run/a.sock",
    facts={"nri_socket": Fact("/run/nri.sock", "a test"), "config": Fact("/etc/found.toml", "a test")},
)


def settings(*keys: str) -> Settings:
    return attrs.evolve(Settings(), runtimes={key: RuntimeSettings(restart=f"restart {key}") for key in keys})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), "usual"),
        (("podman", "/run/b.sock"), "usual"),
        (("containerd",), "restart containerd"),
        (("containerd", "/run/nri.sock"), "restart /run/nri.sock"),
        (("containerd", "/run/nri.sock", "/run/a.sock"), "restart /run/a.sock"),
    ],
    ids=["none", "others", "kind", "nri-socket", "endpoint"],
)
def test_a_path_beats_a_kind(keys: tuple[str, ...], expected: str) -> None:
    """The CRI's socket says most, then NRI's, then the kind; without any the usual command counts."""
    assert configured.restart_command(RUNTIME, settings(*keys), "usual") == expected


def test_a_configuration_is_where_it_is_settled_to_be() -> None:
    """Else where it was found, else where it usually is."""
    settled = attrs.evolve(Settings(), runtimes={"containerd": RuntimeSettings(config="/etc/settled.toml")})
    bare = attrs.evolve(RUNTIME, facts={})

    assert configured.config(RUNTIME, settled, "/usual") == "/etc/settled.toml"
    assert configured.config(RUNTIME, Settings(), "/usual") == "/etc/found.toml"
    assert configured.config(bare, Settings(), "/usual") == "/usual"


def test_a_table_without_a_command_leaves_the_usual_one() -> None:
    """A runtime may be settled in other ways only."""
    other = attrs.evolve(Settings(), runtimes={"containerd": RuntimeSettings(backend="nri")})

    assert configured.restart_command(RUNTIME, other, "usual") == "usual"
