"""Roots of Debian suites: folders that hold a whole small system, made from the machine's own archive.

They are what boxes and virtual machines start from (`box`, `vm`), and nobody writes into them: `box` lays an
overlay over one, `vm` makes a disk of a copy. mmdebstrap makes them, itself an unpacked package; apt verifies
everything by the archive's signature. It must not know what runs in them.

CACHE/roots/
  SUITE-RECIPE              the name of the root that answers for this list of packages
  SUITE_VERSIONS/           a root; VERSIONS is a hash over its packages with their versions, and files

Half a minute a root when the cache is empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .packages import PackageError, Packages, Source, debian_sources, machine_suite

SYSTEM = ("systemd-sysv", "dbus", "udev", "kmod")
"""What makes a root a host that boots."""

LIBRARIES = (
    "python3",
    "python3-attr",
    "python3-click",
    "python3-grpcio",
    "python3-platformdirs",
    "python3-pluggy",
    "python3-protobuf",
    "python3-rich",
    "python3-tomlkit",
    "python3-yaml",
)
"""What the product needs, as Debian ships it; see `product`."""

_NO_FILES: Mapping[str, str] = {}
_made_here: set[Path] = set()  # answers of this process: what it made itself it does not refresh again

_VARIANTS = {"minbase", "extract"}
_TIMEOUT = 600.0
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")
# Proxies and the like: mmdebstrap does not read the machine's own configuration of apt.
_APT_OPTIONS = re.compile(r"^Acquire::(?:http|https|Retries|ForceIPv[46])\b.*$", re.M)
_UNUSED = ("doc", "info", "locale", "man")  # folders of /usr/share that only people read


def root(
    packages: Packages,
    suite: str,
    include: Sequence[str] = (),
    *,
    variant: str = "minbase",
    files: Mapping[str, str] = _NO_FILES,
) -> Path:
    """The root of a suite with these packages; to be read only.

    include: names of packages, beside those of the variant. variant: ``minbase``, or ``extract`` for the
    packages and their dependencies only unpacked, without any base system: good for `chroot` into a program.
    files: texts by path, there before these packages are installed, for settings that they ask for. Raises
    PackageError.
    """
    for name in (suite, *include):
        if not _NAME.fullmatch(name):
            raise PackageError(f"{name!r} is not a suite's or a package's name")
    if variant not in _VARIANTS:
        raise ValueError(f"{variant!r}: a variant is one of {sorted(_VARIANTS)}")
    described = repr([variant, sorted(set(include)), sorted(files.items())])
    recipe = hashlib.sha256(described.encode()).hexdigest()[:12]
    roots = packages.cache / "roots"
    answer = roots / f"{suite}-{recipe}"
    stale = packages.refresh and answer not in _made_here
    if not stale and (known := _known(answer)):
        return known
    roots.mkdir(parents=True, exist_ok=True)
    with _locked(roots):
        if not stale and (known := _known(answer)):
            return known
        made = _made(packages, roots, suite, include, variant, files)
        partial = answer.with_name(f".{answer.name}")
        partial.write_text(f"{made.name}\n")
        partial.rename(answer)
        _made_here.add(answer)
    return made


def _known(answer: Path) -> Path | None:
    try:
        folder = answer.parent / answer.read_text().strip()
    except FileNotFoundError:
        return None
    return folder if folder.is_dir() else None


def _made(
    packages: Packages,
    roots: Path,
    suite: str,
    include: Sequence[str],
    variant: str,
    files: Mapping[str, str],
) -> Path:
    tool = packages.fetch("mmdebstrap", machine_suite()) / "usr/bin"
    environment = _environment(packages, tool)
    failures = []
    for source in debian_sources():
        work = Path(tempfile.mkdtemp(dir=roots, prefix=".new-"))
        try:
            packages.progress(f"making a root of {suite}")
            new = work / "root"
            early = work / "early"
            early.mkdir()
            for name, text in files.items():
                path = early / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            _bootstrap(tool, environment, work, new, source, suite, include, variant)
            _tidy(new)
            target = roots / f"{suite}_{_versions(new, files)}"
            if not target.is_dir():
                new.rename(target)
        except PackageError as error:
            failures.append(str(error))
        else:
            return target
        finally:
            shutil.rmtree(work, ignore_errors=True)
    raise PackageError("; ".join(failures))


def _bootstrap(
    tool: Path,
    environment: dict[str, str],
    work: Path,
    new: Path,
    source: Source,
    suite: str,
    include: Sequence[str],
    variant: str,
) -> None:
    sources, options = work / "debian.sources", work / "apt.conf"
    sources.write_text(source.stanza(suite))
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True, timeout=30)
    options.write_text(
        "\n".join([*_APT_OPTIONS.findall(dump.stdout), 'APT::Install-Recommends "false";', ""])
    )
    argv = [
        # In namespaces of its own: whatever ends it, no process and no mount of it stays.
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *(tool / "mmdebstrap", "--mode=root", f"--variant={variant}", "--format=directory"),
        *(f"--aptopt={options}", *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _UNUSED)),
        f'--essential-hook=cp -R {shlex.quote(str(work / "early"))}/. "$1"',
        *([f"--include={','.join(include)}"] if include else []),
        *(suite, new, sources),
    ]
    try:
        done = subprocess.run(
            list(map(str, argv)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise PackageError(f"a root of {suite} took over {_TIMEOUT:g} s; is the archive reachable?") from None
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-15:])
        raise PackageError(f"a root of {suite} cannot be made (does `apt-get update` work here?):\n{end}")


def _tidy(new: Path) -> None:
    """Take out what is of this machine or of this way of making it, and what would work by itself."""
    # The first two hold the machine's proxies and what was left out of packages.
    for name in ("etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap", "etc/hostname"):
        (new / name).unlink(missing_ok=True)
    if (new / "etc/machine-id").exists():
        (new / "etc/machine-id").write_text("")
    masked = new / "etc/systemd/system"
    if masked.is_dir():
        for timer in ("apt-daily", "apt-daily-upgrade", "dpkg-db-backup", "e2scrub_all", "fstrim"):
            (masked / f"{timer}.timer").unlink(missing_ok=True)
            (masked / f"{timer}.timer").symlink_to("/dev/null")


def _versions(new: Path, files: Mapping[str, str]) -> str:
    text = (new / "var/lib/dpkg/status").read_text()
    found = re.findall(r"^(?:Package|Version|Architecture):.*$", text, re.M)
    if not found:  # only unpacked, so dpkg knows of none of them
        unpacked = [path for path in new.rglob("*") if path.is_file() and not path.is_symlink()]
        found = sorted(f"{path.relative_to(new)} {path.stat().st_size}" for path in unpacked)
    return hashlib.sha256("\n".join([*found, repr(sorted(files.items()))]).encode()).hexdigest()[:12]


def _environment(packages: Packages, tool: Path) -> dict[str, str]:
    """mmdebstrap's: its helpers on PATH, and Perl's modules where the machine has only perl-base."""
    environment = {
        **os.environ,
        "PATH": f"{tool}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    check = ["perl", "-c", str(tool / "mmdebstrap")]
    if subprocess.run(check, env=environment, capture_output=True, timeout=60).returncode:
        version = subprocess.run(
            ["perl", "-e", 'print join ".", (split /\\./, sprintf "%vd", $^V)[0, 1]'],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        suite = machine_suite()
        modules = packages.fetch(f"perl-modules-{version}", suite) / f"usr/share/perl/{version}"
        compiled = (packages.fetch(f"libperl{version}", suite) / "usr/lib").glob(f"*/perl/{version}")
        environment["PERL5LIB"] = ":".join(map(str, [modules, *compiled]))
    return environment


@contextlib.contextmanager
def _locked(roots: Path) -> Iterator[None]:
    # Not the lock of `Packages`, which is taken below while a tool is fetched.
    with (roots / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
