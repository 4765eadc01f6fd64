"""The socket around an NRI session: connect, serve, say why it ended, try again, for ever.

The one module of the protocol that has a socket, a clock and a log. It must not know what is injected into
containers or why: that is the handler's. One thread runs one connection; `stop` is the only thing another
thread may call.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import select
import socket
import stat
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Protocol

from cdi_courier.errors import (
    AnnotationError,
    CdiError,
    CourierError,
    DeliveryError,
    HostError,
    PolicyDenied,
    ProtocolError,
    quoted,
)
from cdi_courier.latency import Histogram

from .session import (
    DEFAULT_REQUEST_TIMEOUT_MS,
    REGISTER_TIMEOUT,
    Configured,
    CreateContainer,
    Event,
    Ignored,
    Session,
    State,
    Synchronized,
)
from .ttrpc import (
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    MAX_DATA,
    NOT_FOUND,
    PERMISSION_DENIED,
    UNKNOWN,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LOGGER = logging.getLogger("cdi_courier.nri")

RECEIVE_SIZE: Final = 65536
"""Bytes read at once. Ordinary requests have 2 to 10 kB; a Synchronize of megabytes comes in pieces anyway,
because a unix socket holds about 200 kB."""

UNSENT_LIMIT: Final = 2 * MAX_DATA
"""Bytes waiting for a runtime that does not read, above which we do not read from it either."""

LARGE_LISTING: Final = 1 << 20
"""Bytes of Synchronize after which the memory they took is given back to the system."""

CLOSING_GRACE: Final = 0.1
"""Seconds between the last reply and the close: Go's reader may lose a reply that a close follows
(docs/facts.md#nri-closing)."""

FLUSH_LIMIT: Final = 1.0
"""Seconds a runtime that does not read may hold up a stop."""

SYNCHRONIZE_GRACE: Final = 30.0
"""Seconds a complete Synchronize may take beyond three request timeouts. NRI before 0.7 forgets a plugin
whose Synchronize failed but leaves it connected (docs/facts.md#nri-handshake)."""

SHORT_SESSION: Final = 1.0
"""Seconds: after established sessions shorter than this, from the second on, we pause lest we spin."""

_STATUS_CODES: Final[dict[type[BaseException], int]] = {
    AnnotationError: INVALID_ARGUMENT,
    CdiError: NOT_FOUND,
    PolicyDenied: PERMISSION_DENIED,
    DeliveryError: FAILED_PRECONDITION,
    HostError: FAILED_PRECONDITION,
}


class Handler(Protocol):
    """What is done about containers. All methods are called in the connection's thread.

    No exception of theirs ends a session. Until `create_container` returns, no other request is read, so
    whatever takes longer than milliseconds is returned as a Future.
    """

    def configured(self, info: Configured) -> None:
        """Learn which runtime this is; called once a session, before any container."""

    def synchronized(self, pods: list[Any], containers: list[Any]) -> None:
        """Learn all that exists (see `Synchronized.listing`). The runtime has its answer already."""

    def create_container(self, request: CreateContainer, deadline: float) -> Answer:
        """Return a container's adjustment: a `messages.CreateContainerResponse`, its bytes, or a Future.

        A Future's result is one of these or a function without arguments that returns one, which is called in
        the connection's thread. deadline: the instant of `time.monotonic` until which the answer must have
        been given. A Future that is not done by then is cancelled, its function is never called, and the
        container is refused. A CourierError raised here, by the function, or set on the Future refuses the
        container with the error's text; it is not logged, because the handler knows more.
        """

    def answered(self) -> None:
        """Do what can wait until answers are on their way, such as to log them."""

    def failed(self, request: CreateContainer, error: CourierError) -> None:
        """Learn that the connection refuses a container, whatever was returned for it: ``NRI013`` to 015."""


Answer = (
    Any  # bytes | CreateContainerResponse | Future of these or of a function; messages have no static type
)


class NriConnection:
    """A plugin's connection to one runtime socket, kept up until `stop`.

    path: the socket, resolved anew for each attempt, because a restarted runtime makes a new one.
    plugin_name, plugin_index: as in `Session`.
    reconnect_max: seconds, the longest pause after failed handshakes.
    poll_interval: seconds between looks at a socket that is absent or refuses.
    handshake_timeout: seconds from connecting until the runtime configures us.
    synchronize_grace: see SYNCHRONIZE_GRACE; infinite for a plugin that a runtime with NRI before 0.7 has
        launched, which is never synchronized (docs/facts.md#nri-launched-plugins).
    deadline_share: share of a request's timeout after which `create_container` is out of time.
    ignores: as of `Session`; called in the connection's thread, once for a container that it ignores.
    observer: called with (state, since, cause) at each change; state is ``waiting`` (no connection),
        ``registering``, ``configured``, ``active`` or ``stopped``; since is a `time.time`; cause is why
        there is no connection, else ``""``.

    For a status report: `sessions`, `containers` (requests), `refused` (of them), and `latency`, from a
    request's first byte to its answer.
    """

    def __init__(
        self,
        path: str,
        plugin_name: str,
        plugin_index: str,
        handler: Handler,
        *,
        reconnect_max: float = 5.0,
        poll_interval: float = 0.25,
        handshake_timeout: float = REGISTER_TIMEOUT,
        synchronize_grace: float = SYNCHRONIZE_GRACE,
        deadline_share: float = 0.7,
        ignores: Callable[[bytes], bool] | None = None,
        observer: Callable[[str, float, str], None] | None = None,
        logger: logging.Logger = LOGGER,
    ) -> None:
        self.path = path
        self.plugin_name = plugin_name
        self.plugin_index = plugin_index
        self.handler = handler
        self.reconnect_max = reconnect_max
        self.poll_interval = poll_interval
        self.handshake_timeout = handshake_timeout
        self.synchronize_grace = synchronize_grace
        self.deadline_share = deadline_share
        self.ignores = ignores
        self.logger = logger
        self.sessions = 0
        self.containers = 0
        self.refused = 0
        self.latency = Histogram()
        # When the thread took up what it is at; None while it waits for something to do.
        self.busy_since: float | None = None
        self.stopping = False
        self._observer = observer
        self._sock: socket.socket | None = None
        self._reported = ("", "")
        self._trouble = ""
        # Never closed before the object goes: a late stop() must not write into somebody else's descriptor.
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.wake_fd)

    def run(self) -> None:
        """Connect and serve until `stop`. Returns only then; what goes wrong is logged."""
        failures = short = 0
        while not self.stopping:
            sock = self._connect()
            if sock is None:
                self._pause(self.poll_interval)
                continue
            began = time.monotonic()
            if self.serve(sock):
                failures = 0
                short = short + 1 if time.monotonic() - began < SHORT_SESSION else 0
                if short > 1:
                    self._pause(self.poll_interval)
            elif not self.stopping:
                longest = min(self.reconnect_max, self.poll_interval * 2 ** min(failures, 30))
                failures += 1
                self._pause(longest * random.uniform(0.5, 1.0))
        self.report("stopped")

    def busy(self) -> float:
        """Seconds that the thread has been at one piece of work; 0 while it waits for some. Any thread."""
        since = self.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        """Make `run` answer what it has received, close and return. Any thread, any number of times."""
        self.stopping = True
        self.wake()
        if sock := self._sock:
            # Ends a recv that waits, now or in a moment. What has arrived can still be read.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)

    def serve(self, sock: socket.socket) -> bool:
        """Hold one session over a connected socket and close it. Returns whether it was established."""
        self.sessions += 1
        began = time.monotonic()
        self.report("registering")
        with sock:
            loop = _SessionLoop(self, sock, began)
            self._sock = sock
            try:
                loop.run()
                cause = None
            except CourierError as error:
                cause = error
            except OSError as error:
                cause = loop.session.lost(f"the connection failed: {_words(error)}")
            except Exception:
                self.logger.exception("NRI013: internal error in the NRI connection")
                cause = ProtocolError("NRI013", "internal error (the traceback is above)", "please report it")
        self._sock = None
        age = time.monotonic() - began
        self.logger.log(
            logging.WARNING if cause else logging.INFO,
            "NRI session %d on %s closed after %.1f s and %d containers: %s",
            self.sessions,
            self.path,
            age,
            loop.containers,
            cause or "the plugin stops",
        )
        self.report("waiting", str(cause or ""))
        return loop.established

    def wake(self) -> None:
        """Make the connection's thread look at what has changed. Any thread."""
        os.eventfd_write(self.wake_fd, 1)

    def woken(self) -> None:
        """Take back the calls of `wake` so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def report(self, state: str, cause: str = "") -> None:
        """Tell the observer a state, if it is a new one."""
        if (state, cause) == self._reported:
            return
        self._reported = (state, cause)
        if self._observer:
            try:
                self._observer(state, time.time(), cause)
            except Exception:
                self.logger.exception("the observer of the NRI connection failed")

    def _connect(self) -> socket.socket | None:
        """Return a connected socket, or None; why not is logged once until it changes."""
        sock = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Not blocking: connecting to a full backlog would wait, and stop() with it.
            sock.setblocking(False)
            sock.connect(self.path)
        except (OSError, ValueError) as error:  # ValueError: a path that cannot be encoded
            if sock:
                sock.close()
            trouble = _connect_trouble(self.path, error)
            self.report("waiting", str(trouble))
            if self._trouble != str(trouble):
                self._trouble = str(trouble)
                self.logger.warning("%s", trouble)
            return None
        if self._trouble:
            self._trouble = ""
            self.logger.info("%s accepts connections now", self.path)
        return sock

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self.wake_fd, select.POLLIN)
        end = time.monotonic() + seconds
        self.busy_since = None
        while not self.stopping and (left := end - time.monotonic()) > 0:
            if poller.poll(math.ceil(left * 1000)):
                self.woken()


class _SessionLoop:
    """One session's I/O. `run` ends by an exception that says why, or returns because of a stop."""

    def __init__(self, owner: NriConnection, sock: socket.socket, began: float) -> None:
        self.session = Session(
            owner.plugin_name,
            owner.plugin_index,
            register_timeout=max(REGISTER_TIMEOUT, owner.handshake_timeout),
            ignores=owner.ignores,
        )
        self.established = False
        self.containers = 0
        self._owner = owner
        self._handler = owner.handler
        self._sock = sock
        self._poller = select.poll()
        self._request_timeout = DEFAULT_REQUEST_TIMEOUT_MS / 1000
        # When the message that is being read began to arrive; its timeout counts from there.
        self._arrived = began
        self._partial = False
        # When the handshake must have come further; None once it is over.
        self._expiry: float | None = began + owner.handshake_timeout
        # Token → what is decided elsewhere, until when, since when, and what was asked.
        self._pending: dict[int, tuple[Future[Any], float, float, CreateContainer]] = {}
        self._unsent = bytearray()
        # Whether answers have been given of which the handler has not been told that they are on their way.
        self._answers = False
        # Events that wait until the runtime has read some of what is unsent, and when they arrived.
        self._waiting: tuple[list[Event], float] | None = None
        self._sent_at = -math.inf

    def run(self) -> None:
        owner, poller, fd = self._owner, self._poller, self._sock.fileno()
        self._sock.setblocking(True)
        poller.register(fd, select.POLLIN)
        poller.register(owner.wake_fd, select.POLLIN)
        self._write(self.session.start())
        while not owner.stopping:
            if self._expiry is None and not self._pending and not self._unsent:
                # Only a request or a stop can come, and both end a recv. To sleep there and not in poll makes
                # the answer 10 to 20 µs faster, a fifth of the whole.
                self._read(0)
                continue
            timed = self._expiry is not None or self._pending
            wait = self._wait_ms() if timed else None
            owner.busy_since = None
            found = poller.poll(wait)
            owner.busy_since = time.monotonic()
            for ready, flags in found:
                if ready != fd:
                    owner.woken()
                    continue
                if flags & select.POLLOUT:
                    self._flush()
                if flags & ~select.POLLOUT:
                    self._read(socket.MSG_DONTWAIT)
            if timed or self._pending:
                self._settle()
                self._check_handshake()
        self._finish()

    def _read(self, flags: int) -> bool:
        """Read once and handle what came; False if nothing did. flags: as of recv."""
        owner = self._owner
        owner.busy_since = None
        try:
            data = self._sock.recv(RECEIVE_SIZE, flags)
        except BlockingIOError:
            return False
        owner.busy_since = now = time.monotonic()
        if not self._partial:
            self._arrived = now
        if not data:
            if owner.stopping:
                return False
            raise self.session.lost()
        events = self.session.receive(data)
        # After an event the next message may have begun already; taking its arrival for a moment later than
        # it was is worth not looking at every request.
        self._partial = not events and self.session.partial
        self._handle(events, self._arrived)
        return True

    def _handle(self, events: list[Event], arrived: float) -> None:
        """Act on events; what is beyond what may wait to be sent waits itself."""
        for number, event in enumerate(events):
            if len(self._unsent) > UNSENT_LIMIT:
                self._waiting = events[number:], arrived
                break
            if event.__class__ is CreateContainer:
                if self._create_container(event, arrived):
                    self._write(self.session.outgoing())
                    self._owner.latency.add(self._sent_at - arrived)
                self._count()
            elif event.__class__ is Ignored:
                self._count()
                self._write(self.session.outgoing())
                self._owner.latency.add(self._sent_at - arrived)
            else:
                self._handshake(event, arrived)
                self._write(self.session.outgoing())
        else:
            # A request that needed no decision has no event.
            if out := self.session.outgoing():
                self._write(out)
        if self._answers:
            self._answers = False
            self._guarded(self._handler.answered)

    def _create_container(self, event: CreateContainer, arrived: float) -> bool:
        """Have the handler decide; False if that takes time."""
        share = self._owner.deadline_share
        deadline = arrived + share * (event.timeout_nano * 1e-9 or self._request_timeout)
        try:
            answer = self._handler.create_container(event, deadline)
            if answer.__class__ is not bytes and isinstance(answer, Future):
                self._pending[event.token] = (answer, deadline, arrived, event)
                answer.add_done_callback(self._wake)
                return False
            self._answer(event, answer)
        except BaseException as error:  # noqa: BLE001 - nothing that a handler raises ends the loop
            self._refuse(event, error)
        return True

    def _count(self) -> None:
        self.containers += 1
        self._owner.containers += 1
        if self._expiry is not None and self.session.state is State.ACTIVE:
            self._establish()

    def _answer(self, event: CreateContainer, answer: Any) -> None:
        self._answers = True
        if not self.session.reply(event.token, answer):
            self._failed(
                event,
                ProtocolError(
                    "NRI014",
                    "an adjustment was larger than NRI carries; the container is refused",
                    "ask for fewer devices",
                ),
            )

    def _refuse(self, event: CreateContainer, error: BaseException) -> None:
        self._answers = True
        if isinstance(error, CourierError):
            self._owner.refused += 1
            code = next((_STATUS_CODES[c] for c in type(error).__mro__ if c in _STATUS_CODES), UNKNOWN)
            self.session.refuse(event.token, code, str(error))
            return
        self._owner.logger.error("NRI013: internal error; the container is refused", exc_info=error)
        what = f"internal error in {self._owner.plugin_name}: {type(error).__name__}"
        failure = ProtocolError("NRI013", what, "see its log")
        self.session.refuse(event.token, INTERNAL, str(failure))
        self._failed(event, failure)

    def _failed(self, event: CreateContainer, error: CourierError) -> None:
        self._owner.refused += 1
        self._guarded(self._handler.failed, event, error)

    def _wake(self, _: Future[Any]) -> None:
        self._owner.wake()

    def _settle(self) -> None:
        """Answer what has been decided, refuse what is out of time."""
        if not self._pending:
            return
        now = time.monotonic()
        settled = []
        for token, (future, deadline, arrived, event) in list(self._pending.items()):
            if future.done():
                del self._pending[token]
                settled.append(arrived)
                try:
                    answer = future.result()
                    self._answer(event, answer() if callable(answer) else answer)
                except BaseException as error:  # noqa: BLE001 - CancelledError is a refusal as well
                    self._refuse(event, error)
            elif now >= deadline:
                del self._pending[token]
                settled.append(arrived)
                future.cancel()
                late = ProtocolError(
                    "NRI015", "the answer was not ready in time", "try again; the runtime does so by itself"
                )
                self._answers = True
                self.session.refuse(token, DEADLINE_EXCEEDED, str(late))
                self._failed(event, late)
        if out := self.session.outgoing():
            self._write(out)
        for arrived in settled:
            self._owner.latency.add(self._sent_at - arrived)
        if self._answers:
            self._answers = False
            self._guarded(self._handler.answered)

    def _handshake(self, event: Event, arrived: float) -> None:
        """Handle the handshake: send the answer first, then call the handler, which may take its time."""
        self._write(self.session.outgoing())
        owner = self._owner
        if isinstance(event, Configured):
            owner.logger.info(
                "NRI session %d on %s: runtime %s %s, NRI %s, request timeout %s",
                owner.sessions,
                owner.path,
                quoted(event.runtime_name),
                quoted(event.runtime_version),
                quoted(event.nri_version) if event.nri_version else "version not told",
                f"{event.request_timeout_ms} ms" if event.request_timeout_ms > 0 else "not told",
            )
            if event.request_timeout_ms > 0:
                self._request_timeout = event.request_timeout_ms / 1000
            if self.session.state is State.CONFIGURED:
                self._expiry = time.monotonic() + 3 * self._request_timeout + owner.synchronize_grace
                owner.report("configured")
            self._guarded(owner.handler.configured, event)
        elif isinstance(event, Synchronized):
            late = time.monotonic() - arrived - event.timeout_nano * 1e-9
            if event.timeout_nano and late > 0:
                raise ProtocolError(
                    "NRI012",
                    f"the answer to Synchronize was {late:.1f} s too late; the runtime may not call again",
                    "the plugin connects anew; raise the runtime's plugin_request_timeout if it goes on",
                )
            self._establish()
            self._guarded(lambda: owner.handler.synchronized(*event.listing()))
            if event.size > LARGE_LISTING:
                _give_memory_back()

    def _establish(self) -> None:
        self._expiry = None
        self.established = True
        self._owner.report("active")

    def _guarded(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except CourierError as error:
            self._owner.logger.error("%s", error)  # noqa: TRY400 - an expected failure has no traceback
        except Exception:
            self._owner.logger.exception("NRI013: internal error; the session goes on")

    def _wait_ms(self) -> int | None:
        """Milliseconds until something is due, rounded up; None if nothing ever is."""
        due = min((deadline for _, deadline, _, _ in self._pending.values()), default=math.inf)
        if self._expiry is not None:
            due = min(due, self._expiry)
        if due == math.inf:
            return None
        return max(0, math.ceil((due - time.monotonic()) * 1000))

    def _check_handshake(self) -> None:
        if self._expiry is None or time.monotonic() < self._expiry:
            return
        if self.session.state is State.REGISTERING:
            raise ProtocolError(
                "NRI009",
                f"nothing of NRI came from {self._owner.path} within {self._owner.handshake_timeout:g} s "
                "of connecting; is this an NRI socket?",
                "else the runtime is busy with other plugins, or waits for a lock; its log says more",
            )
        raise ProtocolError(
            "NRI011",
            "the runtime configured the plugin but never finished telling it what exists",
            "the plugin connects anew; runtimes with NRI before 0.7 forget a plugin in this way",
        )

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._unsent:
            self._unsent += data
            self._sent_at = time.monotonic()
            self._listen()
            return
        try:
            sent = self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        self._sent_at = time.monotonic()
        if sent < len(data):
            self._unsent += data[sent:]
            self._listen()

    def _flush(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        self._sent_at = time.monotonic()
        self._listen()
        if self._waiting and len(self._unsent) <= UNSENT_LIMIT:
            waiting, self._waiting = self._waiting, None
            self._handle(*waiting)

    def _listen(self) -> None:
        """Wait on the socket for room for what is unsent, and for data unless too much is unsent."""
        unsent = len(self._unsent)
        flags = select.POLLIN if unsent <= UNSENT_LIMIT else 0
        self._poller.modify(self._sock.fileno(), flags | select.POLLOUT if unsent else flags)

    def _finish(self) -> None:
        """Take no more work, give the answers owed, and leave the runtime time to read them.

        Source: docs/facts.md#nri-closing.
        """
        fd = self._sock.fileno()
        while self._read(socket.MSG_DONTWAIT):
            pass  # what has arrived is owed too; it ends, because stop() has shut the receiving side
        self._expiry = None
        limit = time.monotonic() + FLUSH_LIMIT
        while self._pending or ((self._unsent or self._waiting) and time.monotonic() < limit):
            self._poller.modify(fd, select.POLLOUT if self._unsent else 0)
            wait = self._wait_ms() if self._pending else math.ceil(FLUSH_LIMIT * 1000)
            for ready, flags in self._poller.poll(wait):
                if ready != fd:
                    self._owner.woken()
                elif flags & select.POLLOUT:
                    self._flush()
                else:
                    return
            self._settle()
        self._poller.modify(fd, 0)
        self._poller.unregister(self._owner.wake_fd)
        left = self._sent_at + CLOSING_GRACE - time.monotonic()
        if left > 0:
            self._poller.poll(math.ceil(left * 1000))


def _give_memory_back() -> None:
    """Make the C library return what is free: a list of 2,000 containers leaves 20 MB of it otherwise."""
    import ctypes  # half a megabyte, and only for nodes as large as that

    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _connect_trouble(path: str, error: OSError | ValueError) -> HostError:
    """Why `path` cannot be connected to, for a person."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOENT:
        folder = os.path.dirname(path)
        missing = (
            f"{path} is not there"
            if os.path.isdir(folder or ".")
            else f"neither {path} nor its folder is there"
        )
        return HostError(
            "NRI001",
            f"the NRI socket {missing}; waiting for it",
            "start the runtime, or enable NRI in it; nri.sockets names the path",
        )
    if number == errno.ECONNREFUSED and _is_socket(path):
        return HostError(
            "NRI002",
            f"nobody listens on the NRI socket {path}; waiting for it",
            "the runtime is down or starting",
        )
    if number in (errno.EACCES, errno.EPERM):
        return HostError(
            "NRI003",
            f"no permission to connect to the NRI socket {path}",
            "run as root; in a container, check its security profile (SELinux, AppArmor) too",
        )
    if number is None or number in (
        errno.ECONNREFUSED,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EPROTOTYPE,
    ):
        # Without a number: Python itself found the path too long for a socket address, or not encodable.
        what = "it is not a socket" if number == errno.ECONNREFUSED else _words(error)
        return HostError("NRI004", f"{quoted(path)} cannot be an NRI socket: {what}", "correct nri.sockets")
    return HostError("NRI005", f"cannot connect to the NRI socket {path}: {_words(error)}", "trying again")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return True


def _words(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error)
