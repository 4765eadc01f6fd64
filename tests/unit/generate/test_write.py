"""A generated file says exactly what was generated, and is replaced at once or not at all."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import attrs
import pytest
import yaml
from cdi_courier.cdi.edits import to_dict
from cdi_courier.cdi.model import ContainerEdits, Device, DeviceNode, Hook, Mount, NetDevice, Spec
from cdi_courier.cdi.validate import load_spec
from cdi_courier.errors import GenerateError
from cdi_courier.generate import write
from hypothesis import given
from hypothesis import strategies as st

SPEC = Spec(
    kind="v.com/gpu",
    devices=(Device("all", container_edits=ContainerEdits(env=("A=1",))),),
)


def with_edits(edits: ContainerEdits) -> Spec:
    return attrs.evolve(SPEC, container_edits=edits)


# Words that some YAML takes for a number, a truth, a time or nothing.
_words = st.sampled_from(
    [
        "yes",
        "No",
        "on",
        "OFF",
        "null",
        "~",
        "true",
        "0o17",
        "017",
        "0x1f",
        "1_000",
        "1:30",
        ".5",
        "1e3",
        "inf",
        ".inf",
        "NaN",
        "=",
        "<<",
        "-",
        "?",
        "[]",
        "{}",
        "#",
        "&",
        "*",
        "!",
        "|",
        ">",
        "%",
        "@",
        "`",
        "2001-12-14",
        "a:b",
        "a#b",
        "--x",
        "-x",
        ":x",
        "x:",
        "'q'",
        '"q"',
        "0.3.0",
    ]
)
_text = st.one_of(
    _words,
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"), min_size=1, max_size=12),
)
_paths = _text.map(lambda text: f"/{text}")
_edits = st.builds(
    ContainerEdits,
    env=st.lists(_text.map(lambda text: f"A={text}"), max_size=2).map(tuple),
    device_nodes=st.lists(
        st.builds(DeviceNode, _paths, type=st.sampled_from(["", "c"]), gid=st.sampled_from([None, 0, 44])),
        max_size=2,
    ).map(tuple),
    hooks=st.lists(
        st.builds(Hook, st.just("createContainer"), _paths, st.lists(_text, max_size=2).map(tuple)),
        max_size=2,
    ).map(tuple),
    mounts=st.lists(
        st.builds(
            Mount, _paths, _paths, st.lists(_text, max_size=2).map(tuple), st.sampled_from(["", "bind"])
        ),
        max_size=2,
    ).map(tuple),
)


@given(_edits)
def test_a_file_says_what_was_generated(edits: ContainerEdits) -> None:
    """Any texts at all come out of the file as they went in, read by our decoder or by plain YAML 1.1."""
    spec = with_edits(edits)
    data = write.to_bytes(spec, "generate x")
    read = load_spec(data)

    assert attrs.evolve(read, cdi_version="") == spec
    assert yaml.safe_load(data) == to_dict(read)


@pytest.mark.parametrize(
    ("edits", "version"),
    [
        (ContainerEdits(), "0.3.0"),
        (ContainerEdits(mounts=(Mount("/a", "/a", type="bind"),)), "0.4.0"),
        (ContainerEdits(device_nodes=(DeviceNode("/dev/a", "/dev/b"),)), "0.5.0"),
        (ContainerEdits(additional_gids=(44,)), "0.7.0"),
        (ContainerEdits(net_devices=(NetDevice("eth0", "eth1"),)), "1.1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_version_is_the_lowest_that_fits(edits: ContainerEdits, version: str) -> None:
    """The file declares what it needs and no more, whatever the spec said."""
    spec = attrs.evolve(with_edits(edits), cdi_version="1.1.0")

    assert load_spec(write.to_bytes(spec, "generate x")).cdi_version == version


@pytest.mark.parametrize(
    "spec",
    [
        attrs.evolve(SPEC, devices=()),
        attrs.evolve(SPEC, kind="gpu"),
        with_edits(ContainerEdits(env=("A",))),
        with_edits(ContainerEdits(env=("A=\udc80",))),
        with_edits(ContainerEdits(hooks=(Hook("never", "/x"),))),
        with_edits(ContainerEdits(device_nodes=(DeviceNode("/dev/x", major=True),))),
        with_edits(ContainerEdits(mounts=(Mount("/x", "/x", "ro"),))),  # type: ignore[arg-type]
    ],
    ids=["no-device", "kind", "env", "no-unicode", "hook", "no-number", "no-list"],
)
def test_what_is_not_valid_is_not_written(spec: Spec) -> None:
    """A spec that no runtime would load is GEN006."""
    with pytest.raises(GenerateError) as caught:
        write.to_bytes(spec, "generate x")
    assert caught.value.code == "GEN006"


def test_the_header_stays_a_comment() -> None:
    """A line feed in what is named as the origin adds no line to the document."""
    data = write.to_bytes(SPEC, "generate x\nkind: other/kind\x1b[2J")

    assert load_spec(data).kind == "v.com/gpu"
    assert b"\x1b" not in data


def test_a_file_is_made_with_its_folder_for_everybody_to_read(tmp_path: Path) -> None:
    """File and folder are for rootless runtimes too, whatever the umask, and only the owner writes."""
    path = tmp_path / "cdi" / "x.yaml"
    before = os.umask(0o077)
    try:
        changed = write.write(str(path), b"text")
    finally:
        os.umask(before)

    assert changed
    assert path.read_bytes() == b"text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


def test_unchanged_content_is_not_written_again(tmp_path: Path) -> None:
    """The same bytes leave the file as it is; longer, shorter or other ones are a new file."""
    path = tmp_path / "x.yaml"
    write.write(str(path), b"text")
    first = path.stat()

    assert write.write(str(path), b"text") is False
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)

    for text in (b"text and more", b"te", b"xxxx", b""):
        assert write.write(str(path), text) is True
        assert path.read_bytes() == text


def test_who_reads_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """An open file keeps its old content, and nothing else is left in the folder."""
    path = tmp_path / "x.yaml"
    write.write(str(path), b"old")
    with path.open("rb") as reader:
        write.write(str(path), b"new")

        assert reader.read() == b"old"
    assert os.listdir(tmp_path) == ["x.yaml"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """What a link at the place led to stays untouched, also if it has the same content."""
    (tmp_path / "target").write_bytes(b"text")
    path = tmp_path / "x.yaml"
    path.symlink_to("target")

    assert write.write(str(path), b"text") is True
    assert not path.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"text"


def test_who_is_interrupted_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is as before, and there is no other."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "x.yaml"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write.write(str(path), b"text")

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_as_long_as_a_file_may_have_is_written(tmp_path: Path) -> None:
    """The limit is the file system's, in bytes."""
    path = tmp_path / f"{'漢' * 80}.yaml"

    assert write.write(str(path), b"text") is True
    assert path.read_bytes() == b"text"


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "stdout"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, kind: str) -> None:
    """A device, a pipe or a link to an open file such as /dev/stdout stays what it is, also for root."""
    path = tmp_path / "x.yaml"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case _:
            path.symlink_to("/proc/self/fd/1")
    before = path.lstat()

    with pytest.raises(GenerateError, match=r"GEN005.*no regular file.*--dry-run"):
        write.write(str(path), b"text")
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "place", ["folder", "file/x.yaml", "nul\0.yaml"], ids=["folder", "below-file", "nul"]
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, place: str) -> None:
    """A folder in the way, or no folder at all, is GEN005, and the temporary file is gone."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()

    with pytest.raises(GenerateError) as caught:
        write.write(str(tmp_path / place), b"text")
    assert caught.value.code == "GEN005"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert os.listdir(tmp_path / "folder") == []
