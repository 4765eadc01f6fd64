"""What installing the wrapper changes in containerd's files, and where it refuses to."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import changes
from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.errors import CourierError
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.settings import AnnotationsSettings, OciHookSettings, RuntimeSettings, Settings
from cdi_courier_oci_hook import wrapping
from cdi_courier_oci_hook.backend import OciHookBackend
from support.containerd_files import HANDLED, OFF, VERSION_1, Files

CRI_2, CRI_3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
TABLE = f'plugins."{CRI_2}".containerd'
RUNC = "io.containerd.runc.v2"
PATTERNS = ["nvidia.cdi.k8s.io/*", "nvidia.cdi.k8s.io"]

files_ = pytest.mark.parametrize("files", HANDLED.values(), ids=list(HANDLED))


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """containerd's configuration folder, on a host with runc and crun."""
    for name in ("runc", "crun"):
        program = tmp_path / "sbin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr(wrapping, "_PATH", str(tmp_path / "sbin"))
    monkeypatch.setattr(changes, "FOLDER", str(tmp_path / "state"))
    return tmp_path / "etc/containerd"


def runtime(main: Path, version: str = "1.7.24~ds1", **facts: Any) -> Runtime:
    facts = {"config": str(main), **facts}
    return Runtime(
        "containerd",
        "containerd",
        version,
        "/run/x.sock",
        {name: Fact(value, "a test") for name, value in facts.items()},
    )


def settings(main: Path, **oci_hook: Any) -> Settings:
    return Settings(oci_hook=OciHookSettings(gate_dir=str(main.parents[2] / "bin"), **oci_hook))


def planned(main: Path, version: str = "1.7.24~ds1", told: Settings | None = None, **facts: Any) -> ChangeSet:
    return OciHookBackend().plan(runtime(main, version, **facts), told or settings(main))


def apply(plan: ChangeSet) -> tuple[changes.Step, ...]:
    return changes.apply(plan, folder=changes.FOLDER)


def undo() -> None:
    for manifest in changes.installed(changes.FOLDER):
        changes.undo(manifest, folder=changes.FOLDER)


def refused(*arguments: Any, **facts: Any) -> CourierError:
    with pytest.raises(CourierError) as caught:
        planned(*arguments, **facts)
    return caught.value


def tree(root: Path) -> dict[str, object]:
    """Path → mode and content."""
    return {str(p): (p.stat().st_mode, p.is_file() and p.read_bytes()) for p in root.rglob("*")}


def configuration(plan: ChangeSet) -> list[FileChange]:
    """What is changed for containerd, without the gate's own files."""
    return [change for change in plan.files if not change.held]


def table_of(change: FileChange) -> dict[str, Any]:
    """The ``containerd`` table in a planned file."""
    assert change.content is not None
    plugins = tomllib.loads(change.content.decode())["plugins"]
    found: dict[str, Any] = (plugins.get(CRI_2) or plugins[CRI_3])["containerd"]
    return found


def main_of(etc: Path, text: str, **others: str) -> Path:
    return Files(text, others={f"conf.d/{name}.toml": value for name, value in others.items()}).write(etc)


# What is written


@files_
@pytest.mark.parametrize("mode", ["default", "named"])
def test_install_and_uninstall_leave_every_byte_as_it_was(etc: Path, files: Files, mode: str):
    """Whatever the configuration is, the folder is afterwards what it was before."""
    main = files.write(etc)
    before = tree(etc)
    apply(planned(main, files.version, settings(main, handler_mode=mode)))

    assert tree(etc) != before
    undo()
    assert tree(etc) == before
    assert not (etc.parents[1] / "bin").exists()


@files_
def test_installing_twice_is_installing_once(etc: Path, files: Files):
    """A second plan is the first one, although the files have changed by then."""
    main = files.write(etc)
    first = planned(main, files.version)
    apply(first)
    second = planned(main, files.version)

    assert second.files == first.files
    assert apply(second) == ()


@files_
def test_the_handler_is_a_copy_of_the_default_one(etc: Path, files: Files):
    """It is of the same type, calls the gate, lets our annotations through, and is the default."""
    main = files.write(etc)
    plan = planned(main, files.version)
    (change, *rest) = configuration(plan)
    table = table_of(change)
    ours = table["runtimes"]["cdi-courier"]

    assert table["default_runtime_name"] == "cdi-courier"
    assert ours["runtime_type"] == RUNC
    assert ours["pod_annotations"] == PATTERNS
    assert ours["options"]["BinaryName"] == str(etc.parents[1] / "bin/cdi-courier-containerd")
    assert b"version = " in (change.content or b"")
    old = files.version.startswith("1")
    assert [c.path for c in rest] == ([] if old or files.imported else [str(main)])


def test_up_to_1_7_the_first_handler_of_a_file_brings_the_built_in_one_with_it(etc: Path):
    """Otherwise pods that were made by handler runc would have none."""
    main = main_of(etc, "version = 2\n")
    (change,) = configuration(planned(main))

    assert table_of(change)["runtimes"]["runc"] == {"runtime_type": RUNC}
    main = main_of(etc, f'version = 2\n[{TABLE}.runtimes.other]\nruntime_type = "{RUNC}"\n')
    assert refused(main).code == "HOK120"


def test_all_that_the_default_handler_says_is_copied(etc: Path, tmp_path: Path):
    """A cgroup driver, annotations and paths are the same; only the program is another."""
    crun = tmp_path / "sbin/crun"
    main = main_of(
        etc,
        f'version = 2\n[{TABLE}]\ndefault_runtime_name = "nvidia"\n'
        f'[{TABLE}.runtimes.runc]\nruntime_type = "{RUNC}"\n'
        f'[{TABLE}.runtimes.nvidia]\nruntime_type = "{RUNC}"\nprivileged_without_host_devices = true\n'
        f'base_runtime_spec = "/x.json"\npod_annotations = ["theirs/*", "nvidia.cdi.k8s.io"]\n'
        f'container_annotations = ["a"]\n'
        f'[{TABLE}.runtimes.nvidia.options]\nBinaryName = "{crun}"\nSystemdCgroup = true\nRoot = "/r"\n',
    )
    plan = planned(main)
    (change,) = configuration(plan)

    assert table_of(change)["runtimes"]["cdi-courier"] == {
        "runtime_type": RUNC,
        "privileged_without_host_devices": True,
        "base_runtime_spec": "/x.json",
        "pod_annotations": ["theirs/*", "nvidia.cdi.k8s.io", "nvidia.cdi.k8s.io/*"],
        "container_annotations": ["a"],
        "options": {
            "BinaryName": str(tmp_path / "bin/cdi-courier-containerd"),
            "SystemdCgroup": True,
            "Root": "/r",
        },
    }
    gate = next(c for c in plan.files if c.path.endswith("/cdi-courier-containerd"))
    assert str(crun).encode() in (gate.content or b"")
    assert gate.mode == 0o755


def test_since_2_0_a_default_handler_in_pieces_is_put_together(etc: Path):
    """What files say of runc is merged with what is built in; of two lists the later one counts."""
    main = Files(
        f'version = 3\nimports = ["{{etc}}/conf.d/*.toml"]\n[plugins."{CRI_3}".containerd.runtimes.runc]\n'
        'pod_annotations = ["a/*"]\nbase_runtime_spec = "/x.json"\n',
        others={
            "conf.d/1.toml": f'version = 3\n[plugins."{CRI_3}".containerd.runtimes.runc]\n'
            f'pod_annotations = ["b/*"]\n[plugins."{CRI_3}".containerd.runtimes.runc.options]\n'
            "SystemdCgroup = true\n"
        },
    ).write(etc)
    (change,) = configuration(planned(main, "2.1.9"))
    ours = table_of(change)["runtimes"]["cdi-courier"]

    assert ours["pod_annotations"] == ["b/*", *PATTERNS]
    assert ours["base_runtime_spec"] == "/x.json"
    assert (ours["runtime_type"], ours["options"]["SystemdCgroup"]) == (RUNC, True)
    assert list(table_of(change)["runtimes"]) == ["cdi-courier"]


def test_up_to_1_7_the_file_that_has_the_table_is_edited(etc: Path):
    """An imported table takes the place of the main file's, so nothing that is written there would count."""
    main = Files(
        f'version = 2\nimports = ["{{etc}}/conf.d/*.toml"]\n[{TABLE}]\ndefault_runtime_name = "other"\n',
        others={"conf.d/1.toml": f'version = 2\n[{TABLE}]\ndefault_runtime_name = "runc"\n'},
    ).write(etc)
    (change,) = configuration(planned(main))

    assert change.path == str(etc / "conf.d/1.toml")


def test_a_change_of_others_stays_when_ours_goes(etc: Path):
    """They may edit the file that the handler is in; uninstalling takes out only what is ours."""
    main = OFF["defaults-written-out"].write(etc)
    before = main.read_bytes()
    apply(planned(main))
    theirs = main.read_bytes().replace(b'sandbox_image = "', b'sandbox_image = "x', 1) + b"\n[theirs]\n"
    main.write_bytes(theirs)
    apply(planned(main))
    assert b"cdi-courier" in main.read_bytes()
    undo()

    expected = tomllib.loads(before.decode().replace('sandbox_image = "', 'sandbox_image = "x', 1))
    assert tomllib.loads(main.read_text()) == {**expected, "theirs": {}}


def test_going_from_named_to_default_and_back_changes_only_the_default(etc: Path):
    """Each plan starts from the files without the one before."""
    main = HANDLED["version-2"].write(etc)
    default = planned(main).files
    apply(planned(main))
    apply(planned(main, told=settings(main, handler_mode="named")))

    assert 'default_runtime_name = "crun"' in main.read_text()
    assert "runtimes.cdi-courier" in main.read_text()
    apply(planned(main))
    assert planned(main).files == default
    undo()
    assert "cdi-courier" not in main.read_text()


def test_other_domains_and_dialects_are_let_through(etc: Path):
    """A star of containerd's does not cross a slash, so each domain has a pattern of its own."""
    main = HANDLED["version-2"].write(etc)
    told = settings(main)
    asked = AnnotationsSettings(dialects=("nvidia", "device-injector"), domains=("a.example", "b.example"))
    plan = planned(main, told=Settings(oci_hook=told.oci_hook, annotations=asked))
    patterns = table_of(configuration(plan)[0])["runtimes"]["cdi-courier"]["pod_annotations"]

    assert patterns[:4] == ["a.example/*", "a.example", "b.example/*", "b.example"]
    assert {"cdi-devices.noderesource.dev/*", "cdi-devices.nri.io/*", "cdi-devices.nri.io"} <= set(patterns)


# What a person is told


def test_a_named_handler_is_told_with_its_runtime_class(etc: Path):
    """The default stays; pods need the manifest that is printed."""
    main = main_of(etc, "version = 2\n")
    plan = planned(main, told=settings(main, handler_mode="named", handler="gpu"))
    (change,) = configuration(plan)

    assert "default_runtime_name" not in table_of(change)
    assert set(table_of(change)["runtimes"]) == {"runc", "gpu"}
    assert "metadata:\n  name: gpu\nhandler: gpu" in plan.notes[-1]


def test_what_else_changes_with_the_restart_is_told(etc: Path):
    """The daemon may run on files that have been changed since."""
    main = main_of(etc, "version = 2\n")

    assert any("something else changes" in note for note in planned(main, default_handler="crun").notes)
    assert not any("something else" in note for note in planned(main, default_handler="runc").notes)


def test_the_restart_is_the_settings_and_none_where_all_is_in_force(etc: Path):
    """Nothing is left to do where the running daemon calls the gate and every file is as planned."""
    main = main_of(etc, "version = 2\n")
    gate = str(etc.parents[1] / "bin/cdi-courier-containerd")
    serving = {
        "handlers": {"cdi-courier": {"type": RUNC, "path": gate}},
        "default_handler": "cdi-courier",
        "pod_annotations": PATTERNS,
    }
    told = Settings(
        oci_hook=settings(main).oci_hook, runtimes={"containerd": RuntimeSettings(restart="sv restart c")}
    )

    assert planned(main).restart == "systemctl restart containerd"
    assert planned(main, told=told).restart == "sv restart c"
    assert planned(main, **serving).restart != ""
    apply(planned(main))
    assert planned(main, **serving).restart == ""
    assert planned(main, **{**serving, "pod_annotations": ["other/*"]}).restart != ""
    os.chmod(gate, 0o644)
    assert planned(main, **serving).restart != ""


# Refusals: nothing is written, and the message says what to do


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        pytest.param(VERSION_1, "HOK111", "version 1", id="version-1"),
        pytest.param("version = 2\n[", "HOK112", "not TOML", id="not-toml"),
        pytest.param(f"version = 2\n[{TABLE}]\nruntimes = 1\n", "HOK112", "no tables", id="odd-handlers"),
        pytest.param(
            f"version = 2\n[{TABLE}]\ndefault_runtime_name = 1\n", "HOK112", "no string", id="odd-default"
        ),
        *(
            pytest.param(
                f'version = 2\n[{TABLE}.runtimes.runc]\nruntime_type = "{RUNC}"\n{text}\n',
                "HOK112",
                text.partition(" ")[0],
                id=f"odd-{text}",
            )
            for text in (
                'pod_annotations = "x"',
                "pod_annotations = [1]",
                "pod_annotations = [[]]",
                "options = 1",
                "options = { BinaryName = 1 }",
            )
        ),
        pytest.param(
            f'version = 2\n[{TABLE}.runtimes.runc]\nruntime_type = "io.containerd.runsc.v1"\n',
            "HOK113",
            "io.containerd.runsc.v1",
            id="gvisor",
        ),
        pytest.param(
            f"version = 2\n[{TABLE}.runtimes.runc.options]\nSystemdCgroup = true\n",
            "HOK113",
            "",
            id="no-type",
        ),
        pytest.param(
            f'version = 2\n[{TABLE}.runtimes.runc]\nruntime_type = "{RUNC}"\n'
            f'[{TABLE}.runtimes.runc.options]\nBinaryName = "/nonexistent/runc"\n',
            "HOK114",
            "/nonexistent/runc",
            id="no-program",
        ),
        pytest.param(
            f'version = 2\n[{TABLE}.runtimes.runc]\nruntime_type = "{RUNC}"\n'
            f'[{TABLE}.runtimes.runc.options]\nBinaryName = "./runc"\n',
            "HOK114",
            "absolute",
            id="a-relative-program",
        ),
        pytest.param(
            f'version = 2\n[{TABLE}.runtimes.runc]\nruntime_type = "{RUNC}"\n'
            f'[{TABLE}.runtimes.cdi-courier]\nruntime_type = "{RUNC}"\n',
            "HOK115",
            "cdi-courier",
            id="taken",
        ),
        pytest.param(
            'version = 2\ndisabled_plugins = ["cri"]\n', "HOK116", "no pods", id="as-dockers-package"
        ),
        pytest.param(
            f'version = 2\n[{TABLE}.default_runtime]\nruntime_type = "{RUNC}"\n',
            "HOK116",
            "default_runtime",
            id="the-old-way",
        ),
        pytest.param(
            f'version = 2\n[{TABLE}]\ndefault_runtime_name = "gone"\n', "HOK120", "gone", id="no-default"
        ),
        pytest.param(OFF["inline-tables"].main, "CHG006", "runtimes.cdi-courier", id="inline-tables"),
    ],
)
def test_what_files_cannot_do_is_refused_with_a_cure(etc: Path, text: str, code: str, word: str):
    """The folder is as before, and the message says what, where and what to do."""
    main = main_of(etc, text)
    before = tree(etc)
    error = refused(main)

    assert error.code == code
    assert word in f"{error.message} {error.hint}"
    assert error.hint
    assert tree(etc) == before


def test_a_file_that_is_read_later_and_overrules_is_named(etc: Path):
    """Since 2.0 the last default counts, wherever it stands."""
    main = Files(
        'version = 3\nimports = ["{etc}/conf.d/*.toml"]\n',
        others={
            "conf.d/99.toml": f'version = 3\n[plugins."{CRI_3}".containerd]\ndefault_runtime_name = "runc"\n'
        },
    ).write(etc)
    error = refused(main, "2.1.9")

    assert error.code == "HOK116"
    assert error.fields == {"file": str(etc / "conf.d/99.toml")}
    assert configuration(planned(main, "2.1.9", settings(main, handler_mode="named")))


@pytest.mark.parametrize("distribution", ["k3s", "rke2", "k0s", "microk8s"])
def test_generated_files_are_left_to_who_generates_them(etc: Path, distribution: str):
    """What is written there is gone with the next start, and no gate is named that would not be there."""
    error = refused(main_of(etc, "version = 2\n"), distribution=distribution)

    assert error.code == "HOK110"
    assert "--backend nri" in error.hint
    assert "cdi-courier-containerd" not in str(error)


def test_a_gate_is_never_put_in_front_of_a_gate(etc: Path):
    """A handler that names one already is seen through."""
    main = main_of(etc, "version = 2\n")
    apply(planned(main))
    gate = etc.parents[1] / "bin/cdi-courier-containerd"
    main.write_text(
        f'version = 2\n[{TABLE}.runtimes.runc]\nruntime_type = "{RUNC}"\n'
        f'[{TABLE}.runtimes.runc.options]\nBinaryName = "{gate}"\n'
    )

    assert wrapping.real_runtime(runtime(main), str(gate)) == str(etc.parents[1] / "sbin/runc")


def test_each_of_several_containerds_has_a_gate_of_its_own(etc: Path):
    """What is baked into one need not be right for another."""
    main = main_of(etc, "version = 2\n")
    second = Runtime(
        "/run/k.sock", "containerd", "1.7.24", "/run/k.sock", {"config": Fact(str(main), "a test")}
    )

    assert wrapping.path_of(second, settings(main)) != wrapping.path_of(runtime(main), settings(main))
