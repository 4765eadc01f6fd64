"""Debian packages of any suite, unpacked into a cache folder without being installed.

The archive's address and keys are the machine's own: they are read from its apt sources when needed, and apt
verifies every download against its signed index. apt gets a throw-away state below the cache, one a suite, so
nothing of the machine's apt changes. What was once fetched is used again without the network.

It must not know what the packages are for.

CACHE/
  pkg/NAME_VERSION_ARCH/    the unpacked package
  answers/SUITE/NAME        the folder's name that this suite's NAME was answered with
  apt/SUITE/                apt's state for this suite
  patched/                  packages made to run on this machine (see `runnable`)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

CACHE_VARIABLE = "CDI_COURIER_TEST_CACHE"
REFRESH_VARIABLE = "CDI_COURIER_TEST_REFRESH"

_REPOSITORY = Path(__file__).resolve().parents[2]
_DEBIAN_SUITES = {"oldstable", "stable", "testing", "unstable", "bookworm", "trixie", "forky", "duke", "sid"}
_APT_TIMEOUT = 300.0
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")

# `#clear` drops the machine's own hooks (they wake PackageKit and the like); its proxies and retries stay.
_APT_CONF = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::IndexTargets::deb::DEP-11;
#clear Acquire::IndexTargets::deb::Contents-deb;
Dir::Etc::sourcelist "{state}/debian.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::lists "{state}/lists";
Dir::Cache "{state}/cache";
Dir::Cache::archives "{state}/cache/archives";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
APT::Get::AllowUnauthenticated "false";
APT::Update::Error-Mode "any";
APT::Default-Release "";
APT::Sandbox::User "{user}";
"""


class PackageError(Exception):
    """A package cannot be had; the text says why and what to do."""


@dataclass(frozen=True)
class Source:
    """One archive of the machine's apt. signed_by: as in deb822, may be a whole key; or empty."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str

    def stanza(self, suite: str) -> str:
        """This archive's deb822 stanza for another suite."""
        lines = ["Types: deb", f"URIs: {' '.join(self.uris)}", f"Suites: {suite}", "Components: main"]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        return "\n".join(lines) + "\n"


class Packages:
    """The cache and what fills it.

    cache: folder, created when missing. progress: called with a line for a person before everything that
    takes time. refresh: ask the archive again although the cache has an answer; once per package and object.
    """

    def __init__(
        self, cache: Path | None = None, *, progress: Progress | None = None, refresh: bool | None = None
    ) -> None:
        self.cache = cache or default_cache()
        self.progress = progress or log.info
        self.refresh = bool(os.environ.get(REFRESH_VARIABLE)) if refresh is None else refresh
        self._fetched: dict[tuple[str, str], Path] = {}
        self._runnable: dict[tuple[str, str], Path] = {}
        self._updated: set[str] = set()

    def fetch(self, package: str, suite: str | Sequence[str]) -> Path:
        """The folder holding the package's files as they would lie under ``/``, and DEBIAN/control.

        suite: a codename, or several: the first that has the package answers. Raises PackageError.
        """
        return self._first(suite, lambda name: self._fetch(package, name))

    def runnable(self, package: str, suite: str | Sequence[str]) -> Path:
        """As `fetch`, with programs that run on this machine. Raises PackageError.

        The package as it is where the machine's libraries suffice. Else a copy whose programs name the C
        library's loader and the libraries of their own suite in the cache. That is written into the files and
        not passed in the environment, because runc and crun start themselves again, and because hooks inherit
        the environment.
        """
        return self._first(suite, lambda name: self._made_runnable(package, name))

    def _first(self, suites: str | Sequence[str], get: Callable[[str], Path]) -> Path:
        failures = []
        for suite in (suites,) if isinstance(suites, str) else suites:
            try:
                return get(suite)
            except PackageError as error:
                failures.append(str(error))
        raise PackageError("; ".join(failures))

    def _made_runnable(self, package: str, suite: str) -> Path:
        key = (package, suite)
        if key not in self._runnable:
            root = self._fetch(package, suite)
            # Asked every time: a cache may be carried to a machine with other libraries.
            lacking = [program for program in _programs(root) if _lacks_libraries(program)]
            if lacking:
                root = self._patched(root, suite, lacking)
            self._runnable[key] = root
        return self._runnable[key]

    def _patched(self, root: Path, suite: str, programs: Sequence[Path]) -> Path:
        libraries = sorted({self._fetch("libc6", suite), *self._libraries(root, suite)})
        patchelf = self._fetch("patchelf", machine_suite()) / "usr/bin/patchelf"
        paths = [path for folder in libraries for path in _library_folders(folder)]
        loader = next((path / name for path in paths for name in _LOADERS if (path / name).exists()), None)
        if loader is None:
            raise PackageError(f"libc6 of {suite} holds no loader that is known here")
        # The paths are in the programs: another cache folder makes another copy.
        library_path = ":".join(map(str, paths))
        target = (
            self.cache / "patched" / f"{root.name}+{hashlib.sha256(library_path.encode()).hexdigest()[:12]}"
        )
        with self._lock():
            if not target.is_dir():
                self.progress(f"making {root.name} run on this machine's libraries")
                with self._building(target) as copy:
                    shutil.copytree(root, copy, symlinks=True, dirs_exist_ok=True)
                    options = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", library_path]
                    for program in programs:
                        argv: list[str | Path] = [patchelf, *options, copy / program.relative_to(root)]
                        _run(argv, f"{program} cannot be patched")
        failed = [path for path in _programs(target) if _lacks_libraries(path)]
        if failed:
            raise PackageError(
                f"{failed[0]} does not run on this machine, not even with the libraries of {suite}"
            )
        return target

    def _libraries(self, root: Path, suite: str) -> set[Path]:
        """The library packages that a package needs, and those that they need."""
        found: set[Path] = set()
        waiting = [root]
        while waiting:
            for name in _library_dependencies(waiting.pop()):
                folder = self._fetch(name, suite)
                if folder not in found:
                    found.add(folder)
                    waiting.append(folder)
        return found

    def _fetch(self, package: str, suite: str) -> Path:
        if not _NAME.fullmatch(package) or not _NAME.fullmatch(suite):
            raise PackageError(f"{package!r} of {suite!r}: not a package's and a suite's name")
        key = (package, suite)
        if key not in self._fetched:
            folder = None if self.refresh else self._answer(package, suite)
            if folder is None:
                # What another process fetched while this one waited for the lock is not fetched again.
                with self._lock():
                    folder = None if self.refresh else self._answer(package, suite)
                    folder = folder or self._download(package, suite)
            self._fetched[key] = folder
        return self._fetched[key]

    def _answer(self, package: str, suite: str) -> Path | None:
        try:
            folder = self.cache / "pkg" / (self.cache / "answers" / suite / package).read_text().strip()
        except FileNotFoundError:
            return None
        return folder if folder.is_dir() else None

    def _download(self, package: str, suite: str) -> Path:
        _need_apt()
        conf = self._updated_state(suite)
        self.progress(f"fetching {package} of {suite}")
        with tempfile.TemporaryDirectory(dir=self.cache, prefix=".deb-") as temporary:
            download = ["apt-get", "-q", "-c", str(conf), "download", f"{package}/{suite}"]
            _run(download, f"{package} of {suite} cannot be fetched", cwd=Path(temporary))
            deb = next(Path(temporary).glob("*.deb"), None)
            if deb is None:
                raise PackageError(f"apt fetched no file for {package} of {suite}")
            folder = self.cache / "pkg" / deb.stem
            if not folder.is_dir():
                with self._building(folder) as unpacked:
                    _run(["dpkg-deb", "-R", deb, unpacked], f"{deb.name} cannot be unpacked")
        answer = self.cache / "answers" / suite / package
        answer.parent.mkdir(parents=True, exist_ok=True)
        partial = answer.with_name(f".{package}")
        partial.write_text(f"{folder.name}\n")
        partial.rename(answer)
        return folder

    def _updated_state(self, suite: str) -> Path:
        """apt's configuration file for the suite, its index up to date."""
        state = self.cache / "apt" / suite
        conf = state / "apt.conf"
        if suite in self._updated:
            return conf
        failures = []
        for source in debian_sources():
            shutil.rmtree(state, ignore_errors=True)
            for folder in ("lists/partial", "cache/archives/partial"):
                (state / folder).mkdir(parents=True)
            (state / "debian.sources").write_text(source.stanza(suite))
            conf.write_text(_APT_CONF.format(state=state, user=_user()))
            self.progress(f"reading the package index of {suite}")
            try:
                _run(["apt-get", "-q", "-c", conf, "update"], f"the index of {suite} cannot be read")
            except PackageError as error:
                failures.append(str(error))
                continue
            # A third party's archive may use Debian's suite names too.
            releases = list((state / "lists").glob("*Release"))
            if any(re.search(r"^Origin: Debian$", path.read_text(), re.M) for path in releases):
                self._updated.add(suite)
                return conf
            failures.append("a configured archive with Debian's suite names is not Debian's")
        raise PackageError("; ".join(failures))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.progress("waiting for another process that fills the same cache")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _building(self, target: Path) -> Iterator[Path]:
        """A folder that becomes the target when the block ends well, and else vanishes."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=".new-"))
        try:
            temporary.chmod(0o755)
            yield temporary
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def default_cache() -> Path:
    """``.cache`` of the repository, or what CDI_COURIER_TEST_CACHE names."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).resolve() if named else _REPOSITORY / ".cache"


def machine_suite() -> str:
    """The codename of the machine's own Debian. Raises PackageError where there is none."""
    try:
        text = Path("/etc/os-release").read_text()
    except FileNotFoundError:
        text = ""
    found = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', text, re.M)
    if found is None:
        raise PackageError("/etc/os-release names no VERSION_CODENAME; run this on Debian")
    return found.group(1)


def debian_sources() -> list[Source]:
    """The machine's configured archives that may be Debian's, the likeliest first. Raises PackageError."""
    known = _DEBIAN_SUITES | {machine_suite()}
    sources = [
        source
        for source in configured_sources()
        if known.intersection(source.suites) and "main" in source.components
    ]
    if not sources:
        raise PackageError(
            "no Debian archive is configured for apt; put one into /etc/apt/sources.list.d/debian.sources"
        )
    return sorted(sources, key=lambda source: "debian-archive" not in source.signed_by)


def configured_sources() -> list[Source]:
    """What the machine's apt has as binary archives, both ways of writing them, disabled ones left out."""
    sources: list[Source] = []
    etc = Path("/etc/apt")
    folder = etc / "sources.list.d"
    for path in [etc / "sources.list", *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]:
        if path.is_file():
            text = path.read_text()
            sources += _deb822(text) if path.suffix == ".sources" else _one_line(text)
    return sources


def _deb822(text: str) -> list[Source]:
    sources = []
    text = re.sub(r"^#.*\n?", "", text, flags=re.M)
    for stanza in re.split(r"\n\s*\n", text):
        # A field goes on in lines that begin with a blank; kept as they are, for a key given inline.
        fields = {
            name.lower(): value.strip(" ")
            for name, value in re.findall(r"^([A-Za-z-]+):(.*(?:\n[ \t].*)*)", stanza, re.M)
        }
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").strip() == "no":
            continue
        sources.append(
            Source(
                tuple(fields.get("uris", "").split()),
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
                fields.get("signed-by", ""),
            )
        )
    return sources


def _one_line(text: str) -> list[Source]:
    sources = []
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[(.*?)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if found:
            options, uri, suite, components = found.groups()
            signed_by = re.search(r"signed-by=(\S+)", options or "")
            key = signed_by.group(1).replace(",", " ") if signed_by else ""
            sources.append(Source((uri,), (suite,), tuple(components.split()), key))
    return sources


def _need_apt() -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise PackageError(f"{tool} is not on this machine; the runtimes come from Debian's archive")


def _user() -> str:
    # apt drops to its own user for downloads, and that one may not write into a private cache folder.
    return "root" if os.geteuid() == 0 else "_apt"


def _run(argv: Sequence[str | Path], what: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            list(map(str, argv)),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_APT_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise PackageError(
            f"{what}: {argv[0]} took over {_APT_TIMEOUT:g} s; is the archive reachable?"
        ) from None
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.startswith(("E:", "W:"))]
        cause = " ".join(lines[:4]) or done.stdout.strip()[-500:]
        raise PackageError(f"{what}: {cause} (does `apt-get update` work on this machine?)")
    return done.stdout


def _programs(root: Path) -> list[Path]:
    """The package's own ELF programs, links left out."""
    found = []
    for folder in ("bin", "sbin", "usr/bin", "usr/sbin"):
        for path in sorted((root / folder).glob("*")):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    if file.read(4) == b"\x7fELF":
                        found.append(path)
    return found


def _lacks_libraries(program: Path) -> bool:
    # Of a missing library and of a missing version of one ldd says "not found"; a static program has neither.
    done = subprocess.run(
        ["ldd", program],
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
    )
    return "not found" in done.stdout


def _library_dependencies(root: Path) -> list[str]:
    """Names of the lib… packages that the control file asks for; of alternatives the first."""
    fields = (root / "DEBIAN/control").read_text()
    found = re.findall(r"^(?:Pre-)?Depends:(.*(?:\n[ \t].*)*)", fields, re.M)
    names = [re.split(r"[ (|:]", item.strip())[0] for item in ",".join(found).split(",")]
    return [name for name in names if name.startswith("lib")]


def _library_folders(root: Path) -> list[Path]:
    folders = {path.parent for path in root.rglob("*.so*") if path.is_file()}
    # Libraries lie in lib/TRIPLET; what lies deeper are plug-ins.
    return sorted(path for path in folders if path.parent.name == "lib")
