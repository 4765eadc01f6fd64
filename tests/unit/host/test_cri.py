"""The client of the Container Runtime Interface."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.errors import HostError
from cdi_courier.host import cri
from cdi_courier.host.files import Root
from support import fake_crio

SOCKET = "run/crio/crio.sock"
NO_METHOD = "/runtime.v1.RuntimeService/Nothing"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector rests: what is gone, went by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ask(root: Path, method: str) -> Any:
    """A call that has been waited for, which nothing but its own remains may hold."""
    with cri.client(Root(str(root)), f"/{SOCKET}") as client:
        call = client.start(
            method, cri.MESSAGES["VersionRequest"](version="v1"), cri.MESSAGES["VersionResponse"], 5.0
        )
        seen = weakref.ref(call)
        with contextlib.suppress(HostError, cri.Unimplemented):
            client.finish(call, method, 5.0)
        del call
    return seen()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("server", "method"),
    [
        (fake_crio.crio, "/runtime.v1.RuntimeService/Version"),
        (fake_crio.crio, NO_METHOD),
        (None, "/runtime.v1.RuntimeService/Version"),
    ],
    ids=["answered", "unimplemented", "refused"],
)
def test_a_call_leaves_nothing_to_the_garbage_collector(
    root: Path, data: Path, server: Callable[..., Any] | None, method: str
) -> None:
    """gRPC locks when a call is collected, which could be at any moment, such as deep in a recursion."""
    if server is None:
        left = ask(root, method)
    else:
        with server(root / SOCKET, data):
            left = ask(root, method)

    assert left is None
