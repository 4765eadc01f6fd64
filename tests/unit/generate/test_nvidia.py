"""NVIDIA's management device: what of a driver goes into its spec, on hosts of many kinds."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cdi_courier.cdi.edits import concatenate, edits_to_dict
from cdi_courier.cdi.model import ContainerEdits, Mount
from cdi_courier.cdi.validate import load_spec, minimum_version
from cdi_courier.errors import GenerateError
from cdi_courier.generate import nvidia, write
from cdi_courier.generate.root import Root
from cdi_courier.hookspecs import Generated
from cdi_courier.oci import apply_edits
from support.fake_host import CAPS_MAJOR, GPU_MAJOR, IMEX_MAJOR, FakeHost, needs_nodes

pytestmark = needs_nodes

VERSION = "550.54.15"
MULTIARCH = "/usr/lib/x86_64-linux-gnu"
FILE = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET = ("nosuid", "nodev", "rbind", "rprivate", "noexec")


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host with one GPU and no driver libraries."""
    made = FakeHost(tmp_path / "root")
    made.gpu()
    return made


def generate(host: FakeHost) -> Generated:
    with Root(str(host.root)) as root:
        return nvidia.generate(root)


def device(made: Generated) -> ContainerEdits:
    (only,) = made.spec.devices
    assert only.name == "all"
    return only.container_edits


def mounts(made: Generated) -> dict[str, str]:
    """Container path → host path."""
    return {mount.container_path: mount.host_path for mount in made.spec.container_edits.mounts}


def test_a_node_has_its_numbers_mode_and_group(host: FakeHost) -> None:
    """A node is described as it is on the host, readable, writable and creatable in the container."""
    host.driver(VERSION)
    host.node("/dev/nvidia7", GPU_MAJOR, 7, mode=0o660, gid=44)
    node = next(node for node in device(generate(host)).device_nodes if node.path == "/dev/nvidia7")

    assert (node.type, node.major, node.minor, node.file_mode) == ("c", GPU_MAJOR, 7, 0o660)
    assert (node.gid, node.uid, node.permissions, node.host_path) == (44, None, "rwm", "")


def test_every_gpu_node_is_in_the_device_and_no_other(host: FakeHost) -> None:
    """GPUs, control, UVM, modeset, MIG and IMEX nodes are there, sorted; storage and switches are not."""
    host.driver(VERSION)
    wanted = ["/dev/nvidia-modeset", "/dev/nvidia10", "/dev/nvidia2"]
    for minor, path in enumerate(wanted):
        host.node(path, GPU_MAJOR, minor)
    caps = ["/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"]
    for minor, path in enumerate(caps):
        host.node(path, CAPS_MAJOR, minor + 1, mode=0o444)
    channel = "/dev/nvidia-caps-imex-channels/channel0"
    host.node(channel, IMEX_MAJOR, 0)
    for name in ("nvidia-fs0", "nvidia-nvswitch0", "nvidia-nvswitchctl", "nvidia-nvlink", "null"):
        host.node(f"/dev/{name}", 99, 1)
    host.node("/dev/nvidia-caps/other", 99, 2)
    host.node("/dev/nvidia-block", 99, 3, kind=stat.S_IFBLK)
    host.file("/dev/nvidia-file")
    host.link("/dev/nvidia-link", "nvidia0")

    found = [node.path for node in device(generate(host)).device_nodes]

    standard = [f"/dev/{name}" for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")]
    assert found == sorted([*standard, *wanted, *caps, channel])


@pytest.mark.parametrize(
    ("mode", "gid", "groups"),
    [(0o660, 44, (44,)), (0o666, 44, ()), (0o660, 0, ()), (0o664, 44, (44,))],
    ids=["group", "world-writable", "root", "world-readable"],
)
def test_a_group_is_added_only_where_it_is_needed(
    host: FakeHost, mode: int, gid: int, groups: tuple[int, ...]
) -> None:
    """A container joins the group of a node that is not everybody's, but never root's."""
    host.driver(VERSION)
    host.node("/dev/nvidia1", GPU_MAJOR, 1, mode, gid)
    host.node("/dev/nvidia2", GPU_MAJOR, 2, mode, gid)
    made = generate(host)

    assert device(made).additional_gids == groups
    assert minimum_version(made.spec)[0] == ("0.7.0" if groups else "0.3.0")


@pytest.mark.parametrize("name", ["", "nvidia-fs0", "nvidia-nvlink"], ids=["none", "storage", "nvlink"])
def test_a_host_without_gpu_nodes_is_an_error(tmp_path: Path, name: str) -> None:
    """Without a node that counts there is GEN002, driver or not."""
    host = FakeHost(tmp_path / "root")
    host.driver(VERSION)
    if name:
        host.node(f"/dev/{name}", 99, 0)

    with pytest.raises(GenerateError) as caught:
        generate(host)
    assert caught.value.code == "GEN002"


@pytest.mark.parametrize("version", ["550.54.15", "570.86", "1.0.0.7", "999.999.999"])
@pytest.mark.parametrize("stem", ["libcuda", "libnvidia-ml"])
def test_the_version_is_a_librarys_suffix(host: FakeHost, version: str, stem: str) -> None:
    """Either library tells the version, whichever form it has."""
    host.library(f"{MULTIARCH}/{stem}.so.{version}")
    host.library(f"{MULTIARCH}/libnvidia-cfg.so.{version}")
    made = generate(host)

    assert made.source == f"driver {version}"
    assert f"{MULTIARCH}/libnvidia-cfg.so.{version}" in mounts(made)


@pytest.mark.parametrize(
    "name",
    ["libcuda.so", "libcuda.so.1", "libcuda.so.", "libcuda.so.a.b", "libcudart.so.12.1", "xlibcuda.so.1.2"],
)
def test_what_names_no_version_is_no_driver(host: FakeHost, name: str) -> None:
    """A link's name, or another library's, tells no version: GEN003."""
    host.library(f"{MULTIARCH}/{name}")

    with pytest.raises(GenerateError) as caught:
        generate(host)
    assert caught.value.code == "GEN003"


def _loaded(host: FakeHost) -> None:
    host.file("/sys/module/nvidia/version", b"550.54.15\n")


def _linked(host: FakeHost) -> None:
    host.link(f"{MULTIARCH}/libcuda.so.1", "libcuda.so.550.54.15")


def _both(host: FakeHost) -> None:
    _loaded(host)
    host.link(f"{MULTIARCH}/libcuda.so.1", "libcuda.so.535.1.2")


@pytest.mark.parametrize("decides", [_loaded, _linked, _both], ids=["loaded", "linked", "loaded-first"])
def test_of_several_drivers_the_one_in_use_counts(
    host: FakeHost, decides: Callable[[FakeHost], None]
) -> None:
    """What is left of another driver is not mounted: the module in the kernel decides, else the link."""
    for version in ("535.1.2", "550.54.15", "560.1"):
        host.library(f"{MULTIARCH}/libcuda.so.{version}")
    decides(host)
    made = generate(host)

    assert made.source == "driver 550.54.15"
    assert f"{MULTIARCH}/libcuda.so.550.54.15" in mounts(made)
    assert not [path for path in mounts(made) if "535" in path or "560" in path]


@pytest.mark.parametrize("loaded", [b"", b"1.2.3\n", b"\xff" * 9000], ids=["none", "another", "garbage"])
def test_several_drivers_of_which_none_is_in_use_are_an_error(host: FakeHost, loaded: bytes) -> None:
    """Where nothing decides there is GEN003 that names each of them."""
    for version in ("535.1.2", "550.54.15"):
        host.library(f"{MULTIARCH}/libcuda.so.{version}")
    host.file("/sys/module/nvidia/version", loaded)

    with pytest.raises(GenerateError) as caught:
        generate(host)
    assert caught.value.code == "GEN003"
    assert "535.1.2" in caught.value.message
    assert "550.54.15" in caught.value.message


@pytest.mark.parametrize(
    "folder",
    ["/usr/lib64", "/usr/lib/aarch64-linux-gnu", "/usr/lib", f"{MULTIARCH}/nvidia/current", "/opt/odd/lib"],
)
def test_libraries_are_found_where_hosts_have_them(host: FakeHost, folder: str) -> None:
    """The usual folders are known, and any other through the loader's cache."""
    host.driver(VERSION, folder)
    if folder.startswith("/opt"):
        host.loader_cache(f"{folder}/libcuda.so.1", "/usr/lib/libc.so.6")
    host.library(f"{folder}/vdpau/libvdpau_nvidia.so.{VERSION}")
    found = mounts(generate(host))

    for name in ("libcuda.so", "libnvidia-ml.so", "vdpau/libvdpau_nvidia.so"):
        path = f"{folder}/{name}.{VERSION}"
        assert found[path] == path


@pytest.mark.parametrize("cache", [b"", b"garbage" * 99, b"glibc-ld.so.cache1.1" + b"\xff" * 99], ids=ascii)
def test_a_broken_loader_cache_hides_nothing(host: FakeHost, cache: bytes) -> None:
    """The usual folders are looked in whatever the cache says."""
    host.driver(VERSION)
    host.file("/etc/ld.so.cache", cache)

    assert f"{MULTIARCH}/libcuda.so.{VERSION}" in mounts(generate(host))


def test_only_files_of_that_version_are_mounted(host: FakeHost) -> None:
    """Other libraries, other versions, folders, dangling links and FIFOs stay out."""
    host.driver(VERSION)
    host.library(f"{MULTIARCH}/libnvidia-old.so.535.1.2")
    host.library(f"{MULTIARCH}/libc.so.6")
    host.library(f"{MULTIARCH}/libnvidia-gtk3.so.{VERSION}.bak")
    host.at(f"{MULTIARCH}/libfolder.so.{VERSION}").mkdir()
    host.link(f"{MULTIARCH}/libgone.so.{VERSION}", "nowhere")
    os.mkfifo(host.at(f"{MULTIARCH}/libfifo.so.{VERSION}"))
    made = generate(host)

    assert {path for path in mounts(made) if path.endswith(VERSION)} == {
        f"{MULTIARCH}/libcuda.so.{VERSION}",
        f"{MULTIARCH}/libnvidia-ml.so.{VERSION}",
    }


def test_a_merged_usr_is_one_folder(host: FakeHost) -> None:
    """Where /lib is a link to usr/lib each library is mounted once, at its real place."""
    host.driver(VERSION)
    host.link("/lib", "usr/lib")
    host.link("/lib64", "/usr/lib64")
    host.loader_cache("/lib/x86_64-linux-gnu/libcuda.so.1")
    found = mounts(generate(host))

    assert f"{MULTIARCH}/libcuda.so.{VERSION}" in found
    assert not [path for path in found if path.startswith("/lib")]


def test_debians_alternatives_lead_to_the_driver(host: FakeHost) -> None:
    """A program or library behind absolute links appears at the link's place, from the file's real one."""
    real = f"{MULTIARCH}/nvidia/current"
    host.driver(VERSION, real)
    host.program("nvidia-smi", "/usr/lib/nvidia/current")
    host.link("/etc/alternatives/nvidia--nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
    host.link("/usr/bin/nvidia-smi", "/etc/alternatives/nvidia--nvidia-smi")
    host.link("/etc/alternatives/lib", f"{real}/libcuda.so.{VERSION}")
    host.link(f"{MULTIARCH}/libcuda.so.{VERSION}", "/etc/alternatives/lib")
    found = mounts(generate(host))

    assert found["/usr/bin/nvidia-smi"] == "/usr/lib/nvidia/current/nvidia-smi"
    assert found[f"{MULTIARCH}/libcuda.so.{VERSION}"] == f"{real}/libcuda.so.{VERSION}"


def test_links_out_of_the_root_bring_nothing_in(host: FakeHost, tmp_path: Path) -> None:
    """No link of the root, to a file, a folder or the cache, makes anything outside a part of the spec."""
    host.driver(VERSION)
    outside = FakeHost(tmp_path / "outside")
    outside.library(f"/lib/libevil.so.{VERSION}")
    outside.program("nvidia-smi")
    outside.loader_cache("/opt/evil/libcuda.so.1")
    host.library(f"/opt/evil/libinner.so.{VERSION}")
    place = str(outside.root)
    host.link("/usr/lib64", f"{place}/lib")
    host.link("/usr/lib/aarch64-linux-gnu", "../../../outside/lib")
    host.link(f"{MULTIARCH}/libevil.so.{VERSION}", f"{place}/lib/libevil.so.{VERSION}")
    host.link("/usr/bin", f"{place}/usr/bin")
    host.link("/etc/ld.so.cache", f"{place}/etc/ld.so.cache")
    found = mounts(generate(host))

    assert set(found) == {
        f"{MULTIARCH}/{stem}.so.{suffix}" for stem in ("libcuda", "libnvidia-ml") for suffix in (VERSION, 1)
    }


@pytest.mark.parametrize("name", [b"\xff", b"a\nb", b"\x1b[2J"], ids=ascii)
def test_names_that_cannot_be_written_are_left_out(host: FakeHost, name: bytes) -> None:
    """A file or folder whose name is no text does not keep the rest from being generated."""
    host.driver(VERSION)
    place = os.fsencode(host.at("/opt")) + b"/" + name
    os.makedirs(place)
    with open(place + b"/libodd.so." + VERSION.encode(), "wb"):
        pass
    host.link("/usr/lib64", "/opt/" + os.fsdecode(name))
    with open(os.fsencode(host.at(MULTIARCH)) + b"/lib" + name + b".so." + VERSION.encode(), "wb"):
        pass
    made = generate(host)

    assert len(mounts(made)) == 4
    assert write.to_bytes(made.spec, "generate nvidia")


def test_both_machines_of_a_multiarch_host_are_mounted(host: FakeHost) -> None:
    """32-bit libraries of the same driver come along."""
    host.driver(VERSION)
    host.driver(VERSION, "/usr/lib/i386-linux-gnu")

    assert f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}" in mounts(generate(host))


def test_the_firmware_of_that_version_is_mounted(host: FakeHost) -> None:
    """GSP firmware of the driver in use is there, read-only, of other versions and other chips not."""
    host.driver(VERSION)
    host.link("/lib", "usr/lib")
    host.file(f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    host.file(f"/usr/lib/firmware/nvidia/{VERSION}/readme.bin")
    host.file("/usr/lib/firmware/nvidia/535.1.2/gsp_ga10x.bin")
    host.file("/usr/lib/firmware/nvidia/ga102/gsp/bootloader.bin")
    found = {path: host_path for path, host_path in mounts(generate(host)).items() if "firmware" in path}

    path = f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
    assert found == {path: f"/usr{path}"}


def test_updated_firmware_goes_before(host: FakeHost) -> None:
    """Of two files with one name the one that the kernel finds first is mounted."""
    host.driver(VERSION)
    host.file(f"/lib/firmware/nvidia/{VERSION}/gsp_a.bin")
    host.file(f"/lib/firmware/updates/nvidia/{VERSION}/gsp_a.bin")
    found = [path for path in mounts(generate(host)) if "firmware" in path]

    assert found == [f"/lib/firmware/updates/nvidia/{VERSION}/gsp_a.bin"]


def test_the_programs_are_mounted_if_they_can_be_run(host: FakeHost) -> None:
    """Each of the driver's programs is there; one without the executable bit is not."""
    host.driver(VERSION)
    names = ["smi", "debugdump", "persistenced", "cuda-mps-control", "cuda-mps-server", "imex", "imex-ctl"]
    for name in names[:-1]:
        host.program(f"nvidia-{name}")
    host.program("nvidia-settings")
    host.file("/usr/bin/nvidia-imex-ctl", mode=0o644)
    found = generate(host).spec.container_edits.mounts

    programs = [mount for mount in found if mount.container_path.startswith("/usr/bin/")]
    assert programs == [
        Mount(f"/usr/bin/nvidia-{name}", f"/usr/bin/nvidia-{name}", FILE) for name in sorted(names[:-1])
    ]


def test_sockets_are_writable_and_nothing_is_run_from_them(host: FakeHost) -> None:
    """The sockets of the three services are mounted without ro and with noexec, where programs look."""
    host.driver(VERSION)
    host.link("/var/run", "/run")
    host.socket("/run/nvidia-persistenced/socket")
    host.socket("/run/nvidia-fabricmanager/socket")
    host.file("/tmp/nvidia-mps/control")
    found = generate(host).spec.container_edits.mounts

    assert [mount for mount in found if "ro" not in mount.options] == [
        Mount("/tmp/nvidia-mps", "/tmp/nvidia-mps", SOCKET),
        Mount("/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket", SOCKET),
        Mount("/run/nvidia-persistenced/socket", "/var/run/nvidia-persistenced/socket", SOCKET),
    ]


def test_mounts_are_sorted_and_each_place_is_used_once(host: FakeHost) -> None:
    """Mounts are in the order of their container paths, without a second one for the same."""
    host.driver(VERSION)
    host.driver(VERSION, "/usr/lib64")
    host.program("nvidia-smi")
    host.program("nvidia-smi", "/usr/local/bin")
    host.socket("/var/run/nvidia-persistenced/socket")
    paths = [mount.container_path for mount in generate(host).spec.container_edits.mounts]

    assert paths == sorted(set(paths))


def test_nvidias_runtime_is_told_to_keep_out(host: FakeHost) -> None:
    """The environment says that no other component is to put GPUs in."""
    host.driver(VERSION)

    assert generate(host).spec.container_edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)


def test_with_the_hook_links_and_cache_are_made_in_the_container(host: FakeHost) -> None:
    """Two hooks, links first, each with its environment; then no library is mounted twice."""
    host.driver(VERSION)
    host.library(f"{MULTIARCH}/vdpau/libvdpau_nvidia.so.{VERSION}")
    host.library(f"{MULTIARCH}/libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0")
    host.program("nvidia-cdi-hook")
    made = generate(host)
    links, cache = made.spec.container_edits.hooks

    for hook in (links, cache):
        assert (hook.hook_name, hook.path) == ("createContainer", "/usr/bin/nvidia-cdi-hook")
        assert hook.env == ("NVIDIA_CTK_DEBUG=false",)
    assert links.args == (
        "nvidia-cdi-hook",
        "create-symlinks",
        "--link",
        f"libGLX_nvidia.so.{VERSION}::{MULTIARCH}/libGLX_indirect.so.0",
        "--link",
        f"libcuda.so.1::{MULTIARCH}/libcuda.so",
    )
    folders = ("--folder", MULTIARCH, "--folder", f"{MULTIARCH}/vdpau")
    assert cache.args == ("nvidia-cdi-hook", "update-ldcache", *folders)
    assert all(path.endswith(VERSION) for path in mounts(made))
    assert made.warnings == ()


def test_without_the_hook_libraries_are_mounted_under_their_sonames(host: FakeHost) -> None:
    """Each library is there under both names, and a warning says what that does not do."""
    host.driver(VERSION)
    host.library(f"{MULTIARCH}/libnvidia-tls.so.{VERSION}", f"libnvidia-tls.so.{VERSION}")
    host.file(f"{MULTIARCH}/libnvidia-junk.so.{VERSION}", b"\x7fELF junk")
    host.library(f"{MULTIARCH}/libnvidia-bad.so.{VERSION}", "../../../etc/passwd")
    made = generate(host)
    found = mounts(made)

    assert made.spec.container_edits.hooks == ()
    assert found[f"{MULTIARCH}/libcuda.so.1"] == f"{MULTIARCH}/libcuda.so.{VERSION}"
    assert {path for path in found if not path.endswith(VERSION)} == {
        f"{MULTIARCH}/libcuda.so.1",
        f"{MULTIARCH}/libnvidia-ml.so.1",
    }
    (warning,) = made.warnings
    assert "loader cache" in warning
    assert MULTIARCH in warning


def test_a_soname_takes_no_other_librarys_place(host: FakeHost) -> None:
    """Where a library's SONAME is another one's file name, the file of that name is mounted there."""
    host.driver(VERSION)
    host.library(f"{MULTIARCH}/libnvidia-odd.so.{VERSION}", f"libcuda.so.{VERSION}")
    path = f"{MULTIARCH}/libcuda.so.{VERSION}"

    assert mounts(generate(host))[path] == path


@pytest.mark.parametrize("name", ["nvidiactl", "nvidia-uvm"])
def test_a_node_that_is_made_later_is_warned_of(host: FakeHost, name: str) -> None:
    """A host whose driver has not made all nodes yet gets its spec, and a warning that names the node."""
    host.driver(VERSION)
    host.program("nvidia-cdi-hook")
    host.at(f"/dev/{name}").unlink()
    (warning,) = generate(host).warnings

    assert f"/dev/{name} " in warning


def test_the_same_host_gives_the_same_bytes(host: FakeHost) -> None:
    """The file of an unchanged host is the same to the byte, and valid."""
    host.driver(VERSION)
    host.program("nvidia-smi")
    first, second = (write.to_bytes(generate(host).spec, "generate nvidia") for _ in range(2))

    assert first == second
    assert load_spec(first).kind == "management.nvidia.com/gpu"


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "no-hook"])
def test_what_is_injected_is_on_that_host(host: FakeHost, hook: bool) -> None:
    """A container gets exactly the host's nodes, and every mount's source is there."""
    host.driver(VERSION)
    host.node("/dev/nvidia-caps/nvidia-cap1", CAPS_MAJOR, 1, mode=0o440, gid=44)
    host.program("nvidia-smi")
    host.socket("/run/nvidia-persistenced/socket")
    host.link("/var/run", "../run")
    if hook:
        host.program("nvidia-cdi-hook")
    spec = load_spec(write.to_bytes(generate(host).spec, "generate nvidia"))
    edits = concatenate([spec.container_edits, spec.devices[0].container_edits])
    config = apply_edits({"ociVersion": "1.0.2"}, edits_to_dict(edits))

    for node in config["linux"]["devices"]:
        found = host.at(node["path"]).stat()
        assert (node["major"], node["minor"]) == (os.major(found.st_rdev), os.minor(found.st_rdev))
        assert (node["fileMode"], node.get("gid", 0)) == (stat.S_IMODE(found.st_mode), found.st_gid)
    assert len(config["linux"]["devices"]) == 5
    assert all(host.at(mount["source"]).exists() for mount in config["mounts"])
    assert config["process"]["user"]["additionalGids"] == [44]
    assert ("hooks" in config) == hook
