"""The product's NRI connection in a thread of the test's own, with short timeouts and all that it reports."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from cdi_courier_nri import messages
from cdi_courier_nri.connection import NriConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi_courier.errors import CourierError
    from cdi_courier_nri.session import Configured, CreateContainer


class Recorder:
    """A handler that remembers, and answers with `answer`."""

    def __init__(self) -> None:
        self.configured_with: list[Configured] = []
        self.synchronized_with: list[tuple[list[str], list[str]]] = []
        self.deadlines: list[float] = []
        self.answered_times = 0
        self.failures: list[str] = []
        self.answer: Callable[[CreateContainer], Any] = names_device

    def configured(self, info: Configured) -> None:
        self.configured_with.append(info)

    def synchronized(self, pods: list[Any], containers: list[Any]) -> None:
        self.synchronized_with.append(([p.name for p in pods], [c.name for c in containers]))

    def answered(self) -> None:
        self.answered_times += 1

    def failed(self, request: CreateContainer, error: CourierError) -> None:
        self.failures.append(error.code)

    def create_container(self, request: CreateContainer, deadline: float) -> Any:
        self.deadlines.append(deadline)
        return self.answer(request)


def names_device(request: CreateContainer) -> Any:
    response = messages.CreateContainerResponse()
    response.adjust.CDI_devices.add(name=f"vendor.com/class={request.container.name}")
    return response


class Plugin:
    """A connection in its own thread, with short timeouts and all it reports."""

    def __init__(self, path: str, name: str = "cdi-courier", index: str = "10", **settings: Any) -> None:
        self.handler = Recorder()
        self.states: list[tuple[str, str]] = []
        settings = {"poll_interval": 0.01, "reconnect_max": 0.05, "handshake_timeout": 0.3} | settings
        self.connection = NriConnection(
            path,
            name,
            index,
            settings.pop("handler", self.handler),
            observer=lambda state, since, cause: self.states.append((state, cause)),
            **settings,
        )
        self.thread = threading.Thread(target=self.connection.run, daemon=True)

    def __enter__(self) -> Plugin:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def causes(self) -> str:
        return "\n".join(cause for _, cause in self.states)
