"""The packages' shell: what dpkg and rpm call it for, and that no build goes on with half of its input."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.needs import needs_root

ROOT = Path(__file__).parents[3]
PACKAGING = ROOT / "packaging"
KEPT = (PACKAGING / "kept.sh").read_text()
SHELLS = [
    words
    for words in (["/bin/dash"], ["/bin/bash", "--posix"], ["/bin/busybox", "sh"])
    if os.path.exists(words[0])
]
SPEC = (PACKAGING / "rpm/cdi-courier.spec").read_text()
SCRIPTS = [
    *PACKAGING.glob("**/*.sh"),
    *PACKAGING.glob("deb/debian/*.p*inst"),
    *PACKAGING.glob("deb/debian/*.p*rm"),
    *(ROOT / "tools").glob("*.sh"),
]
TRIGGER = "dpkg-trigger --no-await cdi-courier-backends"
RESTART = "deb-systemd-invoke try-restart cdi-courier.service"
STOP = "deb-systemd-invoke stop cdi-courier-refresh.service"
UNITS = ("cdi-courier.service", "cdi-courier-refresh.path", "cdi-courier-refresh.timer")
GENERATED = "# Made by cdi-courier generate nvidia\n"

each_shell = pytest.mark.parametrize("shell", SHELLS, ids=lambda words: os.path.basename(words[0]))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
@each_shell
def test_every_shell_can_read_every_script(shell: list[str], path: Path) -> None:
    """Debian's sh is dash, Fedora's is bash, and a container's may be busybox's."""
    done = subprocess.run([*shell, "-n", path], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


class Host:
    """A host below a folder, on which packages' scripts run. spec: what the refresh service has written."""

    def __init__(self, root: Path, shell: list[str]) -> None:
        self.root = root
        self.shell = shell
        self.state, self.runtime = root / "var/lib/cdi-courier", root / "run/cdi-courier"
        self.spec = root / "run/cdi/management.nvidia.com-gpu.yaml"
        for folder in (self.state / "bin", self.runtime, self.spec.parent, root / "run/systemd/system"):
            folder.mkdir(parents=True)
        (self.state / "bin/cdi-courier-containerd").write_text("#!/bin/sh\n")
        self.spec.write_text(GENERATED)
        self.said = root / "said"
        self.words = ""
        self.stub("deb-systemd-invoke")
        self.stub("dpkg-trigger")

    def stub(self, name: str, status: int = 0) -> None:
        """A program that notes how it was called, and ends so."""
        path = self.root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.said}\nexit {status}\n')
        path.chmod(0o755)

    def run(self, script: str, *argv: str) -> list[str]:
        """What the script calls, which has to succeed."""
        for folder in ("/run/", "/var/lib/"):
            script = script.replace(folder, f"{self.root}{folder}")
        assert len(re.findall("/cdi-courier", script)) == len(
            re.findall(f"{self.root}\\S*/cdi-courier", script)
        )
        self.said.write_text("")
        done = subprocess.run(
            [*self.shell, "-c", script, "script", *argv],
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        self.words = done.stdout
        return self.said.read_text().splitlines()

    def left(self) -> set[str]:
        """What of ours is still there."""
        places = {"state": self.state, "runtime": self.runtime, "spec": self.spec}
        return {name for name, path in places.items() if path.exists()}


@pytest.fixture(params=SHELLS, ids=lambda words: os.path.basename(words[0]))
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path, request.param)


def maintainer_script(name: str) -> str:
    text = (PACKAGING / f"deb/debian/cdi-courier.{name}").read_text()
    return text.replace("#KEPT#", KEPT).replace("#DEBHELPER#", "")


@pytest.mark.parametrize("status", [0, 1], ids=["systemd can", "systemd cannot"])
@pytest.mark.parametrize(
    ("name", "arguments", "calls"),
    [
        ("postinst", ["configure", ""], []),
        ("postinst", ["configure", "0.0.9"], [TRIGGER]),
        ("postinst", ["triggered", "cdi-courier-backends"], [RESTART]),
        ("postinst", ["abort-upgrade", "0.2.0"], []),
        ("postinst", ["abort-remove"], []),
        ("postinst", ["abort-deconfigure", "in-favour", "x", "1"], []),
        ("prerm", ["remove"], [STOP]),
        ("prerm", ["upgrade", "0.2.0"], []),
        ("prerm", ["failed-upgrade", "0.0.9"], []),
        ("prerm", ["deconfigure", "in-favour", "x", "1"], []),
        ("postrm", ["upgrade", "0.2.0"], []),
        ("postrm", ["failed-upgrade", "0.0.9"], []),
        ("postrm", ["abort-install"], []),
        ("postrm", ["abort-upgrade", "0.0.9"], []),
        ("postrm", ["disappear", "x", "1"], []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_dpkg_may_call_a_script_for_all_that_it_calls_them_for(
    host: Host, name: str, arguments: list[str], calls: list[str], status: int
) -> None:
    """An upgrade restarts by the trigger alone, nothing but a removal removes, and twice is once."""
    host.stub("deb-systemd-invoke", status)

    for _ in range(2):
        assert host.run(maintainer_script(name), *arguments) == calls
        assert host.left() == {"state", "runtime", "spec"}


@pytest.mark.parametrize("words", ["remove", "purge"])
def test_removing_leaves_nothing_that_nobody_needs(host: Host, words: str) -> None:
    """A purge follows a removal, and finds nothing more to do; nothing refreshes a spec that would stay."""
    for argument in (words, words, "purge"):
        host.run(maintainer_script("postrm"), argument)
        assert host.left() == set()
    assert not host.spec.parent.exists()


@pytest.mark.parametrize("argument", ["remove", "purge"])
def test_what_somebody_else_wrote_stays(host: Host, argument: str) -> None:
    """A spec of the same name without our first line, and the folder with it."""
    host.spec.write_text("cdiVersion: 0.5.0\n")
    host.run(maintainer_script("postrm"), argument)

    assert host.left() == {"spec"}


@pytest.mark.parametrize("argument", ["remove", "purge"])
def test_what_is_installed_into_a_runtime_stays(host: Host, argument: str) -> None:
    """Its manifest says how to put it back, and containers may need the wrapper."""
    (host.state / "changes").mkdir()
    (host.state / "changes/oci_hook--containerd.json").write_text("{}")
    host.run(maintainer_script("postrm"), argument)

    assert host.left() == {"state", "runtime"}


@pytest.mark.parametrize("file", ["options.json", "runtime"])
def test_a_shim_somewhere_else_keeps_its_wrapper(host: Host, file: str) -> None:
    """The state folder of a containerd may be any, and its mounts where nobody sees them."""
    bundle = host.root / "srv/io.containerd.runtime.v2.task/default/abc"
    bundle.mkdir(parents=True)
    (bundle / file).write_text(f"{host.state}/bin/cdi-courier-containerd")
    with subprocess.Popen(["cat"], cwd=bundle, stdin=subprocess.PIPE):
        host.run(maintainer_script("postrm"), "remove")

        assert host.state.exists()
        assert "used by container abc" in host.words
    host.run(maintainer_script("postrm"), "remove")

    assert not host.state.exists()


@needs_root
def test_another_user_cannot_keep_a_wrapper(host: Host) -> None:
    """Unless root's, neither a folder that looks like a shim's nor an argument that names it counts."""
    bundle = host.root / "srv/io.containerd.runtime.v2.task/default/abc"
    bundle.mkdir(parents=True)
    (bundle / "runtime").write_text(f"{host.state}/bin/cdi-courier-containerd")
    os.chown(bundle.parents[1], 65534, 65534)
    argv = ["/bin/sh", "-c", "read -r _; :", "x", f"{host.state}/bin/cdi-courier-containerd"]
    with (
        subprocess.Popen(["cat"], cwd=bundle, stdin=subprocess.PIPE),
        subprocess.Popen(argv, user=65534, stdin=subprocess.PIPE),
    ):
        host.run(maintainer_script("postrm"), "remove")

    assert not host.state.exists()


@pytest.mark.parametrize(
    ("left", "kept"), [(0, set()), (1, {"state", "runtime", "spec"})], ids=["erase", "upgrade"]
)
def test_rpm_removes_only_what_is_removed_for_good(host: Host, left: int, kept: set[str]) -> None:
    """An upgrade runs the old package's script with the number of packages that stay."""
    (added,) = re.findall(r"^cat >>removed\.sh <<'END'\n(.*?)\nEND$", SPEC, re.DOTALL | re.MULTILINE)
    for _ in range(2):
        host.run(f"{KEPT}\n{added}", str(left))

        assert host.left() == kept


def scriptlet(name: str) -> str:
    """What the spec has below this section's name, without the macros of the distribution."""
    (text,) = re.findall(rf"^%{name}(?: .*)?\n((?:.*\n)*?)(?=\n%)", SPEC, re.MULTILINE)
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("%"))


@pytest.mark.parametrize(
    ("name", "argument", "status", "calls"),
    [
        (
            "post",
            "1",
            0,
            [f"{word} {unit}" for unit in UNITS for word in ("is-enabled --quiet", "--no-block start")],
        ),
        ("post", "1", 1, [f"is-enabled --quiet {unit}" for unit in UNITS]),
        ("post", "2", 0, []),
        ("transfiletriggerin", "", 0, ["try-restart cdi-courier.service"]),
        ("transfiletriggerin", "", 1, ["try-restart cdi-courier.service"]),
        ("transfiletriggerpostun", "", 1, ["try-restart cdi-courier.service"]),
    ],
    ids=["install", "install, disabled", "upgrade", "a backend came", "and nothing runs", "a backend went"],
)
def test_rpm_starts_what_is_enabled_and_only_when_it_is_new(
    host: Host, name: str, argument: str, status: int, calls: list[str]
) -> None:
    """A preset or an administrator may have said no; nothing that systemd says fails the transaction."""
    host.stub("systemctl", status)

    assert host.run(scriptlet(name), argument) == [f"systemctl {call}" for call in calls]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what is packaged, committed."""
    root = tmp_path / "a checkout"
    for folder in ("core", "backends", "docs", "packaging", "tools"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").write_text(folder)
    for name in ("LICENSE", "README.md", "CHANGELOG.md", ".gitignore"):
        (root / name).write_text("ignored\n")
    (root / "packaging/tree.sh").write_bytes((PACKAGING / "tree.sh").read_bytes())
    environment = {"GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ["PATH"]}
    for words in ("init -q", "add -A", "-c user.name=x -c user.email=x@x commit -q -m x"):
        subprocess.run(["git", *words.split()], cwd=root, env=environment, check=True)
    return root


@pytest.fixture
def copy(checkout: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs tree.sh in the checkout's parent."""

    def run(target: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", checkout / "packaging/tree.sh", target],
            cwd=checkout.parent,
            env={"PATH": path, "TMPDIR": str(checkout.parent)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_what_is_packaged_is_what_git_would_take(
    checkout: Path, copy: Callable[..., subprocess.CompletedProcess[str]], absolute: bool
) -> None:
    """With new files, without ignored and deleted ones, in the caller's folder however it is named."""
    (checkout / "docs/new name").write_text("new")
    (checkout / "docs/ignored").write_text("x")
    (checkout / "core/file").unlink()
    target = checkout.parent / "new folder"
    done = copy(str(target) if absolute else "new folder")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(int((target / "docs/file").stat().st_mtime))
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == {
        "backends/file", "docs/file", "docs/new name", "packaging/file", "packaging/tree.sh", "tools/file",
        "LICENSE", "README.md", "CHANGELOG.md",
    }  # fmt: skip
    assert {path.name for path in checkout.parent.iterdir()} == {checkout.name, target.name}


@pytest.mark.parametrize("program", ["git", "tar"])
def test_half_a_copy_ends_the_build(
    checkout: Path, copy: Callable[..., subprocess.CompletedProcess[str]], program: str
) -> None:
    """Nothing is packaged without what could not be read, and nothing is left behind."""
    stub = checkout.parent / "bin" / program
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\n/usr/bin/{program} "$@"\ncase $* in *ls-files*|*--create*) exit 2 ;; esac\n')
    stub.chmod(0o755)
    done = copy("target", f"{stub.parent}:/usr/bin:/bin")

    assert done.returncode != 0
    assert not done.stdout
    assert {path.name for path in checkout.parent.iterdir()} <= {checkout.name, "bin", "target"}
