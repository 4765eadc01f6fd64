"""From annotations to names: key forms, lists, limits (docs/facts.md#annotation-keys)."""

from __future__ import annotations

import json

import pytest
from cdi_courier.annotations import NVIDIA, Dialect, comma_list, compile_keys, requested_devices
from cdi_courier.dialects import DEVICE_INJECTOR, yaml_list
from cdi_courier.errors import AnnotationError
from cdi_courier.names import invalid_qualified
from hypothesis import given, settings
from hypothesis import strategies as st

DOMAIN = "nvidia.cdi.k8s.io"
FAMILIES = compile_keys([NVIDIA], [DOMAIN])
INJECTOR = compile_keys([DEVICE_INJECTOR], [DOMAIN])
BOTH = compile_keys([NVIDIA, DEVICE_INJECTOR], [DOMAIN])
NEW = "cdi-devices.noderesource.dev"
OLD = "cdi-devices.nri.io"
# The order in which the device injector looks.
SIX = [f"{domain}{form}" for form in ("/container.c", "/pod", "") for domain in (NEW, OLD)]


def ask(annotations: dict[str, str], container: str = "c", families=FAMILIES, **limits: int) -> list[str]:
    return list(requested_devices(annotations, container, families, **limits))


def refusal(
    annotations: dict[str, str], container: str = "c", families=FAMILIES, **limits: int
) -> AnnotationError:
    with pytest.raises(AnnotationError) as caught:
        requested_devices(annotations, container, families, **limits)
    return caught.value


def test_the_first_key_form_present_wins() -> None:
    """The container's key comes before the pod's, and the pod's before the bare one."""
    keys = [f"{DOMAIN}/container.c", f"{DOMAIN}/pod", DOMAIN]
    annotations = {key: f"v/c={number}" for number, key in enumerate(keys)}

    found = []
    for key in keys:
        found.append(ask(annotations))
        del annotations[key]

    assert found == [["v/c=0"], ["v/c=1"], ["v/c=2"]]
    assert ask(annotations) == []


@pytest.mark.parametrize("value", ["", " ", " \t\r\n"])
@pytest.mark.parametrize("key", [f"{DOMAIN}/container.c", f"{DOMAIN}/pod"])
def test_an_empty_value_is_a_hit_and_means_nothing(key: str, value: str) -> None:
    """A present key with a blank value hides the later forms and asks for nothing."""
    found = ask({key: value, DOMAIN: "v/c=a"})

    assert found == []


def test_another_containers_key_is_not_looked_at() -> None:
    """The key of one container says nothing about its neighbour."""
    annotations = {f"{DOMAIN}/container.a": "v/c=x", f"{DOMAIN}/container.": "v/c=y"}

    assert ask(annotations, "b") == []
    assert ask(annotations, "a") == ["v/c=x"]


def test_without_a_containers_name_its_form_is_not_looked_at() -> None:
    """While the runtime does not tell the name, only the pod's and the bare form count."""
    annotations = {
        f"{DOMAIN}/container.": "v/c=x",
        f"{DOMAIN}/container.{{container}}": "v/c=y",
        DOMAIN: "v/c=z",
    }

    found = ask(annotations, "")

    assert found == ["v/c=z"]


@pytest.mark.parametrize(
    "container", ["{domain}", "{container}", "{0}", "{", "}", "%s", "pod", "a/b", "\n", "\ud800"]
)
def test_a_containers_name_is_taken_literally(container: str) -> None:
    """A name with braces or other signs is part of the key as it stands."""
    key = f"{DOMAIN}/container.{container}"

    found = requested_devices({key: "v/c=a", f"{DOMAIN}/container.{DOMAIN}": "v/c=b"}, container, FAMILIES)

    assert found == {"v/c=a": key}


def test_each_name_is_told_with_the_key_that_asks_for_it() -> None:
    """The answer maps a name to its annotation key."""
    found = requested_devices({f"{DOMAIN}/pod": "v/c=a,v/c=b"}, "c", FAMILIES)

    assert found == {"v/c=a": f"{DOMAIN}/pod", "v/c=b": f"{DOMAIN}/pod"}


def test_blanks_around_names_are_trimmed() -> None:
    """Blanks, tabs and line ends around the items of a list do not count."""
    found = ask({DOMAIN: " v/c=a ,\tv/c=b\r\n, v/c=c"})

    assert found == ["v/c=a", "v/c=b", "v/c=c"]


@pytest.mark.parametrize(
    ("value", "position"), [(",", 1), ("v/c=a,", 2), (",v/c=a", 1), ("v/c=a,,v/c=b", 2), ("v/c=a, ,v/c=b", 2)]
)
def test_an_empty_item_is_an_error(value: str, position: int) -> None:
    """A superfluous comma is ANN002 and the message says which item and which key."""
    error = refusal({DOMAIN: value})

    assert error.code == "ANN002"
    assert f"item {position} " in error.message
    assert f'"{DOMAIN}"' in error.message
    assert error.fields["annotation"] == DOMAIN


@pytest.mark.parametrize(
    "value", ["x", "v/c=a;v/c=b", "v/c=a v/c=b", '["v/c=a"]', "v/c=a,x", "v/c=*", "v/c=a\0", "\xa0v/c=a"]
)
def test_what_is_not_a_qualified_name_is_an_error(value: str) -> None:
    """An item that is no qualified name is ANN001."""
    error = refusal({DOMAIN: value})

    assert error.code == "ANN001"


def test_duplicates_collapse_and_order_stays() -> None:
    """A name asked for twice is delivered once, at its first place."""
    found = ask({DOMAIN: "v/c=b,v/c=a,v/c=b, v/c=a"})

    assert found == ["v/c=b", "v/c=a"]


def test_domains_and_dialects_are_concatenated_and_deduplicated() -> None:
    """All domains of the first dialect come before the second dialect; the first mention counts."""
    families = compile_keys([NVIDIA, DEVICE_INJECTOR], [DOMAIN, "amd.cdi.k8s.io"])
    annotations = {
        NEW: '["v/c=inj", "v/c=amd"]',
        "amd.cdi.k8s.io/pod": "v/c=amd,v/c=both",
        DOMAIN: "v/c=both,v/c=nv",
    }

    found = requested_devices(annotations, "c", families)

    assert list(found) == ["v/c=both", "v/c=nv", "v/c=amd", "v/c=inj"]
    assert found["v/c=both"] == DOMAIN
    assert found["v/c=amd"] == "amd.cdi.k8s.io/pod"


def test_a_domain_that_is_not_configured_is_not_looked_at() -> None:
    """Only the configured domains count."""
    found = ask({"amd.cdi.k8s.io": "v/c=a"})

    assert found == []


def test_a_dialects_own_domains_replace_the_configured_ones() -> None:
    """A plugin's dialect with domains of its own is not asked about the configured ones."""
    families = compile_keys([Dialect("x", ("{domain}/x",), comma_list, domains=("x.io",))], [DOMAIN])

    found = ask({"x.io/x": "v/c=a", f"{DOMAIN}/x": "v/c=b"}, families=families)

    assert found == ["v/c=a"]


def test_a_value_may_be_as_long_as_the_limit_in_bytes() -> None:
    """The length counts in bytes, and the limit itself is still allowed."""
    value = "v/c=abc"

    assert ask({DOMAIN: value}, max_length=7) == [value]
    assert refusal({DOMAIN: value}, max_length=6).code == "ANN003"
    assert refusal({DOMAIN: "é" * 4}, max_length=7).code == "ANN003"
    assert refusal({DOMAIN: " " * 5}, max_length=4).code == "ANN003"


def test_the_number_of_names_is_limited_over_all_families() -> None:
    """The limit counts different names of all keys together; duplicates do not count."""
    annotations = {DOMAIN: "v/c=a,v/c=b,v/c=a", NEW: "[v/c=c]"}

    error = refusal(annotations, families=BOTH, max_names=2)

    assert error.code == "ANN004"
    assert DOMAIN in error.message
    assert NEW in error.message
    assert len(ask(annotations, families=BOTH, max_names=3)) == 3


def test_a_hostile_value_is_quoted_in_the_message() -> None:
    """No control character of a value reaches the message."""
    error = refusal({DOMAIN: "v/c=\x1b[2J\n"})

    assert "\x1b" not in str(error)
    assert "\n" not in str(error)


def test_the_device_injector_looks_at_six_keys_in_order() -> None:
    """Each form is tried in the new and then the old domain, container before pod before bare."""
    annotations = {key: f"[v/c={number}]" for number, key in enumerate(SIX)}

    found = []
    for key in SIX:
        found += ask(annotations, families=INJECTOR)
        del annotations[key]

    assert found == [f"v/c={number}" for number in range(6)]


@pytest.mark.parametrize(
    "value",
    [
        '["v/c=a", "v/c=b"]',
        "- v/c=a\n- v/c=b\n",
        "[v/c=a, v/c=b]",
        "---\n- v/c=a\n- v/c=b\n---\nother",
        '- "v/c=a"\n- v/c=b',
    ],
)
def test_the_device_injector_reads_yaml_and_json_lists(value: str) -> None:
    """Both block and flow lists are read; only the first document counts."""
    found = ask({NEW: value}, families=INJECTOR)

    assert found == ["v/c=a", "v/c=b"]


@pytest.mark.parametrize("value", ["null", "~", "[]", "", "# only a comment", "---", "Null", "NULL"])
def test_the_device_injectors_null_and_empty_list_mean_nothing(value: str) -> None:
    """A value without items is a hit and asks for nothing."""
    found = ask({NEW: value, OLD: "[v/c=a]"}, families=INJECTOR)

    assert found == []


@pytest.mark.parametrize(
    "value",
    [
        "v/c=a",
        '"v/c=a"',
        "{a: b}",
        "\ud800",
        '["v/c=\udfff"]',
        "[[v/c=a]]",
        "[{name: v/c=a}]",
        "[v/c=a",
        "\t- a",
        "- a: b: c",
        "'",
        "*x",
        "&x [*x]",
    ],
)
def test_what_is_not_a_list_of_strings_is_an_error(value: str) -> None:
    """A bare string, a mapping, a list of lists or broken YAML is ANN005 and names the key."""
    error = refusal({NEW: value}, families=INJECTOR)

    assert error.code == "ANN005"
    assert error.fields["annotation"] == NEW


@pytest.mark.parametrize("value", ["[" * 4000, "[" * 2000 + "]" * 2000, "{a: " * 1000, "- " * 2000])
def test_deep_nesting_is_an_error_and_nothing_worse(value: str) -> None:
    """A value nested thousands of levels deep is ANN005."""
    error = refusal({NEW: value}, families=INJECTOR)

    assert error.code == "ANN005"


def test_expanding_aliases_is_an_error_and_cheap() -> None:
    """A value that would blow up if it were expanded is refused."""
    lines = ["- &a0 [x]"] + [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]

    error = refusal({NEW: "\n".join(lines)}, families=INJECTOR)

    assert error.code == "ANN005"


@pytest.mark.parametrize("value", ['["v/c=a", ""]', "[x]", "[~]", "[1]", "[true]"])
def test_an_item_that_is_no_qualified_name_is_an_error(value: str) -> None:
    """The device injector's items are checked as any other."""
    error = refusal({NEW: value}, families=INJECTOR)

    assert error.code == "ANN001"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("abc0", min_size=1, max_size=4).map("v/c={}".format), max_size=5))
def test_a_json_list_of_names_is_read_as_json_reads_it(names: list[str]) -> None:
    """What json writes, the device injector reads."""
    found = yaml_list(json.dumps(names))

    assert found == names


@pytest.mark.parametrize("value", ['"null"', "'~'", '""', "!!str null"])
def test_a_quoted_null_is_a_string_and_so_an_error(value: str) -> None:
    """Only a plain null asks for nothing; a string is no list (docs/facts.md#device-injector-annotations)."""
    error = refusal({NEW: value}, families=INJECTOR)

    assert error.code == "ANN005"


def test_advice_about_a_name_suits_the_dialect() -> None:
    """Who writes a YAML list is not told to separate names by commas."""
    error = refusal({NEW: "[gpu0]"}, families=INJECTOR)

    assert "separated by commas" not in error.hint


KEYS = st.sampled_from([*SIX, f"{DOMAIN}/container.c", f"{DOMAIN}/pod", DOMAIN])
VALUES = st.one_of(
    st.text(alphabet=st.characters(), max_size=20),
    st.text(alphabet="v/c=a, \n[]{}:-\"'&*!|>#%@\t", max_size=30),
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.text(max_size=3))
def test_any_annotations_give_names_or_an_annotation_error(
    annotations: dict[str, str], container: str
) -> None:
    """Whatever a pod's author writes, the answer is valid names or one AnnotationError."""
    try:
        found = requested_devices(annotations, container, BOTH)
    except AnnotationError:
        return

    assert all(invalid_qualified(name) is None for name in found)
    assert set(found.values()) <= set(annotations)
