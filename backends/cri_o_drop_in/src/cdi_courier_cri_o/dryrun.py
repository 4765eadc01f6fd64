"""Has CRI-O's own program read the files as they are meant to be, in a folder of their own.

``crio config`` finds what is not TOML and what has a wrong type, and little else
(docs/facts.md#cri-o-dry-run), so that our own keys are read back from what it prints.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.errors import HostError, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .configuration import Configuration

_TIMEOUT: Final = 30.0  # seconds; it takes a fraction of one
FOLDERS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Where daemons look for programs."""

_MESSAGE: Final = re.compile(r'msg="((?:[^"\\]|\\.)*)"')


def program(pid: int | None) -> str:
    """The absolute path of the running CRI-O's program, else of the one that is found; ``""`` if none is."""
    if pid is not None:
        try:
            path = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            path = ""
        # After an upgrade it is "… (deleted)", and the new one is what will be restarted.
        if os.path.basename(path) == "crio" and os.access(path, os.X_OK):
            return path
    # Not the working directory, as which an empty entry counts: what is found is run as root.
    own = [folder for folder in os.environ.get("PATH", "").split(":") if os.path.isabs(folder)]
    return shutil.which("crio", path=":".join((*own, *FOLDERS))) or ""


def version(crio: str) -> str:
    """What the program says its version is; ``""`` if it does not."""
    done = _run([crio, "--version"])
    match = re.match(r"crio version (\S+)", done.stdout) if done and not done.returncode else None
    return match[1] if match else ""


def check(
    crio: str, configuration: Configuration, content: bytes, keys: Mapping[tuple[str, ...], Any]
) -> None:
    """Have CRI-O read its files together with ours.

    keys: our keys and the values that must come out. Raises `HostError`: ``CRI104`` it refuses them,
    ``CRI105`` a key does not come out.
    """
    done = _staged(crio, configuration, content)
    if done.returncode:
        without = _staged(crio, configuration, None)
        said = quoted(_cause(done.stderr), 500)
        if without.returncode:
            raise HostError(
                "CRI104",
                f"CRI-O refuses its configuration even without cdi-courier's drop-in: {said}",
                "mend it first: CRI-O would not start again",
            )
        raise HostError(
            "CRI104",
            f"{crio} refuses the configuration with {configuration.drop_in}: {said}",
            "nothing was written; report it with this message",
        )
    for key, value in keys.items():
        if _printed(done.stdout, key) != value:
            raise HostError(
                "CRI105",
                f"{crio} reads the drop-in, but {'.'.join(key)} = {value} does not come out of it",
                "this version may not have that key; choose another [cri_o_drop_in] mode",
            )


def _staged(
    crio: str, configuration: Configuration, content: bytes | None
) -> subprocess.CompletedProcess[str]:
    # Not in the drop-in folder: CRI-O reads whatever lies there.
    with tempfile.TemporaryDirectory(prefix="cdi-courier-") as stage:
        files = {
            os.path.relpath(file.path, configuration.folder): file.data
            for file in configuration.files
            if file.path != configuration.main
        }
        if content is not None:
            files[os.path.basename(configuration.drop_in)] = content
        for name, data in files.items():
            path = os.path.join(stage, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        # Without a main file CRI-O is told so: it fails for one that is named and is not there.
        main = configuration.main if os.path.exists(configuration.main) else ""
        done = _run([crio, "--config", main, "--config-dir", stage, "config"])
        if done is None:
            raise HostError(
                "CRI104",
                f"{crio} could not be run, or did not answer within {_TIMEOUT:g} s",
                "see whether it works: `crio config`",
            )
        done.stderr = done.stderr.replace(stage, configuration.folder)
        return done


def _run(argv: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(  # noqa: S603 - the runtime's own program, without a shell
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _cause(stderr: str) -> str:
    """The message of the last line, which is the fatal one."""
    line = next((line for line in reversed(stderr.splitlines()) if line.strip()), "it does not say why")
    match = _MESSAGE.search(line)
    return match[1].replace('\\"', '"').replace("\\\\", "\\") if match else line.strip()


def _printed(text: str, key: tuple[str, ...]) -> Any:
    """The value that the configuration printed has for the key; None where it has none.

    What equals CRI-O's default is printed as a comment, and names of handlers without quotes, so that a dot
    in one looks like another table (1.37).
    """
    try:
        document = tomllib.loads(text)
    except ValueError:
        return None
    for path in (key, ".".join(key).split(".")):
        value: Any = document
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    match = re.search(rf"^#[ \t]*{re.escape(key[-1])} = (true|false)$", text, re.MULTILINE)
    return match[1] == "true" if match else None
