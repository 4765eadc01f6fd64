"""A registry is a function of the file system: its past does not show."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from cdi_courier.cdi.registry import Registry
from cdi_courier.cdi.snapshot import Snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_KINDS = ("v.com/c", "v.com/e")
_FILES = ("low/a.yaml", "low/b.json", "high/a.yaml", "high/c.yaml", "aside/x")


def _text(kind: str, value: str) -> str:
    return f"cdiVersion: 0.5.0\nkind: {kind}\ndevices: [{{name: d, containerEdits: {{env: [A={value}]}}}}]\n"


_file = st.sampled_from(_FILES)
_operations = st.one_of(
    st.tuples(st.just("write"), _file, st.builds(_text, st.sampled_from(_KINDS), st.sampled_from("12"))),
    st.tuples(st.just("write"), _file, st.sampled_from(["", "{", "null"])),
    st.tuples(st.just("move"), _file, _file),
    st.tuples(st.just("link"), _file, _file),
    st.tuples(st.just("symlink"), _file, _file),
    st.tuples(st.just("delete"), _file, st.none()),
    st.tuples(st.just("mode"), _file, st.sampled_from([0o644, 0o666])),
    st.tuples(st.just("directory"), st.sampled_from(["low", "high"]), st.sampled_from(["", "move", "file"])),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_operations, max_size=12))
def test_a_registry_equals_a_fresh_one_after_any_sequence_of_operations(
    operations: list[tuple[str, str, Any]],
) -> None:
    """Whatever happens to files and directories, asked after each step, old and new registry agree."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("low", "high", "aside"):
            (root / name).mkdir()
        dirs = [str(root / "low"), str(root / "high")]
        registry = Registry(dirs)
        for operation in operations:
            _operate(root, *operation)

            assert _summary(registry.snapshot()) == _summary(Registry(dirs).snapshot())


def _operate(root: Path, what: str, where: str, argument: Any) -> None:
    path = root / where
    try:
        if what == "write":
            path.write_text(argument)
        elif what == "move":
            path.rename(root / argument)
        elif what == "link":
            (root / argument).hardlink_to(path)
        elif what == "symlink":
            (root / argument).symlink_to(path)
        elif what == "delete":
            path.unlink()
        elif what == "mode":
            path.chmod(argument)
        elif path.is_dir():
            shutil.rmtree(path) if argument != "move" else path.rename(
                root / f"old-{len(list(root.iterdir()))}"
            )
            path.touch() if argument == "file" else None
        else:
            path.unlink(missing_ok=True)
            path.mkdir()
    except OSError:
        pass  # the operation does not fit the state; nothing happened, which is a state as well


def _summary(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "devices": {name: (entry.path, entry.device) for name, entry in snapshot.devices.items()},
        "specs": [(file.path, file.priority, file.spec) for file in snapshot.specs],
        "errors": {path: [str(error) for error in errors] for path, errors in snapshot.errors.items()},
        "dir_errors": {path: str(error) for path, error in snapshot.dir_errors.items()},
        "conflicts": dict(snapshot.conflicts),
        "blocked": {name: str(error) for name, error in snapshot.blocked.items()},
        "found": snapshot.found,
    }
