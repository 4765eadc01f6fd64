"""Looks at the host again and again, and says in words when what follows for its runtimes changes.

The describing itself is done in a child process (`host.describe`); here is when, and what came of it.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi_courier.hookspecs import Choice
    from cdi_courier.host.model import Host
    from cdi_courier.plugins import Plugins
    from cdi_courier.settings import Settings

logger = logging.getLogger("cdi_courier.host")

_FAILED: Final = "HST108: "  # what begins like this says that the whole description has failed


class Watch:
    """What is chosen for each runtime, kept up to date.

    describe: returns the host as it is now; may take seconds. changed: called, in the watching thread, when
    the choices are others than before.
    """

    def __init__(
        self,
        settings: Settings,
        plugins: Plugins,
        describe: Callable[[], Host],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.choices: tuple[Choice, ...] | None = None
        self.problems: tuple[str, ...] = ()
        self._settings = settings
        self._plugins = plugins
        self._describe = describe
        self._changed = changed
        self._said: dict[str, str] = {}
        self._wake = threading.Event()
        self._stopping = False

    def run(self) -> None:
        """Look every ``[probe] interval``, or when woken, until `stop`."""
        while not self._stopping:
            self.look()
            self._wake.wait(self._settings.probe.interval)
            self._wake.clear()

    def stop(self) -> None:
        """Make `run` return soon. Any thread."""
        self._stopping = True
        self._wake.set()

    def wake(self) -> None:
        """Look again now: something has happened to a runtime. Any thread."""
        self._wake.set()

    def reload(self, settings: Settings) -> None:
        """Look with these settings from now on, and at once. Any thread."""
        self._settings = settings
        self.wake()

    def look(self) -> None:
        """Describe the host once and tell what has changed."""
        try:
            # Imported when the sessions have begun, which come first.
            from cdi_courier import choice

            host = self._describe()
            choices = choice.choose_all(self._plugins, host.runtimes, self._settings)
        except Exception:
            logger.exception(
                "describing the host failed; looking again in %g s", self._settings.probe.interval
            )
            return
        if self._stopping:
            return
        self.problems = host.problems
        if not host.runtimes and any(problem.startswith(_FAILED) for problem in host.problems):
            # Nothing was learnt: what was known of the runtimes is better than that there are none.
            self._say_problems()
            return
        before, self.choices = self.choices, choices
        self._say(choices)
        if before != choices:
            self._changed()

    def chosen(self, kind: str, socket: str) -> Choice | None:
        """As `ServeContext.chosen`. A socket that is known says more than a kind."""
        choices = self.choices or ()
        if socket:
            # /var/run is a link to /run nearly everywhere.
            wanted = os.path.realpath(socket)
            for found in choices:
                theirs = (found.runtime.endpoint, found.runtime.get("nri_socket", ""))
                if any(path and os.path.realpath(path) == wanted for path in theirs):
                    return found
        same = [found for found in choices if found.runtime.kind == kind]
        return same[0] if len(same) == 1 else None

    def _say_problems(self) -> None:
        for problem in self.problems:
            if self._said.setdefault(f"problem {problem}", "") != problem:
                self._said[f"problem {problem}"] = problem
                logger.warning("%s", problem)

    def _say(self, choices: tuple[Choice, ...]) -> None:
        now = {found.runtime.key: _in_words(found) for found in choices}
        for problem in self.problems:
            now[f"problem {problem}"] = problem
        if not choices:
            now[""] = f"no container runtime is here; looking again every {self._settings.probe.interval:g} s"
        for key, words in now.items():
            if self._said.get(key) != words:
                logger.info("%s", words)
        for key in self._said.keys() - now.keys():
            if key and not key.startswith("problem "):
                logger.info("%s is gone", key)
        self._said = now


def _in_words(found: Choice) -> str:
    runtime = found.runtime
    text = f"{runtime.key} {runtime.version or 'of unknown version'}: "
    text += f"served by {found.active}: {found.reason}" if found.active else found.reason
    if found.recommended and found.recommended != found.active:
        text += f" (recommended: {found.advice})"
    for offer in found.offers:
        if offer.warning:
            text += f"; {offer.backend}: {offer.warning}"
    return text
