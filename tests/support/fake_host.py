"""A host in a folder, with as much of a driver as a test needs: libraries, device nodes, the loader's cache.

It must not know what is generated from it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

needs_nodes = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes device nodes")

GPU_MAJOR = 195
UVM_MAJOR = 508
CAPS_MAJOR = 511
IMEX_MAJOR = 510


class FakeHost:
    """The folder `root`, and what puts things into it; paths are the host's own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)

    def at(self, path: str) -> Path:
        """Where a path of the host really lies."""
        return self.root / path.lstrip("/")

    def file(self, path: str, content: bytes = b"", mode: int = 0o644) -> Path:
        """A regular file, with the folders on the way."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        place.chmod(mode)
        return place

    def program(self, name: str, folder: str = "/usr/bin") -> None:
        """An executable file."""
        self.file(f"{folder}/{name}", b"#!/bin/sh\n", 0o755)

    def library(self, path: str, soname: str | None = None) -> None:
        """A shared library; its SONAME is its name up to ``.so`` and ``.1`` unless given."""
        stem = path.rpartition("/")[2].partition(".so")[0]
        self.file(path, shared_library(f"{stem}.so.1" if soname is None else soname))

    def link(self, path: str, target: str) -> None:
        """A symbolic link, absolute as on the host or relative."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def node(
        self, path: str, major: int, minor: int, mode: int = 0o666, gid: int = 0, kind: int = stat.S_IFCHR
    ) -> None:
        """A device node; needs root."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(place, kind | mode, os.makedev(major, minor))
        os.chown(place, 0, gid)
        place.chmod(mode)

    def socket(self, path: str) -> None:
        """A socket that nobody listens on."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        # Relative to its folder: a socket's path may have no more than 107 bytes.
        folder = os.open(place.parent, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{folder}/{place.name}")
        finally:
            os.close(folder)

    def gpu(self) -> None:
        """The nodes of a host with one GPU, as the driver makes them by default."""
        self.node("/dev/nvidia0", GPU_MAJOR, 0)
        self.node("/dev/nvidiactl", GPU_MAJOR, 255)
        self.node("/dev/nvidia-uvm", UVM_MAJOR, 0)
        self.node("/dev/nvidia-uvm-tools", UVM_MAJOR, 1)

    def driver(self, version: str, folder: str = "/usr/lib/x86_64-linux-gnu") -> None:
        """The two libraries that every driver has, with the links that the loader looks for."""
        for stem in ("libcuda", "libnvidia-ml"):
            self.library(f"{folder}/{stem}.so.{version}")
            if not self.at(f"{folder}/{stem}.so.1").is_symlink():
                self.link(f"{folder}/{stem}.so.1", f"{stem}.so.{version}")

    def loader_cache(self, *paths: str) -> None:
        """What ldconfig leaves: the libraries at these paths."""
        self.file("/etc/ld.so.cache", loader_cache(paths))


def shared_library(soname: str, bits: int = 64, order: str = "<", padding: int = 0) -> bytes:
    """The least that is a shared library with a SONAME; none if it is empty. order: ``<`` or ``>``."""
    strings = b"\0" + soname.encode() + b"\0"
    wide = bits == 64
    header_size, program_size = (64, 56) if wide else (52, 32)
    address = 0x10000  # the segment's address is not its offset
    at_dynamic = header_size + 3 * program_size + padding
    entry = struct.Struct(order + ("qQ" if wide else "iI"))
    at_strings = at_dynamic + 3 * entry.size
    end = at_strings + len(strings)
    dynamic = entry.pack(14, 1) if soname else entry.pack(1, 1)
    dynamic += entry.pack(5, address + at_strings) + entry.pack(0, 0)
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    word = "Q" if wide else "I"
    header = ident + struct.pack(
        f"{order}HHI{word * 3}IHHHHHH", 3, 62, 1, 0, header_size, 0, 0, header_size, program_size, 3, 0, 0, 0
    )

    def program(kind: int, offset: int, size: int, base: int = address) -> bytes:
        if wide:
            return struct.pack(order + "IIQQQQQQ", kind, 4, offset, base + offset, 0, size, size, 8)
        return struct.pack(order + "IIIIIIII", kind, offset, base + offset, 0, size, size, 4, 4)

    # The first segment holds nothing that is looked for, as a real library's code.
    programs = program(1, 0, end, 0x90000) + program(1, 0, end) + program(2, at_dynamic, 3 * entry.size)
    return header + programs + bytes(padding) + dynamic + strings


def loader_cache(paths: Sequence[str], order: str = "<", old: bool = False) -> bytes:
    """A loader cache as glibc's ldconfig writes it. old: behind the entries of libc5's format."""
    entries = []
    strings = b""
    start = 48 + 24 * len(paths)
    for path in paths:
        key = start + len(strings) + path.rindex("/") + 1
        entries.append(struct.pack(order + "iIIIQ", 3, key, start + len(strings), 0, 0))
        strings += path.encode() + b"\0"
    flags = 2 if order == "<" else 3
    header = struct.pack(order + "20sIIB3xI12x", b"glibc-ld.so.cache1.1", len(paths), len(strings), flags, 0)
    before = b""
    if old:
        before = b"ld.so-1.7.0\0" + struct.pack("=I", len(paths)) + bytes(12 * len(paths))
        before += bytes(-len(before) % 8)
    return before + header + b"".join(entries) + strings
