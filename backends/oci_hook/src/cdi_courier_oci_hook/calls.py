"""What a call of an OCI runtime asks for: runc's and crun's command line, which differ. Light module.

Source: ``--help`` and behaviour of runc 1.1 and 1.3 (Go's flag package by urfave/cli v1, which lets options
of ``create`` follow the container's id) and of crun 1.8 and 1.28 (GNU argp: options end at the first other
word, long ones may be abbreviated, short ones clustered). Which of the two it is cannot be told from a
program's name, so a command line is read both ways; nearly always they agree. `gate.sh` reads the same, less
exactly, and has the same tables. It must not know what is done about a call, and looks at no file.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CREATES = ("create", "run")
VERBS = (*CREATES, "exec", "delete")
"""The commands that are of interest; all others are the runtime's own business."""

GLOBAL_VALUES = frozenset(("root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager"))
GLOBAL_FLAGS = frozenset(("debug", "systemd-cgroup", "help", "h", "version", "v", "V", "usage", "?"))


class Reading:
    """One way to read a ``create``, ``run`` or ``exec``. Paths and id are the words as they stand.

    bundle: ``""`` for the working directory. config: crun's ``--config``, ``""`` if it is not given.
    process: of ``exec``, ``""`` if it is not given. container: the id, ``""`` if there is none.
    """

    __slots__ = ("bundle", "config", "container", "process")

    def __init__(self, container: str, options: Mapping[str, str]) -> None:
        self.container = container
        self.bundle = options.get("bundle", "")
        self.config = options.get("config", "")
        self.process = options.get("process", "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Reading({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


class Call:
    """A call. verb: one of `VERBS`, or ``""``. readings: of what follows it, one or two; none of ``delete``.

    log, log_format: where and how the runtime would log, ``""`` where that is not said.
    """

    __slots__ = ("log", "log_format", "readings", "verb")

    def __init__(self, verb: str, readings: Sequence[Reading], log: str, log_format: str) -> None:
        self.verb = verb
        self.readings = readings
        self.log = log
        self.log_format = log_format


def parse(argv: Sequence[str]) -> Call:
    """The call with these arguments, without the program's name."""
    verb, rest, found = _globals(argv)
    readings: list[Reading] = []
    if verb in _OPTIONS:
        options = _OPTIONS[verb]
        tried = [_read_go(rest, options, in_order=verb == "exec"), _read_argp(rest, options)]
        # A reading that the runtime itself would refuse is not the one; if it would refuse both, whatever.
        likely = [one for one in tried if one[2] and (one[1] if verb == "exec" else len(one[1]) == 1)]
        for values, words, _ in likely or tried:
            reading = Reading((words[0] if verb == "exec" else words[-1]) if words else "", values)
            if reading not in readings:
                readings.append(reading)
    return Call(verb, readings, found.get("log", ""), found.get("log-format", ""))


class _Options:
    """Options of a command. values: long names of those with a value. flags: of those without.

    short: letters.
    """

    __slots__ = ("flags", "short", "values")

    def __init__(self, values: str, flags: str, short: Mapping[str, str]) -> None:
        self.values = frozenset(values.split())
        self.flags = frozenset(flags.split())
        self.short = short


_CREATE = _Options(
    "bundle config console-socket pidfd-socket pid-file preserve-fds",
    "detach help keep no-new-keyring no-pivot no-subreaper usage",
    {"b": "bundle", "d": "detach", "f": "config", "h": "help", "?": "help"},
)
_EXEC = _Options(
    "additional-gids apparmor cap cgroup console-socket cwd env pid-file pidfd-socket preserve-fds process "
    "process-label user",
    "detach help ignore-paused no-new-privs tty usage",
    {
        "c": "cap",
        "d": "detach",
        "e": "env",
        "g": "additional-gids",
        "h": "help",
        "p": "process",
        "t": "tty",
        "u": "user",
        "?": "help",
    },
)
_NEVER_SHORTENED = frozenset(("pidfd-socket",))  # runc's alone, and runc takes no abbreviations
_OPTIONS = {"create": _CREATE, "run": _CREATE, "exec": _EXEC}


def _globals(argv: Sequence[str]) -> tuple[str, Sequence[str], dict[str, str]]:
    """The verb, what follows it, and the values of global options.

    After an option that is not known, anything may be the verb: the first word that is one of `VERBS` is
    taken, since a ``create`` must not be missed.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            at += 1
            return _verb(argv[at - 1] if at <= len(argv) else ""), argv[at:], found
        if word[:1] != "-" or word == "-":
            return _verb(word), argv[at:], found
        name, equals, value = word[2 if word.startswith("--") else 1 :].partition("=")
        if name in GLOBAL_FLAGS:
            continue
        if name not in GLOBAL_VALUES:
            for verb_at in range(at, len(argv)):
                if argv[verb_at] in VERBS:
                    return argv[verb_at], argv[verb_at + 1 :], found
            break
        if not equals:
            if at == len(argv):
                break
            value = argv[at]
            at += 1
        found[name] = value
    return "", (), found


def _verb(word: str) -> str:
    return word if word in VERBS else ""


def _read_go(
    words: Sequence[str], options: _Options, *, in_order: bool
) -> tuple[dict[str, str], list[str], bool]:
    """Values of options, other words, and whether every option is known. in_order: options come first."""
    values: dict[str, str] = {}
    others: list[str] = []
    known = True
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--" or (in_order and not _is_option(word)):
            others += words[at if word == "--" else at - 1 :]
            break
        if not _is_option(word):
            others.append(word)
            continue
        name, equals, value = word[2 if word.startswith("--") else 1 :].partition("=")
        name = options.short.get(name, name)
        if name in options.values:
            if not equals:
                if at == len(words):
                    known = False
                    break
                value = words[at]
                at += 1
            values[name] = value
        elif name not in options.flags:
            known = False
    return values, others, known


def _read_argp(words: Sequence[str], options: _Options) -> tuple[dict[str, str], list[str], bool]:
    values: dict[str, str] = {}
    known = True
    at = 0
    while at < len(words):
        word = words[at]
        if not _is_option(word):
            break
        at += 1
        if word == "--":
            break
        pending = ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _completed(name, options)
            if name in options.values:
                pending = "" if equals else name
                values[name] = value
            elif name not in options.flags:
                known = False
        else:
            for position, letter in enumerate(word[1:], 2):
                name = options.short.get(letter, "")
                if name in options.values:
                    values[name] = word[position:]
                    pending = "" if word[position:] else name
                    break
                if name == "tty":  # takes what is attached
                    break
                if not name:
                    known = False
                    break
        if pending:
            if at == len(words):
                known = False
                break
            values[pending] = words[at]
            at += 1
    return values, list(words[at:]), known


def _completed(name: str, options: _Options) -> str:
    """The long option that an abbreviation stands for; what is ambiguous or unknown stays."""
    names = options.values | options.flags
    if name in names:
        return name
    found = [other for other in names - _NEVER_SHORTENED if other.startswith(name)]
    return found[0] if len(found) == 1 else name


def _is_option(word: str) -> bool:
    return word[:1] == "-" and word != "-"
