"""Decoding: what the reference's own results do not cover, mistakes with their place, hostile input."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import attrs
import pytest
from cdi_courier.cdi import decode
from cdi_courier.cdi.decode import decode_spec, float_text, format_path
from cdi_courier.cdi.edits import to_dict
from cdi_courier.cdi.model import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from cdi_courier.cdi.validate import load_spec
from cdi_courier.errors import CdiError
from hypothesis import example, given, settings
from hypothesis import strategies as st

HEAD = "cdiVersion: 0.5.0\nkind: v.com/c\ndevices:\n- name: d\n  containerEdits:\n"


def refused(text: str | bytes, code: str) -> CdiError:
    """The error with which a document is refused."""
    with pytest.raises(CdiError) as caught:
        load_spec(text.encode() if isinstance(text, str) else text, "f.yaml")
    assert caught.value.code == code
    return caught.value


def test_every_field_is_read() -> None:
    """A spec that uses all of them decodes to the model that says the same, and back."""
    edits: dict[str, Any] = {
        "env": ["A=1"],
        "deviceNodes": [
            {
                "path": "/a",
                "hostPath": "/b",
                "type": "c",
                "major": -1,
                "minor": 2,
                "fileMode": 0,
                "permissions": "r",
            }
            | {"uid": 0, "gid": 4294967295}
        ],
        "netDevices": [{"hostInterfaceName": "e", "name": "f"}],
        "hooks": [{"hookName": "poststop", "path": "/h", "args": ["x"], "env": ["B=2"], "timeout": 0}],
        "mounts": [{"hostPath": "/s", "containerPath": "/t", "options": ["ro"], "type": "bind"}],
        "intelRdt": {
            "closID": "i",
            "l3CacheSchema": "l",
            "memBwSchema": "m",
            "schemata": ["s"],
            "enableMonitoring": True,
        },
        "additionalGids": [5],
    }
    document = {
        "cdiVersion": "1.1.0",
        "kind": "v.com/c",
        "annotations": {"k": "v"},
        "devices": [{"name": "d", "annotations": {"x": "y"}, "containerEdits": edits}],
        "containerEdits": edits,
    }
    model = ContainerEdits(
        env=("A=1",),
        device_nodes=(DeviceNode("/a", "/b", "c", -1, 2, 0, "r", 0, 4294967295),),
        net_devices=(NetDevice("e", "f"),),
        hooks=(Hook("poststop", "/h", ("x",), ("B=2",), 0),),
        mounts=(Mount("/s", "/t", ("ro",), "bind"),),
        intel_rdt=IntelRdt("i", "l", "m", ("s",), True),
        additional_gids=(5,),
    )

    spec = load_spec(json.dumps(document).encode())

    assert spec == Spec("1.1.0", "v.com/c", {"k": "v"}, (Device("d", {"x": "y"}, model),), model)
    assert to_dict(spec) == document
    assert unused(spec) == []


def unused(value: Any) -> list[str]:
    """Fields of the model that nothing in `value` sets, by their names on the wire."""
    if isinstance(value, tuple):
        return [name for item in value for name in unused(item)]
    if not attrs.has(type(value)):
        return []
    fields = [(field, getattr(value, field.name)) for field in attrs.fields(type(value))]
    return [field.metadata["wire"] for field, item in fields if item == field.default] + [
        name for _, item in fields for name in unused(item)
    ]


@pytest.mark.parametrize(
    ("edits", "code", "where"),
    [
        (
            "    env:\n    - A=1\n    - B=2\n    - [x]\n",
            "CDI004",
            "f.yaml:9: devices[0].containerEdits.env[2]: ",
        ),
        ("    env:\n    - A=1\n    - B\n", "CDI006", "f.yaml:8: devices[0].containerEdits.env[1]: "),
        (
            "    Mounts:\n    - hostPath: /a\n      nosuch: 1\n",
            "CDI004",
            "f.yaml:8: devices[0].containerEdits.mounts[0].nosuch: ",
        ),
        (
            "    deviceNodes:\n    - path: /a\n      FileMode: -1\n",
            "CDI004",
            "f.yaml:8: devices[0].containerEdits.deviceNodes[0].fileMode: must be between 0 and 4294967295",
        ),
        (
            "    env:\n    - A=1\n    netDevices:\n    - hostInterfaceName: e\n      name: e\n",
            "CDI005",
            "f.yaml:8: devices[0].containerEdits.netDevices: this needs cdiVersion 1.1.0",
        ),
        ("    deviceNodes: [null]\n", "CDI004", "f.yaml:6: devices[0].containerEdits.deviceNodes[0]: "),
        ("    env: [A=1]\n  Name: e\n", "CDI004", "f.yaml:7: devices[0].Name: field name occurs twice"),
        ("    env: [A=1]\n  \x1b: e\n", "CDI003", "f.yaml"),
        ('    env: [A=1]\n  "\\e": e\n', "CDI004", 'f.yaml:7: devices[0]["\\u001b"]: '),
        ("    env: [A=1]\n    env: [A=2]\n", "CDI003", 'f.yaml:7: key "env" occurs twice'),
        ("    env: [A=1\n", "CDI003", "f.yaml:7: did not find"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_path(edits: str, code: str, where: str) -> None:
    """The reader is led to the place, whatever spelling or style the file has there."""
    error = refused(HEAD + edits, code)

    assert error.message.startswith(where)
    assert error.fields["file"] == "f.yaml"


def test_an_error_says_of_what_kind_the_file_is() -> None:
    """As far as it can be told; the registry uses it to name suspects."""
    assert refused(HEAD + "    envs: []\n", "CDI004").fields["kind"] == "v.com/c"
    assert refused(HEAD + "    env: [A]\n", "CDI006").fields["kind"] == "v.com/c"
    assert "kind" not in refused("{", "CDI003").fields


@pytest.mark.parametrize(
    "name", ["additionalGIDs", "ADDITIONALGIDS", "additionalGid\u017f"], ids=["upper", "all", "long-s"]
)
def test_field_names_match_in_any_case(name: str) -> None:
    """The CDI specification's own sample spells additionalGIDs."""
    spec = load_spec(HEAD.replace("0.5.0", "0.7.0").encode() + f"    {name}: [5]\n".encode())

    assert spec.devices[0].container_edits.additional_gids == (5,)


@pytest.mark.parametrize("name", ["permi\u00dfions", "\ufb01leMode", "\u0130d"])
def test_full_case_folding_does_not_apply(name: str) -> None:
    """A letter that folds to two ASCII letters is no spelling of a field."""
    refused(HEAD + f"    deviceNodes: [{{path: /a, {name}: null}}]\n", "CDI004")


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("!!float 5", "5"),
        ("!!float 1234567", "1.234567e+06"),
        ('!!int "5"', "5"),
        ("! '5'", "5"),
        ("!!str 5", "5"),
        ("!foo 5", "5"),
        ("!!bool yes", "true"),
        ("!!null ~", ""),
        ("!!binary aGk=", "hi"),
        ("!!timestamp 2020-01-01", "2020-01-01"),
        ("|-\n  5", "5"),
    ],
)
def test_explicit_tags_decide(scalar: str, value: str) -> None:
    """The tags of YAML's core convert, others mean nothing."""
    assert decode_spec(f"kind: {scalar}\n".encode()).kind == value


@pytest.mark.parametrize(
    "scalar",
    [
        "!!int 1.5",
        "!!int x",
        "!!bool 1",
        "!!float y",
        "!!float 18446744073709551615",
        "!!null 0",
        "!!binary '*'",
        "!!timestamp x",
    ],
)
def test_a_tag_that_does_not_fit_is_an_error(scalar: str) -> None:
    """So is text that is not what its tag says."""
    assert ":1: " in refused(f"kind: {scalar}\n", "CDI003").message


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {x: 1}\nb: {<<: *a, x: 2}",
        "a: &a {x: 1}\nb: {x: 2, <<: *a}",
        "a: &a {x: 1}\nb: {<<: [*a, *a]}",
        "a: &a [{x: 1}]\nb: {<<: *a}",
        "b: {<<: [1]}",
        "b: {<<: 1}",
        "a: &a {x: *a}",
        "a: *a",
        "{1: a, '1': b}",
        "{yes: a, true: b}",
        "{? [a] : b}",
        "{~: a}",
        "{9223372036854775808: a}",
        "&a [*a]",
        "a: [x?]",
        'a: "\\/"',
    ],
)
def test_what_the_reference_cannot_read_is_not_well_formed(text: str) -> None:
    """Merges that collide, cycles, keys that are no text, and marks that its older parser reads otherwise."""
    refused(text, "CDI003")


def test_a_merge_can_be_written_out() -> None:
    """Merge keys may be lists, inline or nested, and quoting makes one an ordinary key."""
    spec = decode_spec(b"annotations: {<<: [{a: b}, {c: d}], !!merge <<: {<<: {e: f}}, '<<': g}")

    assert dict(spec.annotations) == {"a": "b", "c": "d", "e": "f", "<<": "g"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_an_escaped_slash_is_found_in_any_encoding(encoding: str) -> None:
    """Positions count characters, whatever comes before."""
    text = 'kind: "ä\U0001f600" # \\/\r\nannotations: {a: "\\\\/", b: \'\\/\', c: "%s"}'
    mark = "\ufeff" if encoding == "utf-16-be" else ""

    assert decode_spec((mark + text % "/").encode(encoding)).annotations["a"] == "\\/"
    refused((mark + text % "\\/").encode(encoding), "CDI003")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (123456.0, "123456"),
        (1234567.0, "1.234567e+06"),
        (16777217.0, "1.6777216e+07"),
        (1e39, "+Inf"),
        (-1e39, "-Inf"),
        (3.4028235e38, "3.4028235e+38"),
        (1e-45, "1e-45"),
        (1e-60, "0"),
        (float("nan"), "NaN"),
        (100.0, "100"),
        (1.5, "1.5"),
    ],
)
def test_a_float_is_written_as_the_shortest_float32(value: float, text: str) -> None:
    """Go writes it so, and device names depend on it."""
    assert float_text(value) == text


def test_a_path_is_written_as_a_person_would() -> None:
    """Keys that are no plain words are quoted and cut."""
    assert format_path(("devices", 0, "a b", "x")) == 'devices[0]["a b"].x'
    assert len(format_path(("\x1b" * 1000,))) < 500


def test_without_libyaml_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML can be built without it, and its own parser is another dialect."""
    monkeypatch.setattr(decode, "CParser", None)

    assert "libyaml" in str(refused("a: b", "CDI003"))


# --- hostile input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"[" * 2_000_000, id="open-brackets"),
        pytest.param(b"{a: " * 500_000, id="open-braces"),
        pytest.param(b"- " * 500_000, id="dashes"),
        pytest.param(b"? " * 500_000, id="question-marks"),
        pytest.param(b"[" * 900 + b"]" * 900, id="deep"),
        pytest.param(b"1" * 2_000_000, id="long-number"),
        pytest.param(b"0" * 2_000_000 + b"1", id="long-octal"),
        pytest.param(b"1e" + b"1" * 100_000, id="long-exponent"),
        pytest.param(
            b"a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
            + b"".join(
                b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 40)
            ),
            id="billion-laughs",
        ),
        pytest.param(
            b"a: &a {"
            + b",".join(b"k%d: 1" % i for i in range(20_000))
            + b"}\n"
            + b"".join(b"b%d: {<<: *a}\n" % i for i in range(20_000)),
            id="merge-laughs",
        ),
        pytest.param(
            b"cdiVersion: 0.3.0\nkind: v.com/c\ncontainerEdits: &e {env: ["
            + b"A=1," * 20_000
            + b"]}\ndevices: ["
            + b"".join(b"{name: a%d, containerEdits: *e}," % i for i in range(20_000))
            + b"]",
            id="edits-laughs",
        ),
    ],
)
def test_hostile_documents_are_refused_cheaply(data: bytes) -> None:
    """Depth, length and aliases cost no more memory than a few times the file, and no recursion."""
    tracemalloc.start()
    try:
        with pytest.raises(CdiError):
            load_spec(data, "f")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 60_000_000


def test_honest_aliases_are_allowed() -> None:
    """Hundreds of devices that share their edits are a way to write a spec."""
    devices = "".join(f"- {{name: d{number}, containerEdits: *e}}\n" for number in range(300))
    spec = load_spec(
        f"cdiVersion: 0.5.0\nkind: v.com/c\ncontainerEdits: &e {{env: [A=1]}}\ndevices:\n{devices}".encode()
    )

    assert len(spec.devices) == 300


# What a spec and YAML's syntax are made of. N stands for a line feed.
_FRAGMENTS = [
    *(
        "cdiVersion:",
        "1.1.0",
        "kind:",
        "v.com/c",
        "devices:",
        "name:",
        "d",
        "containerEdits:",
        "env:",
        "path:",
    ),
    *(
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "-",
        "?",
        "&a",
        "*a",
        "<<:",
        "!!int",
        "!!binary",
        "!",
        "'",
        '"',
        "|",
        ">",
    ),
    *("A=1", "null", "0x1F", "1e3", ".inf", "~", "\\/", "\\u00e9", "\t", "%YAML", "---", "...", "#"),
    *("N", "N", "N", "N"),
]
_documents = st.lists(st.sampled_from(_FRAGMENTS), max_size=30).map(
    lambda parts: " ".join(parts).replace("N", "\n").encode()
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), _documents))
@example(b"\xef\xbb\xbf")
@example(b"\xff\xfe")
@example(b"&a [*a]")
@example(b"&a &a a")
@example(b"a: !<> b")
def test_any_bytes_decode_or_give_a_cdi_error(data: bytes) -> None:
    """There is no third outcome, and the error is printable."""
    text = ""
    try:
        load_spec(data, "f")
    except CdiError as error:
        text = str(error)

    assert text.isprintable()


_TEXT = st.text(
    st.characters(
        blacklist_categories=("Cs", "Cc", "Cn", "Zl", "Zp"), blacklist_characters="\ufeff\ufffe\uffff"
    )
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_TEXT.map(lambda text: "A=" + text), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_what_json_writes_is_read_back(env: list[str], number: int) -> None:
    """A spec written as JSON without escapes for characters beyond ASCII decodes to what was written."""
    edits = {"env": env, "additionalGids": [number]}
    document = {"cdiVersion": "1.0.0", "kind": "v.com/c", "devices": [{"name": "d", "containerEdits": edits}]}

    spec = load_spec(json.dumps(document, ensure_ascii=False).encode())

    assert spec.devices[0].container_edits == ContainerEdits(env=tuple(env), additional_gids=(number,))
