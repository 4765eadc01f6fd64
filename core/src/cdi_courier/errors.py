"""The one hierarchy of errors, each with a stable code, a message for a person and a hint what to do.

Light module. It must not know who raises what: codes are chosen where the error arises and listed in
docs/errors.md. Prefixes: ``SET`` settings, ``ANN`` annotations, ``POL`` policy, ``CDI`` spec files and
names, ``NRI`` the NRI session and its setup, ``DLV`` delivery, ``HST`` the host, ``PLG`` plugins, ``CHG``
changes to files, ``EXP`` manifests, ``GEN`` generated spec files, ``HOK`` hooks and wrappers, ``CRI`` CRI-O,
``STA`` the daemon's status.
"""

from __future__ import annotations


class CourierError(Exception):
    """An expected failure: says what, where and what to do, and is never shown with a traceback.

    code: stable, three capital letters and three digits, e.g. ``CDI004``.
    message: one sentence without the code; may hold hostile text, which `printable` has made harmless.
    hint: what the reader can do about it; empty when the message already says so.
    fields: structured context for the log (``device``, ``file``, ``annotation`` …), values are strings.
    """

    def __init__(self, code: str, message: str, hint: str = "", **fields: str) -> None:
        super().__init__(code, message, hint)
        self.code = code
        self.message = printable(message)
        self.hint = printable(hint)
        self.fields = fields

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        if "\n" in self.hint:
            # It holds lines to paste: nothing may follow the last of them.
            return f"{text}\n{self.hint}"
        return f"{text} ({self.hint})" if self.hint else text


class SettingsError(CourierError):
    """The configuration files or options are wrong."""


class AnnotationError(CourierError):
    """An annotation's value does not parse or exceeds a limit."""


class CdiError(CourierError):
    """A CDI spec file is unusable, or a device name cannot be resolved."""


class PolicyDenied(CourierError):  # noqa: N818 - a refusal is an answer, not a malfunction
    """Who asks may not have what they ask for."""


class DeliveryError(CourierError):
    """The chosen way cannot carry what was granted."""


class ProtocolError(CourierError):
    """The other side of a connection does not follow the protocol."""


class HostError(CourierError):
    """The host lacks something needed, or something else holds it."""


class GenerateError(CourierError):
    """No spec file can be made from this host, or it cannot be written."""


class ManifestError(CourierError):
    """A file of Kubernetes manifests cannot be used."""


class PluginError(CourierError):
    """An installed plugin cannot be loaded or chosen."""


def printable(text: str) -> str:
    r"""Text with every control and surrogate character but the line feed written as an escape.

    Messages quote annotations and file names, which are hostile: an escape sequence must not reach an
    operator's terminal, and a lone surrogate must not break an encoder. A line feed is kept because
    refusals print TOML to paste; whoever quotes hostile text puts it through `quoted` first.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def quoted(text: str, limit: int | None = 200) -> str:
    r"""Hostile text as one printable line in double quotes, which is also a TOML and JSON string.

    limit: characters between the quotes, escapes included; what is cut off shows as ``…``. None: no limit,
    for text that is to be read back.

    >>> quoted('a"\n')
    '"a\\"\\n"'
    """
    body = text if limit is None else text[: limit + 1]
    body = printable(body.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
    if limit is not None and len(body) > limit:
        return f'"{body[:limit]}"…'
    return f'"{body}"'


def _escape(char: str) -> str:
    number = ord(char)
    if number <= 0xFFFF:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"
