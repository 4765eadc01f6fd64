"""The file system of every test's containers, one static busybox, as a folder and as an image.

The image, which is the pause containers' too, is an OCI layout in a tar file, the same bytes for the same
busybox. It must not know who imports it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

from .packages import Packages, machine_suite

NAME = "localhost/cdi-courier/busybox:lab"
FOREVER = ("sleep", "2147483647")  # the default command: as pause container it must outlive everything

_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_FILES = {
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
}


def busybox(packages: Packages) -> Path:
    """The static busybox that the others here take. Raises PackageError."""
    return packages.fetch("busybox-static", machine_suite()) / "bin/busybox"


def build(busybox: Path, target: Path, name: str = NAME) -> Path:
    """Write the image's tar file and return its path.

    busybox: a static busybox, of which every applet becomes a link in /bin. name: the full reference.
    """
    layer = _layer(busybox)
    config = _json(
        {
            "architecture": _architecture(),
            "os": "linux",
            "config": {"Cmd": list(FOREVER), "Env": ["PATH=/bin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": [_descriptor(_LAYER, layer)],
        }
    )
    entry = _descriptor(_MANIFEST, manifest) | {
        "platform": {"architecture": _architecture(), "os": "linux"},
        "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name},
    }
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]}),
        **{
            f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}": blob
            for blob in (config, layer, manifest)
        },
    }
    partial = target.with_name(f".{target.name}")
    with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in files.items():
            _add_file(archive, path, data, 0o644)
    return partial.rename(target)


def root_file_system(busybox: Path) -> bytes:
    """The image's files as a tar."""
    return _layer(busybox)


def unpack(busybox: Path, folder: Path) -> Path:
    """The image's files in a folder, which is made and returned."""
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", folder], input=_layer(busybox), check=True)
    return folder


def _layer(busybox: Path) -> bytes:
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for folder in ("bin", "dev", "etc", "proc", "root", "sys", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        _add_file(archive, "bin/busybox", busybox.read_bytes(), 0o755)
        for applet in sorted(set(applets) - {"busybox"}):
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
        for path, text in _FILES.items():
            _add_file(archive, path, text.encode(), 0o644)
    return buffer.getvalue()


def _add_file(archive: tarfile.TarFile, path: str, data: bytes, mode: int) -> None:
    # TarInfo's own defaults (owner 0, time 0) keep the bytes the same from build to build.
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _architecture() -> str:
    machine = os.uname().machine
    return _ARCHITECTURES.get(machine, machine)
