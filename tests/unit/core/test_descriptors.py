"""Message classes from a table: what the table says is what protobuf understands."""

from __future__ import annotations

import pytest
from cdi_courier import descriptors
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

FIELD = descriptor_pb2.FieldDescriptorProto
SCALARS = ["bool", "bytes", "int32", "int64", "string", "uint32", "uint64"]

names = st.from_regex(r"[a-z][a-z0-9]{0,6}(_[a-z][a-z0-9]{0,3})?", fullmatch=True)
# 19000 to 19999 are protobuf's own.
numbers = st.one_of(
    st.integers(1, 300),
    st.integers(1, 18_999),
    st.integers(20_000, 2**29 - 1),
    st.sampled_from([15, 16, 127, 128]),
)
types = st.one_of(
    st.sampled_from([*SCALARS, "Other"]),
    st.sampled_from([*SCALARS, "Other"]).map("{}*".format),
    st.sampled_from([*SCALARS, "Other"]).map("map<string,{}>".format),
)
# protobuf refuses two names that are one in JSON or as an entry of a map.
fields = st.lists(
    st.tuples(numbers, names, types),
    max_size=5,
    unique_by=(lambda field: field[0], lambda field: field[1].replace("_", "").lower()),
)


def type_of(text: str) -> tuple[int, str]:
    """A type as a descriptor has it."""
    if text in SCALARS:
        return getattr(FIELD, f"TYPE_{text.upper()}"), ""
    return FIELD.TYPE_MESSAGE, f".test.{text}"


@given(fields)
def test_a_table_is_the_descriptor_that_it_reads_like(made: list[tuple[int, str, str]]) -> None:
    """Each field has the number, name, type and label that are written, a map an entry of its own."""
    table = {"Message": ", ".join(f"{number} {name} {type_}" for number, name, type_ in made), "Other": ""}
    file = descriptor_pb2.FileDescriptorProto.FromString(descriptors._file("test", table))

    assert (file.name, file.package, file.syntax) == ("test.proto", "test", "proto3")
    message, other = file.message_type
    assert (message.name, other.name, len(other.field)) == ("Message", "Other", 0)
    entries = {entry.name: entry for entry in message.nested_type}
    assert len(entries) == sum(type_.startswith("map<") for _, _, type_ in made)
    for field, (number, name, type_) in zip(message.field, made, strict=True):
        repeated = type_.endswith("*") or type_.startswith("map<")
        assert (field.number, field.name) == (number, name)
        assert field.label == (FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL)
        if type_.startswith("map<"):
            entry = entries[field.type_name.rpartition(".")[2]]
            assert (field.type, field.type_name) == (FIELD.TYPE_MESSAGE, f".test.Message.{entry.name}")
            assert entry.options.map_entry
            key, value = entry.field
            assert (key.number, key.name, key.type) == (1, "key", FIELD.TYPE_STRING)
            assert (value.number, value.name) == (2, "value")
            assert (value.type, value.type_name) == type_of(type_[len("map<string,") : -1])
        else:
            assert (field.type, field.type_name) == type_of(type_.removesuffix("*"))
    assert set(descriptors.message_classes("test", table)) == {"Message", "Other"}


def test_a_message_comes_back_from_the_wire_as_it_was() -> None:
    """The classes read what they write, field by field."""
    m = descriptors.message_classes(
        "test",
        {"Pod": "1 id string, 6 labels map<string,Tag>, 10 ips string*, 300 n int64", "Tag": "2 of bytes"},
    )
    pod = m["Pod"](id="a", ips=["1", "2"], n=-5)
    pod.labels["x"].of = b"\xff"

    data = pod.SerializeToString()

    assert data.startswith(b"\x0a\x01a")
    assert m["Pod"].FromString(data) == pod


@pytest.mark.parametrize("field", ["1 name", "one name string", "1 name Missing"])
def test_a_mistake_in_a_table_is_found_at_once(field: str) -> None:
    """A field that cannot be read, or whose type is not there, is an error where the classes are made."""
    with pytest.raises((ValueError, TypeError, KeyError)):
        descriptors.message_classes("test", {"Message": field})
