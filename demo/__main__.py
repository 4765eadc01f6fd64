"""The demo: a private containerd, `cdi-courier run` beside it, and three pods that show what it does.

Run as ``python demo``, as root. It changes nothing on the host: all of it lies in one temporary folder,
packages in the cache folder, and both an interruption and a failure take everything down. Exit status: 0 what
was seen is what should be seen, 1 it is not or something failed, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nothing is left outside the cache folder, and that means compiled modules too, the daemon's included.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402
from support import containerd  # noqa: E402
from support.courier import Courier, CourierFailure  # noqa: E402
from support.cri import CriError, Pod  # noqa: E402
from support.lab import Lab, LeftoverError, unsuitable  # noqa: E402
from support.packages import PackageError  # noqa: E402
from support.waiting import WaitTimeoutError  # noqa: E402

DEVICE = "management.nvidia.com/gpu=all"
ANNOTATION = "nvidia.cdi.k8s.io"
NODE = "/dev/nvidia-demo"
VARIABLE, VALUE = "NVIDIA_DEMO", "granted"
MOUNT, CONTENT = "/etc/nvidia-demo", "from the host"
REFUSAL = "POL001"

_LOCKS = Path("/run/cdi-courier")
_RUNTIME_FOLDERS = (Path("/run/containerd"), Path("/run/runc"), Path("/run/crun"))
_NONE = "none"
_FAILURES = (
    CourierFailure,
    CriError,
    LeftoverError,
    OSError,
    PackageError,
    WaitTimeoutError,
    containerd.RuntimeFailure,
)

# One line an answer. A node is looked for before it is written to: else the shell would make a file there.
_LOOK = f"""
if [ -c {NODE} ]; then stat -c 'node=char %t:%T' {NODE}; else echo node={_NONE}; fi
if [ -c {NODE} ] && echo demo 2>/dev/null >{NODE}; then echo write=works; else echo write={_NONE}; fi
echo env=${{{VARIABLE}-{_NONE}}}
if [ -f {MOUNT} ]; then echo mount=$(cat {MOUNT}); else echo mount={_NONE}; fi
"""


class DemoError(Exception):
    """The demo did not show what it should; the text says what, for a person."""


@dataclass(frozen=True)
class Seen:
    """What a container sees, in words; `_NONE` for what is not there."""

    node: str
    write: str
    env: str
    mount: str


GRANTED = Seen("char 1:3", "works", VALUE, CONTENT)
NOTHING = Seen(_NONE, _NONE, _NONE, _NONE)


class Interrupts:
    """Turns the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; later ones change nothing.

    While `held`, it waits: what is begun there is brought to its end.
    """

    def __init__(self) -> None:
        self._came = self._raised = False
        self._held = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raise nothing inside; afterwards what came meanwhile, unless an error is on its way already."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self._raise_if_due()

    def _on_signal(self, *_: object) -> None:
        self._came = True
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        if self._came and not self._raised and not self._held:
            self._raised = True
            raise KeyboardInterrupt


class Demo:
    """One run. console: where a person looks on; interrupts: held while things must not be left half done."""

    def __init__(self, console: Console, interrupts: Interrupts) -> None:
        self._console = console
        self._interrupts = interrupts
        self._courier: Courier | None = None
        self._absent = [path for path in (_LOCKS, *_RUNTIME_FOLDERS) if not path.exists()]

    def run(self) -> None:
        """Show everything and take it down again. Raises DemoError and `_FAILURES`."""
        self.say("looking for a containerd with NRI")
        binaries = containerd.installed()
        self.say("taking the installed one" if binaries else "none installed: taking Debian's packages")
        lab = Lab(binaries=binaries, progress=self.say)
        try:
            lab.start()
            self.say(f"{lab.containerd.binaries.name} runs; until the end everything lies in {lab.root}")
            self._write_spec(lab)
            self._start_courier(lab)
            self._show(lab)
        finally:
            with self._interrupts.held():
                self._take_down(lab)

    def say(self, line: str) -> None:
        """A line of progress."""
        self._console.print(Text(f"* {line}"), soft_wrap=True)

    def _write_spec(self, lab: Lab) -> None:
        self.say(f"writing a CDI spec: {DEVICE} is {NODE}, in truth /dev/null")
        source = lab.root / "mounted.txt"
        source.write_text(f"{CONTENT}\n")
        vendor_class, _, name = DEVICE.partition("=")
        node = {
            "path": NODE,
            "hostPath": "/dev/null",
            "type": "c",
            "major": 1,
            "minor": 3,
            "permissions": "rw",
        }
        edits: dict[str, Any] = {
            "env": [f"{VARIABLE}={VALUE}"],
            "deviceNodes": [node],
            "mounts": [{"hostPath": str(source), "containerPath": MOUNT, "options": ["ro", "bind"]}],
        }
        spec = {
            "cdiVersion": "0.6.0",
            "kind": vendor_class,
            "devices": [{"name": name, "containerEdits": edits}],
        }
        lab.write_spec("management.nvidia.com-gpu.json", spec)

    def _start_courier(self, lab: Lab) -> None:
        self.say("starting cdi-courier run")
        # Only a daemon that has come up can be asked to tidy up after itself.
        with self._interrupts.held():
            self._courier = lab.courier()
            self._courier.start()
            self._courier.wait_for_log("synchronized")
            assert self._courier.process is not None
            self.say(f"cdi-courier run is connected to the runtime, pid {self._courier.process.pid}")

    def _show(self, lab: Lab) -> None:
        asking = {ANNOTATION: DEVICE}
        annotated = self._look(lab, self._pod(lab, "annotated", "gpu-operator", asking))
        plain = self._look(lab, self._pod(lab, "plain", "gpu-operator", {}))
        refusal = self._refusal(lab, self._pod(lab, "annotated", "default", asking))

        self._console.print()
        self._console.print(Text(f"The annotation is {ANNOTATION}: {DEVICE}"), soft_wrap=True)
        self._console.print(_table(annotated, plain, refusal))
        self._console.print()
        self._console.print(Text("The refusal, as `kubectl describe pod` would show it:"))
        for number, line in enumerate((refusal or "there is none").splitlines()):
            # Below the sentence stands TOML to paste, which must not be broken.
            self._console.print(Text(line), soft_wrap=number > 0)
        self._console.print()
        _check(annotated, plain, refusal)

    def _pod(self, lab: Lab, name: str, namespace: str, annotations: dict[str, str]) -> Pod:
        self.say(f"creating the {name} pod in {namespace}")
        return lab.cri.run_pod(name, namespace, annotations=annotations)

    def _look(self, lab: Lab, pod: Pod) -> Seen:
        container = lab.cri.run_container(pod, "main")
        result = lab.cri.exec_sync(container, ["sh", "-c", _LOOK])
        if result.rc:
            raise DemoError(f"looking into {pod.namespace}/{pod.name} failed: {result.stderr.strip()}")
        answers = dict(line.split("=", 1) for line in result.stdout.splitlines())
        return Seen(**answers)

    def _refusal(self, lab: Lab, pod: Pod) -> str:
        """The text of the runtime's error; empty when there was no error."""
        try:
            lab.cri.create_container(pod, "main")
        except CriError as error:
            return error.message
        return ""

    def _take_down(self, lab: Lab) -> None:
        self.say("taking everything down")
        try:
            if self._courier is not None:
                self._courier.stop()
        finally:
            lab.cleanup()
        left = self._left(lab)
        if left:
            raise DemoError(f"the demo left behind: {'; '.join(left)}")
        self.say("nothing is left: no process, no mount, no file outside the cache folder")

    def _left(self, lab: Lab) -> list[str]:
        left = lab.leftovers() if hasattr(lab, "root") else []
        process = self._courier.process if self._courier else None
        locks = _files_with_pid(_LOCKS)
        left += [f"file {path}" for path, pid in locks.items() if process and pid == process.pid]
        # A folder with something in it is in use by somebody else who came meanwhile.
        used = {_LOCKS} if locks else set()
        used |= {path for path in _RUNTIME_FOLDERS if path.exists() and any(path.iterdir())}
        left += [f"folder {path}" for path in self._absent if path.exists() and path not in used]
        return left


def _table(annotated: Seen, plain: Seen, refusal: str) -> Table:
    table = Table("", box=box.SIMPLE, pad_edge=False, show_edge=False)
    for title in (
        "annotated pod\nin gpu-operator",
        "plain pod\nin gpu-operator",
        "annotated pod\nin default",
    ):
        table.add_column(Text(title))
    third = "refused" if refusal else "running"
    rows = [
        ("container", "running", "running", third),
        (NODE, annotated.node, plain.node, "-"),
        ("a write to it", annotated.write, plain.write, "-"),
        (f"env {VARIABLE}", annotated.env, plain.env, "-"),
        (f"file {MOUNT}", annotated.mount, plain.mount, "-"),
    ]
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _check(annotated: Seen, plain: Seen, refusal: str) -> None:
    """Raise DemoError when that is not what should be seen."""
    wrong = []
    if annotated != GRANTED:
        wrong.append(f"the annotated pod in gpu-operator sees {annotated} instead of {GRANTED}")
    if plain != NOTHING:
        wrong.append(f"the plain pod sees {plain}, and it asked for nothing")
    if not refusal:
        wrong.append("the annotated pod in default was not refused")
    elif not all(part in refusal for part in (REFUSAL, DEVICE, "[[policy.rules]]")):
        wrong.append(f"the refusal names not all of {REFUSAL}, the device and the TOML that would allow it")
    if wrong:
        raise DemoError("; ".join(wrong))


def _files_with_pid(folder: Path) -> dict[Path, int]:
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError, ValueError):  # no file, just gone, or no number in it
            found[path] = int(path.read_text())
    return found


def main() -> int:
    """Run the demo; the exit status."""
    interrupts = Interrupts()
    console = Console(highlight=False)
    reason = unsuitable()
    if reason:
        print(f"the demo cannot run here: {reason}", file=sys.stderr)
        return 1
    try:
        Demo(console, interrupts).run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (DemoError, *_FAILURES) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    console.print(Text("The demo saw what it should see."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
