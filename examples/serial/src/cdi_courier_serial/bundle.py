"""``cdi-bundle BUNDLE``: have the backend edit a bundle's config, before runc or crun creates from it.

    cdi-bundle DIR && runc run --bundle DIR ID

Exit status: 0 the config may be used, 1 it may not or nobody could be asked, 2 usage. ``config.json`` is
replaced as a whole or left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

from cdi_courier.settings import ServiceSettings

from .backend import SOCKET

_PATIENCE: Final = 10.0  # seconds


class RefusedError(Exception):
    """The container must not start; the text says why."""


def prepare(bundle: Path, path: Path) -> None:
    """Replace the bundle's config by the one to use. path: the backend's socket.

    Raises `RefusedError`, and `OSError` or `ValueError` where the backend cannot be asked.
    """
    config = bundle / "config.json"
    answer = json.loads(_ask(path, config.read_bytes()))
    if "config" not in answer:
        raise RefusedError(answer["error"])
    with tempfile.NamedTemporaryFile("w", dir=bundle, delete=False) as file:
        try:
            json.dump(answer["config"], file)
            file.flush()
            shutil.copymode(config, file.name)
            os.replace(file.name, config)
        except BaseException:
            os.unlink(file.name)
            raise


def _ask(path: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_PATIENCE)
        answer = bytearray()
        try:
            client.connect(str(path))
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                answer += part
        except OSError as error:
            raise OSError(f"cannot ask {path}: {error}") from None
    return bytes(answer)


def main() -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser("cdi-bundle", description="Put the devices of a bundle into its config.")
    parser.add_argument("bundle", type=Path, help="the folder with config.json")
    default = Path(ServiceSettings().state_dir) / SOCKET
    parser.add_argument("--socket", type=Path, default=default, help=f"the backend's ({default})")
    arguments = parser.parse_args()
    try:
        prepare(arguments.bundle, arguments.socket)
    except RefusedError as error:
        print(f"cdi-bundle: {error}", file=sys.stderr)  # noqa: T201 - it is a command
        return 1
    except (OSError, ValueError) as error:
        print(f"cdi-bundle: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0
