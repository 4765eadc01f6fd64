"""What installing the NRI backend changes in containerd's files, and where it refuses to."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import changes, tomledit
from cdi_courier.changes import ChangeSet
from cdi_courier.errors import CourierError
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.settings import NriSettings, RuntimeSettings, Settings
from cdi_courier_nri.backend import NriBackend
from support.containerd_files import NRI, OFF, VERSION_1, Files

PLUGIN = "io.containerd.nri.v1.nri"

off = pytest.mark.parametrize("files", OFF.values(), ids=list(OFF))


def runtime(version: str = "1.7.24~ds1", kind: Any = "containerd", **facts: Any) -> Runtime:
    """A runtime with NRI off, unless the facts say otherwise."""
    facts = {"nri": "off", **facts}
    return Runtime(
        kind, kind, version, "/run/x.sock", {name: Fact(value, "a test") for name, value in facts.items()}
    )


def planned(
    main: Path, version: str = "1.7.24~ds1", settings: Settings | None = None, **facts: Any
) -> ChangeSet:
    return NriBackend().plan(runtime(version, config=str(main), **facts), settings or Settings())


def refused(*arguments: Any, **facts: Any) -> CourierError:
    with pytest.raises(CourierError) as caught:
        planned(*arguments, **facts)
    return caught.value


def tree(root: Path) -> dict[str, object]:
    """Path → mode and content, or link target."""
    return {
        str(path): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes(),
        )
        for path in root.rglob("*")
    }


def document(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_bytes().decode())


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """containerd's configuration folder."""
    return tmp_path / "etc/containerd"


# What is written


@off
def test_install_and_uninstall_leave_every_byte_as_it_was(etc: Path, tmp_path: Path, files: Files):
    """Whatever the configuration is, the folder is afterwards what it was before."""
    main = files.write(etc)
    before = tree(etc)
    plan = planned(main, files.version)
    folder = str(tmp_path / "state")
    changes.apply(plan, folder=folder)

    assert tree(etc) != before
    for manifest in changes.installed(folder):
        changes.undo(manifest, folder=folder)
    assert tree(etc) == before


@off
def test_only_the_imports_of_the_main_file_change(etc: Path, tmp_path: Path, files: Files):
    """Every other key keeps its value, a file that reads the drop-in already is left alone."""
    main = files.write(etc)
    before = document(main) if main.exists() else {}
    plan = planned(main, files.version)
    changes.apply(plan, folder=str(tmp_path / "state"))
    after = document(main)

    assert [change.path for change in plan.files][1:] == ([] if files.imported else [str(main)])
    assert after.pop("version") == before.pop("version", 2)
    old, new = before.pop("imports", []), after.pop("imports")
    assert new == (old if files.imported else [*old, f"{etc}/conf.d/50-cdi-courier-nri*.toml"])
    assert after == before


@off
def test_the_drop_in_holds_only_the_nri_table(etc: Path, files: Files):
    """It has the main file's version and enables NRI; up to 1.7 it repeats what others set in that table."""
    main = files.write(etc)
    text = planned(main, files.version).files[0].content
    assert text is not None
    drop_in = tomledit.parse(text)
    version = document(main).get("version", 2) if main.exists() else 2

    assert sorted(drop_in) == ["plugins", "version"]
    assert drop_in["version"] == version
    assert list(drop_in["plugins"]) == [PLUGIN]
    table = drop_in["plugins"][PLUGIN]
    assert table["disable"] is False
    if files.version.startswith("1.7"):
        assert {key: table[key] for key in files.kept} == files.kept
    else:
        assert table == {"disable": False}


@off
def test_installing_twice_is_installing_once(etc: Path, tmp_path: Path, files: Files):
    """Before the restart NRI is still off, and the second plan finds nothing left to write."""
    main = files.write(etc)
    folder = str(tmp_path / "state")
    first = changes.apply(planned(main, files.version), folder=folder)
    after = tree(etc)
    second = changes.apply(planned(main, files.version), folder=folder)

    assert first != ()
    assert second == ()
    assert tree(etc) == after


def test_the_drop_in_follows_the_main_file(etc: Path, tmp_path: Path):
    """Planned anew, it repeats what the main file says by then; our own drop-in counts for nothing."""
    main = OFF["nri-table"].write(etc)
    changes.apply(planned(main), folder=str(tmp_path / "state"))
    main.write_bytes(main.read_bytes().replace(b"/run/x.sock", b"/run/y.sock"))
    (change,) = planned(main).files

    assert change.content is not None
    assert tomledit.parse(change.content)["plugins"][PLUGIN]["socket_path"] == "/run/y.sock"


@pytest.mark.parametrize("version", ["1.7.0", "1.7.34+unknown", ""])
def test_a_main_file_that_is_made_is_of_version_2(etc: Path, version: str):
    """containerd 1.7 reads no newer one, and where NRI is off by default it is no newer than that."""
    etc.mkdir(parents=True)
    drop_in, main = planned(etc / "config.toml", version).files

    assert drop_in.content is not None
    assert main.content == f'version = 2\nimports = ["{etc}/conf.d/50-cdi-courier-nri*.toml"]\n'.encode()
    assert tomledit.parse(drop_in.content)["version"] == 2


def test_read_only_and_linked_files_are_edited_and_put_back(etc: Path, tmp_path: Path):
    """A main file that nobody may write, behind a symbolic link, keeps its mode and its link."""
    real = OFF["version-2"].write(tmp_path / "git").rename(tmp_path / "git/real.toml")
    real.chmod(0o444)
    etc.mkdir(parents=True)
    main = etc / "config.toml"
    main.symlink_to(real)
    before = tree(tmp_path)
    folder = str(tmp_path.parent / f"{tmp_path.name}-state")
    changes.apply(planned(main), folder=folder)

    assert main.is_symlink()
    assert (real.stat().st_mode & 0o777, document(real)["imports"]) == (
        0o444,
        [f"{etc}/conf.d/50-cdi-courier-nri*.toml"],
    )
    changes.undo(changes.installed(folder)[0], folder=folder)
    assert tree(tmp_path) == before


def test_an_import_that_was_made_goes_from_a_file_that_was_changed_since(etc: Path, tmp_path: Path):
    """Their new key stays, our import goes, and with it the line that we made."""
    main = OFF["version-2"].write(etc)
    before = main.read_bytes()
    folder = str(tmp_path / "state")
    changes.apply(planned(main), folder=folder)
    main.write_bytes(main.read_bytes() + b"# theirs\n[grpc]\nuid = 7\n")
    changes.undo(changes.installed(folder)[0], folder=folder)

    assert main.read_bytes() == before + b"# theirs\n[grpc]\nuid = 7\n"
    assert not (etc / "conf.d").exists()


# Restart and notes


def test_the_restart_command_is_the_settings_or_systemds(etc: Path):
    """[runtimes] knows better, for the kind as for the endpoint; else it is containerd's unit."""
    main = OFF["version-2"].write(etc)
    own = RuntimeSettings(restart="sv restart containerd")

    assert planned(main).restart == "systemctl restart containerd"
    for key in ("containerd", "/run/x.sock"):
        assert planned(main, settings=Settings(runtimes={key: own})).restart == "sv restart containerd"


def test_the_settings_know_the_main_file_better(etc: Path, tmp_path: Path):
    """[runtimes] config is what is edited, wherever the description looked."""
    main = OFF["version-2"].write(etc)
    settings = Settings(runtimes={"containerd": RuntimeSettings(config=str(main))})
    plan = planned(tmp_path / "elsewhere.toml", settings=settings)

    assert [change.path for change in plan.files] == [f"{etc}/conf.d/50-cdi-courier-nri.toml", str(main)]


def test_where_nri_is_on_there_is_nothing_to_do(etc: Path):
    """An empty set with a note, whatever the files say."""
    plan = planned(OFF["version-2"].write(etc), nri="on")

    assert (plan.files, plan.restart) == ((), "")
    assert plan.notes == ("containerd serves NRI already",)


@pytest.mark.parametrize("version", ["1.7.24", "2.1.9"])
def test_where_the_files_enable_nri_only_the_restart_is_missing(etc: Path, version: str):
    """No file is planned, but the command that makes what is there effective."""
    main = Files(f"version = 2\n{NRI}\ndisable = false\n").write(etc)
    plan = planned(main, version)

    assert (plan.files, plan.restart) == ((), "systemctl restart containerd")
    assert "only the restart is missing" in plan.notes[0]


def test_a_socket_that_the_settings_do_not_know_is_noted(etc: Path):
    """The daemon would wait for another one for ever."""
    main = OFF["nri-table"].write(etc)
    known = Settings(nri=NriSettings(sockets=("/run/x.sock",)))

    assert planned(main).notes == ("containerd will listen on /run/x.sock: name it in [nri] sockets",)
    assert planned(main, settings=known).notes == ()


def test_a_file_that_said_nothing_is_noted(etc: Path):
    """Who reads the plan learns that defaults apply."""
    assert "keeps containerd's defaults" in planned(OFF["none"].write(etc)).notes[0]


# Refusals: nothing is written, and the message says what to do


@pytest.mark.parametrize(
    ("version", "cure"), [("1.7.24", "version 2"), ("2.1.9", "config migrate")], ids=["1.7", "2.1"]
)
@pytest.mark.parametrize("text", [VERSION_1, f"version = 1\n{VERSION_1}"], ids=["undeclared", "declared"])
def test_a_main_file_of_version_1_is_refused(etc: Path, text: str, version: str, cure: str):
    """It is left alone, since nothing in it or imported by it enables NRI."""
    main = Files(text).write(etc)
    before = tree(etc)
    error = refused(main, version)

    assert error.code == "NRI102"
    assert cure in error.hint
    assert tree(etc) == before


@pytest.mark.parametrize(
    ("found", "code"),
    [
        pytest.param(runtime("1.6.20~ds1"), "NRI101", id="containerd-1.6"),
        pytest.param(runtime("1.6.20~ds1", nri="absent"), "NRI101", id="absent"),
        pytest.param(runtime("1.25.1", "cri-o", nri="absent"), "NRI101", id="cri-o-1.25"),
        pytest.param(runtime("1.28.1", "cri-o"), "NRI106", id="cri-o-1.28"),
        pytest.param(runtime("4.3.1", "podman", nri="absent"), "NRI101", id="podman"),
        pytest.param(runtime("24.0", "docker", nri="unknown"), "NRI101", id="docker"),
        pytest.param(runtime("1.7.24", distribution="k3s"), "NRI103", id="k3s"),
        pytest.param(
            runtime("2.1.5-k3s1", distribution="rke2", config_template="/v/c.tmpl"), "NRI103", id="rke2"
        ),
        pytest.param(runtime("1.7.24", distribution="k0s"), "NRI103", id="k0s"),
        pytest.param(runtime("1.7.24", distribution="microk8s"), "NRI103", id="microk8s"),
        pytest.param(runtime("1.7.24", config_template="/v/c.tmpl"), "NRI103", id="a-template"),
    ],
)
def test_what_files_cannot_do_is_refused_with_a_cure(found: Runtime, code: str):
    """No NRI, somebody else's files, or another backend's work: each has its code and a hint."""
    with pytest.raises(CourierError) as caught:
        NriBackend().plan(found, Settings())

    assert caught.value.code == code
    assert caught.value.hint
    assert found.get("config_template", "") in caught.value.hint


@pytest.mark.parametrize(
    ("files", "culprit"),
    [
        pytest.param(
            Files(
                'version = 2\nimports = ["{etc}/conf.d/*.toml"]\n',
                others={"conf.d/60-late.toml": f"version = 2\n{NRI}\nsocket_path = '/x'\n"},
            ),
            "conf.d/60-late.toml",
            id="a-later-table-on-1.7",
        ),
        pytest.param(
            Files(
                'version = 3\nimports = ["{etc}/conf.d/*.toml"]\n',
                version="2.1.9",
                others={"conf.d/60-late.toml": f"version = 3\n{NRI}\ndisable = true\n"},
            ),
            "conf.d/60-late.toml",
            id="a-later-table-on-2.1",
        ),
        pytest.param(
            Files(f"version = 2\n{NRI}\ndisable = true\ndisable_connections = true\n"),
            "config.toml",
            id="connections",
        ),
        pytest.param(
            Files('version = 2\ndisabled_plugins = ["io.containerd.nri.v1.nri"]\n'),
            "config.toml",
            id="disabled",
        ),
        pytest.param(
            Files(
                'version = 2\nimports = ["{etc}/more.toml"]\n',
                others={"more.toml": f'version = 2\ndisabled_plugins = ["x", "{PLUGIN}"]\n'},
            ),
            "more.toml",
            id="disabled-by-an-import",
        ),
    ],
)
def test_what_would_keep_nri_off_all_the_same_is_named(etc: Path, files: Files, culprit: str):
    """A drop-in would not help, so none is planned, and the file that decides is named."""
    error = refused(files.write(etc), files.version)

    assert error.code == "NRI104"
    assert error.fields == {"file": str(etc / culprit)}


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(Files("version = "), id="not-toml"),
        pytest.param(Files('version = "2"\n'), id="odd-version"),
        pytest.param(Files('version = 2\nimports = "x"\n'), id="odd-imports"),
        pytest.param(Files('version = 2\nimports = ["{etc}/a*"]\n', others={"a.toml": "x"}), id="odd-import"),
        pytest.param(Files('version = 2\nimports = ["{etc}"]\n'), id="a-folder"),
    ],
)
def test_files_that_cannot_be_understood_are_refused(etc: Path, files: Files):
    """What containerd itself could not read is nothing to build on."""
    assert refused(files.write(etc)).code == "NRI105"


def test_the_daemon_loads_nothing_that_edits_files():
    """What a command needs to install stays out of the process that answers the runtime."""
    script = "import sys, cdi_courier_nri.backend, cdi_courier.service; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    loaded = set(done.stdout.split())

    assert "cdi_courier_nri.backend" in loaded
    assert not loaded & {"tomlkit", "cdi_courier.tomledit", "cdi_courier.changes", "cdi_courier_nri.install"}
