"""One registration on an NRI socket, to learn how the runtime introduces itself; then it is gone again.

Never done unasked: for a moment the runtime has one plugin more, and NRI before 0.6.1 can deadlock when a
plugin registers while containers start (docs/facts.md#nri-registration-deadlock).
"""

from __future__ import annotations

import socket
import time

from cdi_courier.errors import HostError, ProtocolError, quoted

from .session import Configured, Session

NAME = "cdi-courier-probe"
INDEX = "99"


def probe(path: str, timeout: float) -> str:
    """How the runtime that listens at `path` introduces itself, for a person.

    timeout: seconds for all of it. Raises `HostError` ``NRI005`` if nobody listens, `ProtocolError` as
    `Session`, ``NRI009`` if no introduction comes in time, ``NRI010`` if the connection ends.
    """
    session = Session(NAME, INDEX)
    end = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(timeout)
        try:
            sock.connect(path)
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or str(error)
            raise HostError("NRI005", f"cannot connect to the NRI socket {quoted(path)}: {words}") from None
        try:
            return _introduction(_configured(sock, session, end))
        except TimeoutError:
            raise ProtocolError(
                "NRI009",
                f"nothing of NRI came from {quoted(path)} within {timeout:g} s",
                "is it an NRI socket?",
            ) from None
        except OSError as error:
            raise session.lost(f"the connection failed: {error.strerror}") from None


def _configured(sock: socket.socket, session: Session, end: float) -> Configured:
    sock.sendall(session.start())
    while True:
        sock.settimeout(max(0.001, end - time.monotonic()))
        data = sock.recv(65536)
        if not data:
            raise session.lost()
        for event in session.receive(data):
            if isinstance(event, Configured):
                # Answered, so that the runtime does not wait for us; then closed.
                sock.sendall(session.outgoing())
                return event


def _introduction(event: Configured) -> str:
    nri = f"NRI {quoted(event.nri_version)[1:-1]}" if event.nri_version else "an NRI before 0.12"
    limit = f"{event.request_timeout_ms} ms" if event.request_timeout_ms else "an untold time"
    name, version = quoted(event.runtime_name)[1:-1], quoted(event.runtime_version)[1:-1]
    return f"{name} {version} speaks {nri} and waits {limit} for an answer"
