"""The loader's cache and SONAMEs: real ones are read as the system's own tools do, garbage is harmless."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cdi_courier.generate import elf, loader_cache
from hypothesis import given
from hypothesis import strategies as st
from support import fake_host

PATHS = ("/usr/lib64/libcuda.so.1", "/opt/x/libm.so.6", "/usr/lib64/libc.so.6")


def reads(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


@pytest.mark.parametrize("old", [False, True], ids=["alone", "behind-libc5"])
@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
def test_a_cache_of_either_format_holds_its_folders(order: str, old: bool) -> None:
    """Each folder comes once, in the cache's order, whatever the format and the byte order."""
    data = fake_host.loader_cache(PATHS, order, old)

    assert loader_cache.folders(data) == ("/usr/lib64", "/opt/x")


@pytest.mark.skipif(not Path("/etc/ld.so.cache").exists(), reason="this system has no loader cache")
def test_the_systems_cache_is_read_as_ldconfig_does() -> None:
    """The folders are those that ldconfig prints."""
    ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin")
    if ldconfig is None:
        pytest.skip("no ldconfig here")
    printed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True, timeout=20).stdout
    expected = {os.path.dirname(line.split(" => ")[1]) for line in printed.splitlines() if " => " in line}

    assert expected
    assert set(loader_cache.folders(Path("/etc/ld.so.cache").read_bytes())) == expected


@given(st.binary(max_size=200), st.booleans(), st.data())
def test_a_damaged_cache_is_harmless(junk: bytes, whole: bool, data: st.DataObject) -> None:
    """Whatever the bytes, the answer is absolute folders and never an exception."""
    text = bytearray(fake_host.loader_cache(PATHS, old=data.draw(st.booleans())))
    at = data.draw(st.integers(0, len(text)))
    text[at : at + len(junk)] = junk
    for found in (loader_cache.folders(junk if whole else bytes(text)), loader_cache.folders(text[:at])):
        assert all(folder.startswith("/") and folder.isprintable() for folder in found)


def test_a_cache_that_claims_too_much_is_read_as_far_as_it_goes() -> None:
    """A count of entries beyond the file's end costs no more than the file."""
    data = bytearray(fake_host.loader_cache(PATHS))
    struct.pack_into("<I", data, 20, 2**32 - 1)

    assert set(loader_cache.folders(bytes(data))) == {"/usr/lib64", "/opt/x"}


@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_library_of_any_machine_has_its_soname(bits: int, order: str) -> None:
    """The SONAME is found in both classes and both byte orders, wherever the segment is loaded."""
    data = fake_host.shared_library("libcuda.so.1", bits, order, padding=4000)

    assert elf.soname(reads(data)) == "libcuda.so.1"


def test_the_systems_c_library_says_its_name() -> None:
    """Of the libraries of this very process, the C library is called libc.so.6 or as musl calls it."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    names = {elf.soname(reads(Path(path).read_bytes())) for path in paths if os.path.exists(path)}

    assert any(name and name.startswith("libc.") for name in names)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\nb", "\x1b[2J", "ä", "x" * 256], ids=ascii
)
def test_a_soname_that_is_no_file_name_is_none(name: str) -> None:
    """A name that leads elsewhere, or that no terminal should see, is no SONAME."""
    assert elf.soname(reads(fake_host.shared_library(name))) is None


@given(st.binary(max_size=64), st.sampled_from([32, 64]), st.sampled_from("<>"), st.data())
def test_a_damaged_library_is_harmless(junk: bytes, bits: int, order: str, data: st.DataObject) -> None:
    """Whatever the bytes, there is a plain name or none, and little is read for it."""
    text = bytearray(fake_host.shared_library("libcuda.so.1", bits, order))
    at = data.draw(st.integers(0, len(text)))
    text[at : at + len(junk)] = junk
    asked = []

    def read(offset: int, size: int) -> bytes:
        asked.append(size)
        return bytes(text[offset : offset + size])

    for name in (elf.soname(read), elf.soname(reads(junk)), elf.soname(reads(bytes(text[:at])))):
        assert name is None or (name and "/" not in name)
    assert sum(asked) < 100_000
