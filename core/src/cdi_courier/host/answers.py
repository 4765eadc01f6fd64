"""What one source told, and asking several at once under a deadline. It knows no source.

A question that is not answered in time is left behind in its thread: this runs in a process that ends soon
(`cdi_courier.host.describe`).
"""

from __future__ import annotations

import json
import threading
import time
import tomllib
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cdi_courier.errors import HostError, quoted
from cdi_courier.host.model import FACTS, Fact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

_LONGEST_TEXT: Final = 4096
_MOST_ITEMS: Final = 256


class Findings:
    """What has been learnt of one runtime. The first to tell a fact is believed: ask the best source first.

    problems: messages with their codes, as a person reads them.
    """

    def __init__(self) -> None:
        self.version = ""
        self.facts: dict[str, Fact] = {}
        self.problems: list[str] = []

    def learn(self, name: str, value: Any, source: str) -> None:
        """Note a fact; None is no fact. Raises `KeyError` for a name that is not in `FACTS`."""
        if name not in FACTS:
            raise KeyError(name)
        if value is not None:
            self.facts.setdefault(name, Fact(value, source))

    def value(self, name: str) -> Any:
        """What is known by this name, or None."""
        fact = self.facts.get(name)
        return None if fact is None else fact.value

    def trouble(self, error: HostError) -> None:
        """Note a problem, once."""
        if str(error) not in self.problems:
            self.problems.append(str(error))

    def add(self, other: Findings) -> None:
        """Take over what another source told and is not known yet."""
        self.version = self.version or other.version
        for name, fact in other.facts.items():
            self.facts.setdefault(name, fact)
        self.problems += [problem for problem in other.problems if problem not in self.problems]


def late(what: str, timeout: float) -> HostError:
    """Whoever is named has not answered in `timeout` seconds."""
    return HostError(
        "HST103",
        f"{what} did not answer within {timeout:.3g} s",
        "it may hang; see its log, or [probe] timeout",
    )


def together(questions: Mapping[str, Callable[[], T]], timeout: float) -> dict[str, T | HostError]:
    """The answer to each question, all asked at once; a `HostError` where there is none.

    timeout: seconds for all of them together. A question that raises anything else than `HostError` is a
    mistake of ours and answered with ``HST109``.
    """
    answers: dict[str, T | HostError] = {}
    threads = []

    def ask(name: str, question: Callable[[], T]) -> None:
        try:
            answers[name] = question()
        except HostError as error:
            answers[name] = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the other answers count
            text = quoted(f"{type(error).__name__}: {error}")
            answers[name] = HostError("HST109", f"{name}: an internal error: {text}", "report it")

    deadline = time.monotonic() + timeout
    for name, question in questions.items():
        thread = threading.Thread(target=ask, args=(name, question), name=name, daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found = dict(answers)  # who comes later finds a closed door
    return {name: found[name] if name in found else late(name, timeout) for name in questions}


# --- reading what others wrote: a value of the wrong type is no value ----------------------------------


def table(value: Any, *path: str) -> Mapping[str, Any]:
    """The object at `path` below `value`; an empty one if there is none."""
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def merge_tables(to: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, key by key: tables are merged, and of anything else that is in both the other's counts.

    So containerd 2 merges plugins' tables (docs/facts.md#containerd-configuration).
    """
    merged = dict(to)
    for key, value in other.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = merge_tables(old, value)
        else:
            merged[key] = value
    return merged


def text(value: Any) -> str | None:
    """The string, if it is one of a sane length; else None."""
    return value if isinstance(value, str) and len(value) <= _LONGEST_TEXT else None


def flag(value: Any) -> bool | None:
    """The boolean, if it is one; else None."""
    return value if isinstance(value, bool) else None


def texts(value: Any) -> list[str] | None:
    """The list of strings, if it is one; Go's null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        return None
    return value if all(text(item) is not None for item in value) else None


def handlers(
    entries: Mapping[str, Any], describe: Callable[[Mapping[str, Any]], tuple[str, str]]
) -> dict[str, dict[str, str]] | None:
    """The fact ``handlers``; describe: an entry's (type, path of the low-level runtime)."""
    found = {}
    for name, entry in entries.items():
        if isinstance(entry, dict) and text(name) is not None:
            type_, path = describe(entry)
            found[name] = {"type": type_, "path": path}
    return found if 0 < len(found) <= _MOST_ITEMS else None


def strings(values: Iterable[Any]) -> tuple[str, ...]:
    """Each as a string, one that is none as an empty one."""
    return tuple(text(value) or "" for value in values)


def from_json(data: bytes | str, what: str) -> Mapping[str, Any]:
    """The JSON object. Raises `HostError` ``HST104``."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HostError("HST104", f"{what} is not JSON: {quoted(str(error))}") from None
    if not isinstance(value, dict):
        raise HostError("HST104", f"{what} is not a JSON object")
    return value


def from_toml(data: bytes, what: str, code: str = "HST104") -> dict[str, Any]:
    """The TOML document. Raises `HostError` with `code`."""
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise HostError(code, f"{what} is not TOML: {quoted(str(error))}") from None


def version_of(value: str) -> str:
    """The version as the runtime tells it, if it can be shown in a line; else nothing."""
    return value if value.isprintable() and len(value) <= 100 else ""
