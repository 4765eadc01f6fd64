"""What docs/getting-started.md has a reader type works, on a real containerd, as it stands there.

The blocks run as root in a mount namespace whose folders for programs, settings and state are laid over the
host's, so that nothing of it stays. What is not run says why in a comment before the block.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import host
from support.lab import Lab
from support.pages import REPOSITORY, Block, blocks
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

PAGE = REPOSITORY / "docs/getting-started.md"
_OVERLAID = ("/etc", "/opt", "/run", "/usr/local", "/var/lib", "/root")
_INSTALL = 300.0
_TIMEOUT = 60.0

_SETUP = """\
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 doc-blocks {over}
for path in {overlaid}; do
    mkdir -p {over}$path/upper {over}$path/work
    mount -t overlay -o lowerdir=$path,upperdir={over}$path/upper,workdir={over}$path/work overlay $path
done
mkdir -p /etc/cdi-courier /etc/cdi /run/cdi
echo ready
# Whoever enters needs the namespace; it ends with its input.
read _ || :
"""


class Reader:
    """Somebody who types blocks into a shell, one after the other, in namespaces of their own."""

    def __init__(self, root: Path, settings: str) -> None:
        self.folder = root / "reader"
        self.folder.mkdir()
        over = root / "over"
        over.mkdir()
        setup = _SETUP.format(over=shlex.quote(str(over)), overlaid=" ".join(_OVERLAID))
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "ready\n"
        self._shells: list[int] = []
        # Where this machine's runtime is; on a reader's it is where runtimes usually are.
        self.run(f"cat >/etc/cdi-courier/config.toml <<'END'\n{settings}\nEND\n")

    def run(self, text: str) -> str:
        """What a block says; it must succeed. A program that it leaves running goes on."""
        log = self.folder / "said"
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("CDI_COURIER_", "VIRTUAL_ENV"))
        }
        with log.open("wb") as file:
            shell = subprocess.Popen(
                [
                    "nsenter",
                    f"--mount=/proc/{self._keeper.pid}/ns/mnt",
                    f"--wdns={REPOSITORY}",
                    "sh",
                    "-euc",
                    text,
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            )
            code = shell.wait(_INSTALL)
        self._shells.append(shell.pid)
        said = log.read_text(errors="replace")
        assert code == 0, f"{text}\n{said}"
        return said

    def end(self) -> None:
        for group in self._shells:
            try:
                os.killpg(group, signal.SIGTERM)
            except ProcessLookupError:
                continue
            wait_for(
                lambda group=group: not host.lives_in_group(group),
                _TIMEOUT,
                "the end of what a block has started",
            )
        self._keeper.communicate("", timeout=_TIMEOUT)


@pytest.fixture
def reader(lab: Lab) -> Iterator[Reader]:
    """A reader whose host has the lab's containerd, with NRI on."""
    lab.clear_specs()
    settings = (
        f'[nri]\nsockets = ["{lab.nri_socket}"]\n'
        f'[runtimes.containerd]\nendpoint = "{lab.containerd.socket}"\n'
        f'config = "{lab.containerd.config_file}"\n'
    )
    made = Reader(lab.root, settings)
    yield made
    made.end()


def runnable(page: Path) -> list[Block]:
    return [b for b in blocks(page) if b.language == "sh" and not b.comment.startswith("not run")]


def manifest(page: Path) -> Block:
    return next(block for block in blocks(page) if block.language == "yaml")


def test_getting_started_leads_to_a_container_with_its_device(reader: Reader, lab: Lab) -> None:
    """Typed one after the other the blocks succeed, and the pod of the page has what the page promises."""
    told: dict[str, str] = {}
    pod: dict[str, Any] = yaml.safe_load(manifest(PAGE).text)
    for block in runnable(PAGE):
        text = block.text
        if match := re.match(r"file: (\S+) is the manifest above", block.comment):
            reader.run(f"cat >/root/{match[1]} <<'END'\n{manifest(PAGE).text}END\n")
            text = f"cd /root\n{text}"
        told[block.text] = reader.run(text)
        if " run &" in text:
            # A reader's fingers are slower than the daemon.
            wait_for(lambda: "active" in reader.run("cdi-courier status || :"), _TIMEOUT, "the session")
    metadata = pod["metadata"]
    (container,) = pod["spec"]["containers"]
    made = lab.cri.run_pod(metadata["name"], metadata["namespace"], annotations=metadata["annotations"])
    running = lab.cri.run_container(made, container["name"])
    seen = lab.cri.exec_sync(running, ["sh", "-c", "echo $DEMO; [ -c /dev/null ] && echo node"])
    (devices,) = [said for text, said in told.items() if "cdi-courier devices" in text]
    (explained,) = [said for text, said in told.items() if "explain" in text]
    (doctor,) = [said for text, said in told.items() if "doctor" in text]

    assert seen.stdout.split() == ["granted", "node"]
    assert "example.com/demo=null" in devices
    assert "the built-in rule" in explained
    assert "\nready\n" in doctor
