"""Reading manifests: every kind with pods, and nothing hostile."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml
from cdi_courier import manifests
from cdi_courier.errors import ManifestError
from cdi_courier.manifests import Container, PodTemplate
from hypothesis import given, settings
from hypothesis import strategies as st

SPEC = {"containers": [{"name": "c"}]}


def only(text: str | bytes | dict[str, Any]) -> PodTemplate:
    if isinstance(text, dict):
        text = json.dumps(text)
    (template,) = manifests.read(text.encode() if isinstance(text, str) else text)
    return template


def refusal(text: str | bytes) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        manifests.read(text.encode() if isinstance(text, str) else text)
    return caught.value


def pod(**metadata: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": metadata, "spec": SPEC}


@pytest.mark.parametrize(
    ("kind", "nested", "place", "name"),
    [
        ("Pod", (), "metadata.annotations", "x"),
        ("PodTemplate", ("template",), "template.metadata.annotations", "x-00000"),
        ("Deployment", ("spec", "template"), "spec.template.metadata.annotations", "x-0000000000-00000"),
        ("DaemonSet", ("spec", "template"), "spec.template.metadata.annotations", "x-00000"),
        ("StatefulSet", ("spec", "template"), "spec.template.metadata.annotations", "x-0"),
        ("ReplicaSet", ("spec", "template"), "spec.template.metadata.annotations", "x-00000"),
        ("Job", ("spec", "template"), "spec.template.metadata.annotations", "x-00000"),
        (
            "CronJob",
            ("spec", "jobTemplate", "spec", "template"),
            "spec.jobTemplate.spec.template.metadata.annotations",
            "x-00000000-00000",
        ),
        ("SomethingOfACustomResource", ("spec", "template"), "spec.template.metadata.annotations", "x-00000"),
    ],
)
def test_each_kind_keeps_its_pods_where_kubernetes_has_them(
    kind: str, nested: tuple[str, ...], place: str, name: str
) -> None:
    """Annotations and containers come from the pod template, name and namespace from the object."""
    inner: dict[str, Any] = {"metadata": {"annotations": {"key": "inner"}}, "spec": SPEC}
    document = inner
    for step in reversed(nested):
        document = {step: document}
    document["metadata"] = {**document.get("metadata", {}), "name": "x", "namespace": "n"}
    document["kind"] = kind
    template = only(document)

    assert (template.kind, template.name, template.namespace, template.pod) == (kind, "x", "n", name)
    assert (template.place, dict(template.annotations)) == (place, {"key": "inner"})
    assert template.containers == (Container("c", "container"),)


def test_containers_come_in_the_order_in_which_they_start() -> None:
    """Init containers are first and ephemeral ones last, whatever the order in the file."""
    spec = {key: [{"name": key[:4]}] for key in ("ephemeralContainers", "containers", "initContainers")}
    template = only({"kind": "Pod", "metadata": {}, "spec": spec})

    assert [(c.name, c.type) for c in template.containers] == [
        ("init", "init container"),
        ("cont", "container"),
        ("ephe", "ephemeral container"),
    ]


def test_lists_hold_objects_and_lists() -> None:
    """Items of a List, also of a List in a List, are read in order and know their place."""
    inner = {"kind": "PodList", "items": [pod(name="b"), pod(name="c")]}
    data = json.dumps({"kind": "List", "items": [pod(name="a"), inner, {"kind": "Secret"}, pod(name="d")]})
    found = manifests.read(data.encode())

    assert [(t.name, t.item) for t in found] == [
        ("a", "items[0]"),
        ("b", "items[1].items[0]"),
        ("c", "items[1].items[1]"),
        ("d", "items[3]"),
    ]


def test_documents_are_counted_with_their_lines() -> None:
    """An empty document has a number too, and yields nothing."""
    text = (
        "# first\n---\n" + json.dumps(pod(name="a")) + "\n---\n---\n# comment\n" + json.dumps(pod(name="b"))
    )
    found = manifests.read(text.encode())

    assert [(t.name, t.document, t.line) for t in found] == [("a", 1, 2), ("b", 3, 5)]


def test_the_namespace_is_filled_in_only_where_there_is_none() -> None:
    """A namespace of its own stays."""
    filled = [manifests.in_namespace(only(pod(**m)), "given").namespace for m in ({}, {"namespace": "own"})]

    assert filled == ["given", "own"]


def test_a_generated_name_is_completed() -> None:
    """A pod with generateName is judged under a name that begins with it."""
    template = only(pod(generateName="train-"))

    assert (template.name, template.pod) == ("train-", "train-00000")


def test_an_empty_annotation_is_there_and_empty() -> None:
    """Null is the empty string, as Kubernetes reads it."""
    template = only("kind: Pod\nmetadata: {annotations: {k: }}\nspec: {containers: [{name: c}]}")

    assert template.annotations == {"k": ""}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("1", "a number"),
        ("yes", "a boolean"),
        ("[a]", "a list"),
        ("{a: b}", "a mapping"),
        ("0x1F", "a number"),
    ],
)
def test_an_annotation_that_is_no_text_is_a_problem_and_not_there(value: str, what: str) -> None:
    """The API server refuses it, so it asks for nothing; the sentence says what it is."""
    template = only(
        f"kind: Pod\nmetadata: {{annotations: {{k: {value}}}}}\nspec: {{containers: [{{name: c}}]}}"
    )

    assert template.annotations == {}
    assert template.problems == (
        f'annotation "k" is {what}, and Kubernetes takes only text; put the value in quotes',
    )


@pytest.mark.parametrize(
    "text",
    [
        "kind: Pod\nmetadata: {annotations: {k: a, k: b}}\nspec: {containers: [{name: c}]}",
        '{"kind":"Pod","metadata":{"annotations":{"k":"a","k":"b"}},"spec":{"containers":[{"name":"c"}]}}',
    ],
    ids=["YAML", "JSON"],
)
def test_the_last_of_a_repeated_key_counts_and_it_is_a_problem(text: str) -> None:
    """Both readers see that the first value is lost."""
    template = only(text)

    assert template.annotations == {"k": "b"}
    assert template.problems[0].startswith('annotation "k" is there more than once')


def test_two_mappings_of_annotations_are_a_problem() -> None:
    """The first of two ``annotations:`` is lost as a whole."""
    text = (
        "kind: Pod\nmetadata:\n  annotations: {a: v}\n  annotations: {b: w}\nspec: {containers: [{name: c}]}"
    )
    template = only(text)

    assert template.annotations == {"b": "w"}
    assert template.problems[0].startswith("metadata.annotations is there more than once")


def test_aliases_and_merge_keys_are_followed() -> None:
    """What is merged gives way to what is written, and the first of a list to the later ones."""
    text = """
kind: List
items:
  - kind: Pod
    metadata: {name: a, annotations: &a {x: "1", y: "1"}}
    spec: &spec {containers: [{name: &c c}]}
  - kind: Pod
    metadata: {name: *c, annotations: {<<: [*a, {y: "3", z: "3"}], x: "2"}}
    spec: *spec
"""
    _, second = manifests.read(text.encode())

    assert (second.name, second.annotations) == ("c", {"x": "2", "y": "1", "z": "3"})
    assert second.containers == (Container("c", "container"),)


def test_annotations_that_stand_elsewhere_are_kept_with_their_place() -> None:
    """Those of the workload, of labels and of places that Kubernetes does not know."""
    document = {
        "kind": "Deployment",
        "metadata": {"annotations": {"a": "1"}, "labels": {"b": "1"}},
        "annotations": {"c": "1"},
        "spec": {
            "annotations": {"d": "1"},
            "template": {
                "metadata": {"labels": {"e": "1"}},
                "spec": {"annotations": {"f": "1"}, "containers": [{"name": "c", "annotations": {"g": "1"}}]},
            },
        },
    }
    template = only(document)

    assert {place: [*found] for place, found in template.elsewhere.items()} == {
        "metadata.annotations": ["a"],
        "metadata.labels": ["b"],
        "annotations": ["c"],
        "spec.annotations": ["d"],
        "spec.template.metadata.labels": ["e"],
        "spec.template.spec.annotations": ["f"],
        "spec.template.spec.containers[0].annotations": ["g"],
    }


def test_json_may_hold_what_yaml_cannot() -> None:
    """Half a surrogate pair, tabs and an escaped slash are read as JSON has them."""
    text = '{\t"kind": "Pod",\n\t"metadata": {"name": "\\ud800\\/"}, "spec": {"containers": [{"name": "c"}]}}'

    assert only(text).name == "\ud800/"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("text", ["kind: Pod\nspec: {containers: [{name: ü}]}", json.dumps(pod())])
def test_a_byte_order_mark_is_no_hindrance(text: str, encoding: str) -> None:
    """Files that Windows editors have written are read."""
    template = only(text.encode(encoding))

    assert template.kind == "Pod"


# --- what cannot be used


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("a: [", "EXP002", "line 2"),
        ("kind: Pod\n\tx: y", "EXP002", "line 2"),
        (b"\xff\xfe\x00", "EXP002", "neither YAML nor JSON"),
        (b"kind: \x00", "EXP002", "neither YAML nor JSON"),
        ("kind: *x", "EXP002", 'alias "x" names nothing'),
        ("a: &a [*a]", "EXP002", 'alias "a" names nothing'),
        ("kind: Pod\n? [a]\n: b", "EXP002", "line 2: a key must be text"),
        ("a: &a []\n*a : b", "EXP002", "a key must be text"),
        ("kind: Pod\nmetadata: {<<: 1}", "EXP002", "<< takes a mapping"),
        ("kind: Pod\nname: {{ .Values.name }}", "EXP002", "helm template"),
        ("name: {{ .Values.name }}: x", "EXP002", "helm template"),
        ("- kind: Pod", "EXP004", "document 1 (line 1): a Kubernetes object is a mapping, this is a list"),
        ("text", "EXP004", "this is text"),
        ("metadata: {}", "EXP004", "there is no kind in it"),
        ("kind: 5", "EXP004", "there is no kind in it"),
        ("kind: List\nitems: [{kind: Secret}, 3]", "EXP004", "document 1 (line 1), items[1]: "),
        ("kind: Secret\n---\nkind: Pod", "EXP004", "document 2 (line 2): spec has no containers"),
        ("kind: Pod\nspec: {containers: []}", "EXP004", "spec has no containers"),
        ("kind: Deployment\nspec: {}", "EXP004", "spec.template.spec has no containers (a template has"),
        ("kind: Pod\nspec: []", "EXP004", "spec must be a mapping, not a list"),
        ("kind: Pod\nspec: {containers: {}}", "EXP004", "spec.containers must be a list, not a mapping"),
        ("kind: Pod\nspec: {containers: [a]}", "EXP004", "spec.containers[0] must be a mapping, not text"),
        ("kind: Pod\nspec: {containers: [{image: a}]}", "EXP004", "spec.containers[0] has no name"),
        ("kind: Pod\nspec: {containers: [{name: 1}]}", "EXP004", "spec.containers[0].name must be a string"),
        ("kind: Pod\nmetadata: {name: [a]}", "EXP004", "metadata.name must be a string, not a list"),
        ("kind: Pod\nmetadata: {annotations: [a]}", "EXP004", "metadata.annotations must be a mapping"),
        ("", "EXP005", "it is empty"),
        ("---\n---\nnull\n# nothing", "EXP005", "it is empty"),
        ("kind: Role\n---\nkind: Secret\n---\nkind: Role", "EXP005", 'it holds "Role", "Secret"'),
        ("kind: List\nitems: []", "EXP005", "it is empty"),
        ('kind: "\\e[2J"', "EXP005", 'it holds "\\u001b[2J"'),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_words(text: str | bytes, code: str, words: str) -> None:
    """The message says where and what, and its code what kind of mistake it is."""
    error = refusal(text)

    assert error.code == code
    assert words in str(error)


# Each would be gigabytes, if it were written out, or overflow a stack.
BOMBS = {
    "laughs": "a: &a0 [x, x]\n" + "".join(f"b{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 12)),
    "containers": "kind: Pod\nx0: &a0 [{name: c}]\n"
    + "".join(f"x{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 12))
    + "spec: {containers: *a11}",
    "merges": "a0: &a0 {k: v}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}]}}\n" for n in range(1, 12)),
    "lists in lists": "x: &a0 {kind: List, items: []}\n"
    + "".join(f"y{n}: &a{n} {{kind: List, items: [{f'*a{n - 1}, ' * 9}]}}\n" for n in range(1, 12)),
    "brackets": "[" * 900,
    "braces": "{a: " * 100_000,
    "dashes": "- " * 100_000,
    "JSON": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "JSON lists": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "nodes": "[" + "x," * 600_000 + "]",
    "pods": "kind: List\nitems:\n- &p {kind: Pod, spec: {containers: [{name: c}]}}\n" + "- *p\n" * 6_000,
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_what_multiplies_or_nests_beyond_measure_is_refused_soon(text: str) -> None:
    """A bomb is EXP003 in less than the seconds that its size alone would cost."""
    before = time.process_time()
    error = refusal(text)

    assert error.code == "EXP003"
    assert time.process_time() - before < 10


def test_a_file_that_is_too_large_is_refused_unread() -> None:
    """One byte more than the limit is EXP001, whatever it holds."""
    error = refusal(b"#" * (manifests.MAX_BYTES + 1))

    assert error.code == "EXP001"


def test_a_large_file_of_ordinary_pods_is_read() -> None:
    """A few thousand containers, as a whole cluster has them, are no bomb."""
    every = [
        {**pod(name=f"p{n}", annotations={"nvidia.cdi.k8s.io/pod": "nvidia.com/gpu=0"}), "status": {"x": [1]}}
        for n in range(3000)
    ]
    text = "\n---\n".join(map(json.dumps, every))

    assert len(manifests.read(text.encode())) == 3000


NAMES = st.sampled_from(
    (
        "kind",
        "metadata",
        "spec",
        "template",
        "jobTemplate",
        "containers",
        "initContainers",
        "items",
        "name",
        "annotations",
        "labels",
        "k",
    )
)
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            NAMES,
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(["Pod", "List", "Deployment", "CronJob", "PodTemplate", "X"])


def outcome(data: bytes) -> object:
    """The templates, or the code of the refusal; anything else is a failure."""
    try:
        return manifests.read(data)
    except ManifestError as error:
        return error.code


@settings(max_examples=300, deadline=None)
@given(KINDS, st.fixed_dictionaries({"spec": TREES, "metadata": TREES, "template": TREES, "items": TREES}))
def test_any_tree_is_read_or_refused_in_words_and_alike_as_yaml(kind: str, tree: dict[str, Any]) -> None:
    """Whatever stands where, there are templates or an error; JSON and YAML of the same tree agree."""
    tree = {**tree, "kind": kind}
    as_json = outcome(json.dumps(tree).encode())
    try:
        text = yaml.safe_dump(tree, allow_unicode=True).encode()
    except UnicodeError:
        text = b""

    assert as_json
    if text and all(word not in json.dumps(tree) for word in ("NaN", "Infinity", "\\u", "e+", "e-")):
        assert outcome(text) == as_json


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(alphabet="kind: Pod\nspec[]{}&*a,-?|>'\"<#!%@`\t", max_size=80).map(str.encode),
        st.text(alphabet="ab:[]{}&*,- \n<", max_size=40).map(lambda t: f"kind: Pod\nspec: {t}".encode()),
    )
)
def test_any_bytes_are_read_or_refused_in_words(data: bytes) -> None:
    """No input raises anything but an error with a code."""
    assert outcome(data)
