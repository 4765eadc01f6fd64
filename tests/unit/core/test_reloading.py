"""Reading settings again: what counts at once, what after a restart, and what is said of either."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from cdi_courier import reloading
from cdi_courier.settings import Settings, load


def read(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load([file])


BEFORE = '[nri]\nsockets = ["/run/a.sock"]\n[policy]\ndefault = "deny"\n'


@pytest.mark.parametrize(
    ("after", "changed", "restart", "install"),
    [
        (BEFORE, (), (), ()),
        (BEFORE.replace('"deny"', '"allow"'), ("policy.default",), (), ()),
        (BEFORE.replace("/run/a", "/run/b"), (), ("nri.sockets",), ()),
        (BEFORE + "[runtimes]\ncontainerd = { ignore = true }\n", ("runtimes.containerd",), (), ()),
        (BEFORE + "[oci_hook]\ntimeout = 5\n", (), (), ("oci_hook.timeout",)),
        (BEFORE + '[oci_hook]\ndevice_cgroup = "best-effort"\n', ("oci_hook.device_cgroup",), (), ()),
        (
            BEFORE.replace("/run/a", "/run/b").replace('"deny"', '"allow"'),
            ("policy.default",),
            ("nri.sockets",),
            (),
        ),
        (BEFORE + '[[policy.rules]]\naction = "deny"\n', ("policy.rules",), (), ()),
    ],
    ids=["nothing", "at once", "restart", "a runtime", "install", "compiled", "mixed", "a rule"],
)
def test_each_key_that_differs_is_named_for_what_it_needs(
    tmp_path: Path, after: str, changed: tuple[str, ...], restart: tuple[str, ...], install: tuple[str, ...]
) -> None:
    """A key counts at once, after a restart, or once install is run again; others are not named."""
    found = reloading.compare(read(tmp_path, BEFORE), read(tmp_path, after))

    assert (found.changed, found.restart, found.install) == (changed, restart, install)


def test_what_needs_a_restart_keeps_its_value_and_all_else_is_new(tmp_path: Path) -> None:
    """The settings in force are the new ones but for those keys."""
    old = read(tmp_path, BEFORE)
    new = read(tmp_path, BEFORE.replace("/run/a", "/run/b").replace('"deny"', '"allow"') + "\n")

    found = reloading.compare(old, new).settings

    assert found.nri == old.nri
    assert found.policy == new.policy


@pytest.mark.parametrize("key", reloading.RESTART)
def test_a_key_that_needs_a_restart_exists(key: str) -> None:
    """A key that is renamed in the settings is renamed here too."""
    section, _, name = key.partition(".")

    assert name in attrs.fields_dict(type(getattr(Settings(), section)))


@pytest.mark.parametrize(
    ("files", "words"),
    [((), "no file: the defaults count"), (("/etc/a.toml", "/etc/b.toml"), "/etc/a.toml, /etc/b.toml")],
    ids=["defaults", "files"],
)
def test_what_counts_now_is_one_line(files: tuple[str, ...], words: str) -> None:
    """It names the files that were read and the keys that changed."""
    change = reloading.Change(Settings(), ("policy.rules",), (), ("oci_hook.timeout",))

    text = reloading.in_words(change, files)

    assert words in text
    assert "changed: policy.rules" in text
    assert "oci_hook.timeout: counts once `cdi-courier install`" in text
    assert "\n" not in text
