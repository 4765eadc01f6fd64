"""What installing the precreate hook writes, when it counts as installed, and when it cannot be."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier.changes import ChangeSet
from cdi_courier.errors import CourierError
from cdi_courier.host import podman as host_podman
from cdi_courier.host.answers import Findings
from cdi_courier.host.files import Root
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.settings import AnnotationsSettings, OciHookSettings, Settings
from cdi_courier_oci_hook import installation, podman
from cdi_courier_oci_hook.backend import cdi_courier_backend

VENDOR = "/usr/share/containers/oci/hooks.d"
SOURCE = "Podman's default"


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's folders, below a temporary one."""
    monkeypatch.setattr(podman, "HOOKS_DIR", f"{tmp_path}/hooks.d")
    monkeypatch.setattr(podman, "HOOK", f"{tmp_path}/hooks.d/cdi-courier.json")
    monkeypatch.setattr(podman, "DROP_IN", f"{tmp_path}/containers.conf.d/90-cdi-courier.conf")
    monkeypatch.setattr(host_podman, "DEFAULT_CONFIG", f"{tmp_path}/containers.conf")
    return tmp_path


def host(dirs: list[str] | None = None, source: str = SOURCE, **facts: Any) -> Runtime:
    """A Podman that reads these hooks directories (default: the vendor's), by this source."""
    found = {name: Fact(value, "podman info") for name, value in facts.items()}
    found["hooks_dirs"] = Fact([VENDOR] if dirs is None else dirs, source)
    return Runtime("podman", "podman", "4.3.1", facts=found)


def plan(runtime: Runtime, settings: Settings | None = None) -> ChangeSet:
    return cdi_courier_backend().plan(runtime, settings or Settings())


def contents(planned: ChangeSet) -> tuple[dict[str, Any], list[str]]:
    """The hook's JSON and the drop-in's list."""
    hook, drop_in = planned.files
    assert (hook.path, drop_in.path) == (podman.HOOK, podman.DROP_IN)
    assert hook.content is not None
    assert drop_in.content is not None
    return json.loads(hook.content), tomllib.loads(drop_in.content.decode())["engine"]["hooks_dir"]


def write(planned: ChangeSet) -> None:
    for change in planned.files:
        Path(change.path).parent.mkdir(parents=True, exist_ok=True)
        Path(change.path).write_bytes(change.content or b"")


def test_the_hook_is_what_podman_takes(private: Path) -> None:
    """Schema 1.0.0 with all that Podman leaves to it: the program, an environment, a timeout, the stage."""
    settings = attrs.evolve(Settings(), oci_hook=OciHookSettings(timeout=7))

    hook, _ = contents(plan(host(), settings))

    assert (hook["version"], hook["stages"]) == ("1.0.0", ["precreate"])
    assert hook["hook"]["timeout"] == 7
    assert os.path.isabs(hook["hook"]["path"])
    assert hook["hook"]["path"] == installation.bare_interpreter()
    assert hook["hook"]["args"][:4] == [hook["hook"]["path"], "-I", "-S", "-c"]
    assert "LC_ALL=C.UTF-8" in hook["hook"]["env"]
    assert set(hook["when"]) == {"annotations"}


def test_the_list_that_was_in_force_is_kept_and_ours_added() -> None:
    """Podman's later lists replace earlier ones, so what was in force is written again."""
    _, dirs = contents(plan(host([VENDOR, "/opt/hooks.d", VENDOR])))

    assert dirs == [VENDOR, "/opt/hooks.d", podman.HOOKS_DIR]


def test_installing_again_changes_nothing() -> None:
    """With the drop-in in force, the plan is the same to the byte."""
    first = plan(host())
    write(first)

    again = plan(host([VENDOR, podman.HOOKS_DIR], podman.DROP_IN))

    assert [change.content for change in again.files] == [change.content for change in first.files]


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("nvidia.cdi.k8s.io", True),
        ("nvidia.cdi.k8s.io/pod", True),
        ("x.org", True),
        ("nvidia.cdi.k8s.io/container.c", False),
        ("nvidia.cdi.k8s.io/pods", False),
        ("a-nvidia.cdi.k8s.io", False),
        ("nvidiaXcdi.k8s.io", False),
        ("cdi-devices.noderesource.dev", False),
    ],
)
def test_the_hook_is_called_for_the_keys_that_can_ask_and_no_others(key: str, matches: bool) -> None:
    """The expression is anchored and its dots are dots; keys that name the container cannot be answered."""
    settings = attrs.evolve(
        Settings(), annotations=AnnotationsSettings(domains=("nvidia.cdi.k8s.io", "x.org"))
    )

    hook, _ = contents(plan(host(), settings))

    ((pattern, value),) = hook["when"]["annotations"].items()
    assert bool(re.search(pattern, key)) is matches
    assert re.search(value, "")


def test_another_dialect_s_keys_call_the_hook_too() -> None:
    """Whatever is configured."""
    settings = attrs.evolve(Settings(), annotations=AnnotationsSettings(dialects=("device-injector",)))

    hook, _ = contents(plan(host(), settings))

    (pattern,) = hook["when"]["annotations"]
    assert re.search(pattern, "cdi-devices.noderesource.dev/pod")
    assert not re.search(pattern, "nvidia.cdi.k8s.io")


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ((), "/etc/cdi-courier/"),
        (("/etc/cdi-courier/config.toml", "/etc/cdi-courier/conf.d/a.toml"), "/etc/cdi-courier/"),
        (("/srv/own.toml",), "/srv/own.toml"),
    ],
    ids=["none", "system", "own-file"],
)
def test_the_hook_reads_the_settings_that_installed_it(files: tuple[str, ...], place: str) -> None:
    """The folder, so that files that come later count; or the one file of ``--config``."""
    hook, _ = contents(plan(host(), attrs.evolve(Settings(), files=files)))

    assert f"settings={place!r}" in hook["hook"]["args"][4]


@pytest.mark.parametrize(
    ("log", "said"), [("journal", "journalctl -t cdi-courier"), ("/var/log/c", "/var/log/c")]
)
def test_a_refusal_by_podman_says_where_the_cause_is(log: str, said: str) -> None:
    """Podman prints the hook's arguments and nothing else of it."""
    hook, _ = contents(plan(host(), attrs.evolve(Settings(), oci_hook=OciHookSettings(log=log))))

    assert hook["hook"]["args"][-1].endswith(said)


def test_it_is_ready_once_the_hook_and_the_list_are_in_place() -> None:
    """Either alone is not enough: a hook that is missing is silently not called."""
    backend = cdi_courier_backend()
    needs = [backend.offer(host(), Settings()).needs]
    needs.append(backend.offer(host([VENDOR, podman.HOOKS_DIR]), Settings()).needs)
    write(plan(host()))
    needs.append(backend.offer(host(), Settings()).needs)

    needs.append(backend.offer(host([VENDOR, podman.HOOKS_DIR]), Settings()).needs)

    assert needs == ["install", "install", "install", "nothing"]


def test_nothing_needs_a_restart() -> None:
    """Every Podman command reads its files anew."""
    assert plan(host()).restart == ""


def later(private: Path) -> str:
    return f"{private}/containers.conf.d/95-other.conf"


def test_a_later_file_that_replaces_the_list_is_named(private: Path) -> None:
    """Before anything is written, and also if it came after the installation."""
    with pytest.raises(CourierError, match=r"HOK102.*95-other"):
        plan(host(["/opt/hooks.d"], later(private)))

    write(plan(host()))
    with pytest.raises(CourierError, match=r"HOK102.*/srv/containers\.conf"):
        plan(host(["/opt/hooks.d"], "/srv/containers.conf"))


def test_a_later_file_that_names_our_folder_is_no_obstacle(private: Path) -> None:
    """Then Podman reads it."""
    assert plan(host([podman.HOOKS_DIR], later(private))).files


def test_an_earlier_file_is_no_obstacle(private: Path) -> None:
    """It is what the drop-in repeats."""
    _, dirs = contents(plan(host(["/opt/hooks.d"], f"{private}/containers.conf.d/10-other.conf")))

    assert dirs == ["/opt/hooks.d", podman.HOOKS_DIR]


@pytest.mark.parametrize("where", ["containers.conf", "containers.conf.d/10-other.conf"])
@pytest.mark.parametrize("append", ["", ", {append=true}"], ids=["replaced", "appended"])
def test_installing_again_follows_a_list_that_has_changed_elsewhere(
    private: Path, where: str, append: str
) -> None:
    """What is in force by then is our own file, which repeats the list of before."""
    (private / "containers.conf.d").mkdir()

    def installed() -> list[str]:
        findings = Findings()
        host_podman.learn_from_files(Root(), "", "", findings)
        planned = plan(Runtime("podman", "podman", "4.3.1", facts=findings.facts))
        write(planned)
        return contents(planned)[1]

    (private / where).write_text(f'[engine]\nhooks_dir = ["/old"{append}]\n')
    before = installed()
    (private / where).write_text(f'[engine]\nhooks_dir = ["/new"{append}]\n')

    assert before[-2:] == ["/old", podman.HOOKS_DIR]
    assert installed()[-2:] == ["/new", podman.HOOKS_DIR]
    assert "/old" not in installed()


def test_a_podman_whose_files_cannot_be_read_is_not_touched() -> None:
    """The list that would have to be repeated is not known."""
    runtime = Runtime("podman", "podman", "4.3.1", problems=("HST105: containers.conf is not TOML",))

    with pytest.raises(CourierError, match=r"HOK101.*not TOML"):
        plan(runtime)


def test_a_rootless_user_is_told_to_install_as_root() -> None:
    """One installation serves all users."""
    with pytest.raises(CourierError, match=r"HOK103"):
        plan(host(rootless=True))
