"""``explain``: what a manifest's containers would get, and the sentence for each mistake people make."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import cdi_courier.cli.explain as command
import pytest
from cdi_courier import explain, manifests
from cdi_courier.choice import choose_all
from cdi_courier.cli import command as main
from cdi_courier.errors import ManifestError, printable
from cdi_courier.hookspecs import API_VERSION, Choice, Offer
from cdi_courier.host.model import Fact, Host, Runtime
from cdi_courier.injector import Injection
from cdi_courier.plugins import Plugins, discover
from cdi_courier.request import ContainerRequest
from cdi_courier.service import make_injector
from cdi_courier.settings import AnnotationsSettings, CdiSettings, DeliverySettings, Settings
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

MANIFESTS = sorted((Path(__file__).parents[2] / "data/manifests").glob("*.yaml"))
DOMAIN = "nvidia.cdi.k8s.io"
CONTAINERD = Runtime("containerd", "containerd", "2.1.9")
PODMAN = Runtime("podman", "podman", "5.4.0")


class FakeBackend:
    """Serves containerd at once, and loses additional groups."""

    name = "fake"
    api_version = API_VERSION

    def __init__(self, needs: Any = "nothing", failure: Exception | None = None) -> None:
        self._needs = needs
        self._failure = failure

    def offer(self, runtime: Runtime, settings: Settings) -> Offer:
        needs = self._needs if runtime.kind == "containerd" else "impossible"
        return Offer("fake", "full", needs, f"as a test wants it for {runtime.kind}")

    def undeliverable(
        self, runtime: Runtime, injection: Injection, settings: Settings
    ) -> Sequence[tuple[str, str]]:
        if self._failure is not None:
            raise self._failure
        return [
            (f"additional group {gid}", "NRI cannot add groups") for gid in injection.edits.additional_gids
        ]


def spec(kind: str, devices: dict[str, Any], **common: Any) -> str:
    listed = [{"name": name, "containerEdits": edits} for name, edits in devices.items()]
    document = {"cdiVersion": "0.7.0", "kind": kind, "devices": listed, "containerEdits": common}
    return json.dumps(document)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spec files of a host with two GPUs and devices that cannot be delivered."""
    path = tmp_path_factory.mktemp("cdi")
    gpus = {
        name: {"deviceNodes": [{"path": f"/dev/nvidia{name}", "hostPath": "/dev/null"}]}
        for name in ("0", "1", "all")
    }
    (path / "nvidia.json").write_text(spec("nvidia.com/gpu", gpus, env=["NVIDIA_VISIBLE_DEVICES=void"]))
    (path / "management.json").write_text(spec("management.nvidia.com/gpu", {"all": {"env": ["ALL=1"]}}))
    odd = {
        "gone": {"deviceNodes": [{"path": "/dev/gone"}]},
        "group": {"additionalGids": [44]},
        "rdt": {"intelRdt": {"closID": "a"}},
        "other": {
            "intelRdt": {"closID": "b"},
            "mounts": [{"hostPath": "/a", "containerPath": "/b"}],
            "netDevices": [{"hostInterfaceName": "eth1", "name": "net0"}],
            "hooks": [{"hookName": "createContainer", "path": "/bin/hook"}],
        },
    }
    text = spec("vendor.com/dev", odd).replace("0.7.0", "1.1.0")
    (path / "odd.json").write_text(text)
    return path


@pytest.fixture(scope="module")
def config(folder: Path) -> Settings:
    """Settings that trust those files."""
    return Settings(cdi=CdiSettings(dirs=(str(folder),), trust="any"))


def plugins_of(backend: FakeBackend | None) -> Plugins:
    return attrs.evolve(discover(found=[]), backends={} if backend is None else {"fake": backend})


def explained(
    text: str | bytes,
    config: Settings,
    *,
    backend: FakeBackend | None = None,
    runtimes: Sequence[Runtime] = (CONTAINERD,),
    choices: Sequence[Choice] | None = None,
    diff: bool = False,
) -> list[dict[str, Any]]:
    plugins = plugins_of(backend or FakeBackend())
    data = text.encode() if isinstance(text, str) else text
    found = explain.report(
        [manifests.in_namespace(template, "default") for template in manifests.read(data)],
        make_injector(config, plugins),
        config,
        plugins,
        choose_all(plugins, runtimes, config) if choices is None else choices,
        diff=diff,
    )
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def pod(annotations: dict[str, Any], *names: str, namespace: str = "gpu-operator") -> str:
    containers = [{"name": name} for name in names or ("c",)]
    metadata = {"name": "p", "namespace": namespace, "annotations": annotations}
    return json.dumps({"kind": "Pod", "metadata": metadata, "spec": {"containers": containers}})


def only(found: list[dict[str, Any]]) -> dict[str, Any]:
    ((container,),) = [entry["containers"] for entry in found]
    return container  # type: ignore[no-any-return]


def words(found: list[dict[str, Any]]) -> str:
    """A report as sentences, one a line."""
    lines = []
    for container in (c for entry in found for c in entry["containers"]):
        name, key = container["name"], container["key"]
        lines += [
            f"device {d['name']} for {name} by {d['key']}, {d['verdict']} by {d['rule']}"
            for d in container["devices"]
        ] or [f"nothing for {name}" + (f" by {key}" if key else "")]
        lines += container["problems"]
        lines += [
            f"{lost['backend']} on {lost['runtime']} cannot deliver {lost['edit']}: {lost['reason']}"
            for lost in container["undeliverable"]
        ]
    return "\n".join(lines)


def header(file: Path, name: str) -> list[str]:
    """The values of one kind of comment at the top of a manifest."""
    prefix = f"# {name}: "
    return [line[len(prefix) :] for line in file.read_text().splitlines() if line.startswith(prefix)]


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_a_manifest_gets_the_sentence_that_it_must(file: Path, config: Settings) -> None:
    """Each manifest of the collection is answered in the words at its top, and is delivered or not."""
    dialects = tuple(" ".join(header(file, "dialects") or ["nvidia"]).split())
    config = attrs.evolve(config, annotations=AnnotationsSettings(dialects=dialects))
    expected = header(file, "says")

    found = explained(file.read_text(), config)
    said = words(found)

    assert expected
    assert [sentence for sentence in expected if sentence not in said] == [], said
    assert [str(int(not explain.delivered(found)))] == header(file, "exit")


def test_the_collection_is_as_large_as_promised() -> None:
    """There are at least 25 manifests of the kinds that people post."""
    assert len(MANIFESTS) >= 25


def test_a_report_has_the_promised_shape(config: Settings) -> None:
    """A container's entry says key, devices, verdict, rule, edits with files, losses and problems."""
    (entry,) = explained(pod({f"{DOMAIN}/pod": "nvidia.com/gpu=0"}), config)
    (container,) = entry["containers"]

    assert entry["document"] == {
        "number": 1,
        "line": 1,
        "item": "",
        "kind": "Pod",
        "namespace": "gpu-operator",
        "name": "p",
    }
    assert set(container) == {
        "name", "type", "key", "devices", "verdict", "rule", "edits", "undeliverable", "problems",
    }  # fmt: skip
    assert (container["key"], container["verdict"], container["rule"], container["problems"]) == (
        f"{DOMAIN}/pod",
        "allowed",
        "the built-in rule",
        [],
    )


def test_each_edit_has_the_file_and_the_device_that_it_came_from(config: Settings, folder: Path) -> None:
    """A spec's own edits come once and before its first device's; they belong to no device."""
    asked = "nvidia.com/gpu=0,vendor.com/dev=rdt,nvidia.com/gpu=1,vendor.com/dev=other"
    container = only(explained(pod({DOMAIN: asked}), config))
    nvidia, odd = str(folder / "nvidia.json"), str(folder / "odd.json")

    assert [(edit["edit"], edit["file"], edit["device"]) for edit in container["edits"]] == [
        ('env "NVIDIA_VISIBLE_DEVICES=void"', nvidia, None),
        ('device node "/dev/null" → "/dev/nvidia0"', nvidia, "nvidia.com/gpu=0"),
        ('device node "/dev/null" → "/dev/nvidia1"', nvidia, "nvidia.com/gpu=1"),
        ('network device "eth1" → "net0"', odd, "vendor.com/dev=other"),
        ('hook createContainer "/bin/hook"', odd, "vendor.com/dev=other"),
        ('mount "/a" → "/b"', odd, "vendor.com/dev=other"),
        ('intelRdt "{\\"closID\\": \\"b\\"}"', odd, "vendor.com/dev=other"),
    ]


def test_the_diff_shows_what_changes_in_the_config(config: Settings) -> None:
    """Lines that the edits add begin with a plus; the device's rule in the cgroup is among them."""
    container = only(explained(pod({DOMAIN: "nvidia.com/gpu=0"}), config, diff=True))
    added = [line[1:].strip() for line in container["diff"].splitlines() if line.startswith("+")]

    assert '"NVIDIA_VISIBLE_DEVICES=void"' in added
    assert '"path": "/dev/nvidia0",' in added
    assert '"access": "rwm",' in added


def test_a_container_that_asks_for_nothing_has_an_empty_diff(config: Settings) -> None:
    """Nothing is asked, nothing changes, and that is a success."""
    found = explained(pod({}), config, diff=True)

    assert only(found)["diff"] == ""
    assert explain.delivered(found)


def test_an_empty_value_shields_a_container_from_the_pods_devices(config: Settings) -> None:
    """The key of a blank value is shown, the container gets nothing, its neighbour does."""
    text = pod({f"{DOMAIN}/container.a": " ", f"{DOMAIN}/pod": "nvidia.com/gpu=0"}, "a", "b")
    ((a, b),) = [entry["containers"] for entry in explained(text, config)]

    assert (a["key"], a["devices"], a["verdict"]) == (f"{DOMAIN}/container.a", [], None)
    assert [device["name"] for device in b["devices"]] == ["nvidia.com/gpu=0"]


def test_keys_of_two_dialects_are_both_named(config: Settings) -> None:
    """Families are concatenated, so each device names its own key and the container names both."""
    config = attrs.evolve(config, annotations=AnnotationsSettings(dialects=("nvidia", "device-injector")))
    old = "cdi-devices.nri.io/pod"
    found = explained(pod({DOMAIN: "nvidia.com/gpu=0", old: "[nvidia.com/gpu=1]"}), config)
    container = only(found)

    assert container["key"] == f"{DOMAIN}, {old}"
    assert [device["key"] for device in container["devices"]] == [DOMAIN, old]


def test_a_mistyped_container_name_concerns_only_the_one_that_was_meant(config: Settings) -> None:
    """The sentence stands with the nearest container and not with its neighbours."""
    text = pod({f"{DOMAIN}/container.exportr": "nvidia.com/gpu=0"}, "exporter", "web")
    ((exporter, web),) = [entry["containers"] for entry in explained(text, config)]

    assert len(exporter["problems"]) == 1
    assert web["problems"] == []


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [("default", "nvidia.com/gpu=0", "on_denied"), ("gpu-operator", "no.such/gpu=0", "on_unresolvable")],
    ids=["denied", "unresolvable"],
)
def test_what_would_be_skipped_is_said_to_start_without_devices(
    config: Settings, key: str, value: str, setting: str
) -> None:
    """Where settings say skip, the container starts, and its devices are not delivered all the same."""
    tolerant = attrs.evolve(config, delivery=DeliverySettings(**{setting: "skip"}))
    found = explained(pod({DOMAIN: value}, namespace=key), tolerant)

    assert f'the container starts without its devices: [delivery] {setting} = "skip"' in words(found)
    assert not explain.delivered(found)


# --- backends and runtimes


def test_every_backend_is_asked_for_every_runtime(config: Settings) -> None:
    """What a backend cannot serve at all it loses entirely; only what is active decides."""
    found = explained(pod({DOMAIN: "nvidia.com/gpu=0"}), config, runtimes=(CONTAINERD, PODMAN))

    assert only(found)["undeliverable"] == [
        {
            "runtime": "podman",
            "backend": "fake",
            "active": False,
            "edit": "everything",
            "reason": "as a test wants it for podman",
        }
    ]
    assert explain.delivered(found)


def test_what_the_active_backend_loses_is_not_delivered(config: Settings) -> None:
    """One lost edit of the backend that serves is a failure; the same of one that could serve is not."""
    text = pod({DOMAIN: "vendor.com/dev=group"})
    found = explained(text, config)
    (lost,) = only(found)["undeliverable"]

    assert (lost["active"], lost["edit"]) == (True, "additional group 44")
    assert not explain.delivered(found)


@pytest.mark.parametrize(
    ("backend", "runtimes", "sentence"),
    [
        (
            FakeBackend("restart"),
            (CONTAINERD,),
            "nothing would be delivered on containerd: no backend can serve",
        ),
        (FakeBackend(), (), "this host has no container runtime that pods could run on"),
        (FakeBackend(), (PODMAN,), "this host has no container runtime that pods could run on"),
        (
            FakeBackend(),
            (CONTAINERD, attrs.evolve(PODMAN, facts={"kubelet": Fact(True, "a test")})),
            "nothing would be delivered on podman",
        ),
    ],
    ids=["nothing serves yet", "no runtime", "only Podman", "the kubelet's runtime is not served"],
)
def test_a_host_that_serves_no_pods_delivers_nothing(
    config: Settings, backend: FakeBackend, runtimes: Sequence[Runtime], sentence: str
) -> None:
    """A granted device is not delivered if nothing serves the pods' runtime, and the cause is said."""
    found = explained(pod({DOMAIN: "nvidia.com/gpu=0"}), config, backend=backend, runtimes=runtimes)

    assert sentence in words(found)
    assert not explain.delivered(found)


def test_a_pod_that_asks_for_nothing_needs_no_backend(config: Settings) -> None:
    """A host without runtimes is no failure for it."""
    found = explained(pod({}), config, runtimes=())

    assert explain.delivered(found)


def test_a_backend_that_fails_hurts_nobody(config: Settings) -> None:
    """Its exception is shown in place of what it loses, harmless."""
    broken = FakeBackend(failure=RuntimeError("\x1b[2J"))
    found = explained(pod({DOMAIN: "nvidia.com/gpu=0"}), config, backend=broken)
    (lost,) = only(found)["undeliverable"]

    assert (lost["edit"], lost["reason"]) == ("everything", '"RuntimeError: \\u001b[2J"')


def test_a_backend_that_makes_no_offer_delivers_nothing(config: Settings) -> None:
    """Why it could not be asked is the reason, in the words of the choice."""

    class Silent(FakeBackend):
        def offer(self, runtime: Runtime, settings: Settings) -> Offer:
            raise RuntimeError("no")

    container = only(explained(pod({DOMAIN: "nvidia.com/gpu=0"}), config, backend=Silent()))
    (lost,) = container["undeliverable"]

    assert lost["edit"] == "everything"
    assert lost["reason"].startswith("PLG002: ")


# --- keys


@pytest.mark.parametrize(
    "key",
    [
        "prometheus.io/scrape",
        "kubectl.kubernetes.io/last-applied-configuration",
        "nvidia.com/gpu.deploy.driver",
        "k8s.v1.cni.cncf.io/networks",
        "container.apparmor.security.beta.kubernetes.io/c",
        "cluster-autoscaler.kubernetes.io/safe-to-evict",
        "node.kubernetes.io/exclude",
        "sidecar.istio.io/inject",
        "io.kubernetes.cri-o.Devices",
        "sysctl.noderesource.dev/pod",
        "network-devices.noderesource.dev/pod",
        "network-devices.nri.io",
        "noderesource.dev",
        "cdi.kubevirt.io/storage.import.endpoint",
        "resource.k8s.io/pod-claim-name",
        "cni.k8s.io/x",
        "*",
        "",
    ],
)
def test_annotations_of_others_are_nobodys_mistake(config: Settings, key: str) -> None:
    """Keys that mean something else are passed over in silence."""
    found = explained(pod({key: "x"}), config)

    assert only(found)["problems"] == []


@pytest.mark.parametrize(
    "domain",
    [
        "nividia.cdi.k8s.io",
        "nvidia-cdi.k8s.io",
        "nvidia.com.cdi.k8s.io",
        "NVIDIA.cdi.k8s.io",
        "nvidia.cdi.kubernetes.io",
        "cdi.nvidia.k8s.io",
        "cdi.nvidia.com",
        "nvidia.cdi",
        "nvidia.cdi.k8s",
        "nvidia.k8s.io",
    ],
)
def test_a_domain_that_comes_near_is_put_right(config: Settings, domain: str) -> None:
    """Slips of the finger, other orders and other endings are all told the key that was meant."""
    (problem,) = only(explained(pod({f"{domain}/pod": "nvidia.com/gpu=0"}), config))["problems"]

    assert f'did you mean "{DOMAIN}/pod"?' in problem


@pytest.mark.parametrize("place", ["metadata", "template"])
def test_the_same_annotation_on_workload_and_template_is_no_mistake(config: Settings, place: str) -> None:
    """Tools copy annotations to both; what is on the template is what counts."""
    annotations = {f"{DOMAIN}/pod": "nvidia.com/gpu=0"}
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": "c"}]}}
    metadata = {"name": "d", "namespace": "gpu-operator"}
    if place == "metadata":
        metadata["annotations"] = annotations  # type: ignore[assignment]
    document = {"kind": "Deployment", "metadata": metadata, "spec": {"template": template}}
    found = explained(json.dumps(document), config)

    assert explain.delivered(found)


def test_not_every_one_of_many_mistakes_is_listed(config: Settings) -> None:
    """A pod with hundreds of wrong keys gets fifty sentences and one that there are more."""
    found = explained(pod({f"cdi.k8s.io/{number}": "x" for number in range(300)}), config)
    problems = only(found)["problems"]

    assert len(problems) == 51
    assert problems[-1] == "there are more problems with this pod's annotations"


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("cdi.k8s.io/x", "does nothing on a pod"),
        ("nvidia.cdi.k8s.oi/pod", f'did you mean "{DOMAIN}/pod"?'),
        ("cdi-devices.nri.io", "is of the dialect device-injector, which is off"),
    ],
)
def test_what_would_do_nothing_on_the_pod_is_not_sent_there(
    config: Settings, key: str, sentence: str
) -> None:
    """On a workload, an annotation that no pod may use is told what is wrong with it, not to move."""
    metadata = {"name": "d", "annotations": {key: "nvidia.com/gpu=0"}}
    template = {"spec": {"containers": [{"name": "c"}]}}
    document = {"kind": "Deployment", "metadata": metadata, "spec": {"template": template}}
    (problem,) = only(explained(json.dumps(document), config))["problems"]

    assert sentence in problem
    assert "spec.template" not in problem


KEYS = st.one_of(
    st.text(max_size=30),
    st.builds(
        "{}{}{}".format,
        st.sampled_from([DOMAIN, "cdi.k8s.io", "amd.cdi.k8s.io", "cdi-devices.nri.io", "nvidia.cdi.k8s.oi"]),
        st.sampled_from(["", "/pod", "/container.", "/container.c", "/"]),
        st.text(max_size=70),
    ),
)
VALUES = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="nvidia.com/gpu=0,[]{}\"'-: \n*&", max_size=40),
    st.sampled_from(["nvidia.com/gpu=0", "vendor.com/dev=group", "vendor.com/dev=gone", "x.y/z=a"]),
)


@examples(max_examples=150, deadline=None)
@given(
    annotations=st.dictionaries(KEYS, VALUES, max_size=5),
    names=st.lists(st.text(min_size=1, max_size=70), min_size=1, max_size=3),
    namespace=st.text(max_size=10),
    dialects=st.sampled_from([("nvidia",), ("device-injector",), ("nvidia", "device-injector")]),
)
def test_any_pod_gets_a_report_that_agrees_with_the_injector(
    config: Settings,
    annotations: dict[str, str],
    names: list[str],
    namespace: str,
    dialects: tuple[str, ...],
) -> None:
    """Whatever keys and values hold, there is a report; what is said to be delivered is what is injected."""
    config = attrs.evolve(config, annotations=AnnotationsSettings(dialects=dialects))
    found = explained(pod(annotations, *names, namespace=namespace), config)
    ((*containers,),) = [entry["containers"] for entry in found]

    injector = make_injector(config, plugins_of(FakeBackend()))

    assert [container["name"] for container in containers] == names
    for container in containers:
        if not container["problems"] and container["devices"]:
            assert isinstance(injector.inject(request_of(annotations, namespace, container)), Injection)


def request_of(annotations: dict[str, str], namespace: str, container: dict[str, Any]) -> ContainerRequest:
    return ContainerRequest(
        annotations, namespace=namespace or "default", pod="p", container=container["name"]
    )


@examples(max_examples=100, deadline=None)
@given(
    kind=st.text(min_size=1, max_size=8),
    on=st.dictionaries(KEYS, VALUES, max_size=3),
    inside=st.dictionaries(KEYS, VALUES, max_size=3),
    name=st.text(max_size=8),
)
def test_any_workload_is_shown_without_control_characters(
    config: Settings, kind: str, on: dict[str, str], inside: dict[str, str], name: str
) -> None:
    """Whatever an object is called and wherever its annotations stand, lines of text show it harmlessly."""
    spec = {"containers": [{"name": name or "c", "annotations": inside}, {"name": "d"}]}
    template = {"metadata": {"annotations": inside, "labels": on}, "spec": spec}
    metadata = {"name": name, "annotations": on}
    document = {"kind": "X" + kind, "metadata": metadata, "spec": {"template": template}}
    found = explained(json.dumps(document), config, diff=True)
    shown = "\n".join(line for entry in found for line in command._lines(entry))

    assert printable(shown) == shown


# --- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Any:
    """The command on a host with one containerd, with its exit code, and input on stdin."""
    path = tmp_path / "config.toml"
    path.write_text(f'[cdi]\ntrust = "any"\ndirs = ["{folder}"]\n')
    monkeypatch.setattr(command, "describe", lambda *_: Host((CONTAINERD,)))
    monkeypatch.setattr(command, "discover", lambda *_: plugins_of(FakeBackend()))

    def call(*arguments: str, stdin: str | bytes = "") -> tuple[int, str]:
        words = ["--config", str(path), "explain", *arguments]
        done = CliRunner().invoke(main, words, input=stdin, standalone_mode=False)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        code = done.return_value if isinstance(done.return_value, int) else done.exit_code
        return code, done.output

    return call


def test_the_tables_hold_all_that_the_json_holds(run: Any, folder: Path) -> None:
    """Key, device, verdict, rule, edit, file and what is lost are in the text; the exit code is 1."""
    code, text = run("-", stdin=pod({f"{DOMAIN}/pod": "nvidia.com/gpu=0, vendor.com/dev=group"}, "app"))

    assert code == 1
    for word in (
        "Pod gpu-operator/p (document 1, line 1)",
        f"app        {DOMAIN}/pod  nvidia.com/gpu=0      allowed  the built-in rule",
        'device node "/dev/null" → "/dev/nvidia0"',
        str(folder / "nvidia.json"),
        "fake (active)",
        "additional group 44",
        "NRI cannot add groups",
    ):
        assert word in text


def test_what_would_be_delivered_is_exit_code_0(run: Any, tmp_path: Path) -> None:
    """The file is named on the command line and its JSON is a list with one document."""
    file = tmp_path / "pod.yaml"
    file.write_text(pod({DOMAIN: "nvidia.com/gpu=0"}))
    code, text = run("--json", str(file))

    assert code == 0
    assert [entry["document"]["name"] for entry in json.loads(text)] == ["p"]


def test_the_namespace_of_the_command_line_is_for_those_without_one(run: Any) -> None:
    """It decides about a pod that names none, and not about one that does."""
    text = "\n---\n".join(pod({DOMAIN: "nvidia.com/gpu=0"}, namespace=name) for name in ("", "default"))
    _, output = run("--json", "--namespace", "gpu-operator", "-", stdin=text)

    verdicts = [entry["containers"][0]["verdict"] for entry in json.loads(output)]

    assert verdicts == ["allowed", "denied"]


def test_a_problem_of_every_container_is_printed_once(run: Any) -> None:
    """Two containers share the sentence about the pod's key."""
    _, text = run("-", stdin=pod({"cdi.k8s.io/x": "nvidia.com/gpu=0"}, "a", "b"))

    assert text.count("does nothing on a pod") == 1


def test_the_same_loss_of_several_containers_is_one_row(run: Any) -> None:
    """The row names both containers."""
    _, text = run("-", stdin=pod({DOMAIN: "vendor.com/dev=group"}, "a", "b"))

    assert text.count("NRI cannot add groups") == 1
    assert "  a, b       containerd  fake (active)  additional group 44" in text


def test_the_rule_to_paste_is_printed_as_lines(run: Any) -> None:
    """A refusal ends with TOML, which stands on lines of its own."""
    _, text = run("-", stdin=pod({DOMAIN: "nvidia.com/gpu=0"}, namespace="ml"))

    assert '\n[[policy.rules]]\naction = "allow"\nnamespaces = ["ml"]\n' in text


def test_a_diff_is_printed_for_each_container(run: Any) -> None:
    """The diff stands under the container's name, with the lines that are added."""
    _, text = run("--diff", "-", stdin=pod({DOMAIN: "nvidia.com/gpu=0"}))

    assert "\ncontainer c\n--- before/config.json\n+++ after/config.json\n" in text
    assert '\n+      "NVIDIA_VISIBLE_DEVICES=void"\n' in text


def test_hostile_names_reach_the_terminal_as_escapes(run: Any) -> None:
    """No escape sequence of a manifest is printed, whatever it is the name of."""
    text = pod({DOMAIN: "nvidia.com/gpu=0", "cdi.k8s.io/\x1b[2J": "\x1b"}, "\x1b[2J", namespace="\x1b]0;")
    _, output = run("--diff", "-", stdin=text)

    assert "\x1b" not in output
    assert "Pod \\u001b]0;" in output


@pytest.mark.parametrize(
    ("arguments", "stdin", "code"),
    [
        (["/nonexistent/pod.yaml"], "", "EXP001"),
        (["/"], "", "EXP001"),
        (["-"], b"a: [", "EXP002"),
        (["-"], "", "EXP005"),
    ],
    ids=["missing", "a folder", "not YAML", "empty"],
)
def test_what_cannot_be_used_is_exit_code_2(
    run: Any, arguments: list[str], stdin: str | bytes, code: str
) -> None:
    """An unusable file has its code in the message and no report."""
    status, text = run(*arguments, stdin=stdin)

    assert status == 2
    assert text.startswith(f"cdi-courier: {code}: ")


def test_an_endless_file_is_refused_unread() -> None:
    """Only as much as could be taken is read; what is more is an error."""
    with pytest.raises(ManifestError) as caught:
        manifests.read(command._read("/dev/zero"))

    assert caught.value.code == "EXP001"


def test_the_installed_command_knows_explain() -> None:
    """It is listed, and its help says what the exit codes are."""
    done = subprocess.run(
        [sys.executable, "-m", "cdi_courier", "explain", "--help"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )

    assert "2 if the file cannot be used" in " ".join(done.stdout.split())
