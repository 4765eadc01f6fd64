"""Validation: the version gates as a matrix, and each rule at its boundary."""

from __future__ import annotations

import attrs
import pytest
from cdi_courier.cdi.model import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from cdi_courier.cdi.validate import VERSIONS, find_problem, minimum_version

ENV = ContainerEdits(env=("A=1",))


def spec(edits: ContainerEdits = ENV, version: str = "1.1.0", **fields: object) -> Spec:
    """A valid spec of one device with these edits, unless the fields say otherwise."""
    values: dict[str, object] = {
        "kind": "v.com/c",
        "devices": (Device("d", container_edits=edits),),
        **fields,
    }
    return Spec(cdi_version=version, **values)  # type: ignore[arg-type]


def problem(value: Spec) -> tuple[str, str] | None:
    """Code and path of the first problem, if there is one."""
    found = find_problem(value)
    return None if found is None else (found.code, ".".join(map(str, found.path)))


GATES = {
    "env": (spec(), "0.3.0"),
    "mount-type": (spec(ContainerEdits(mounts=(Mount("/a", "/b", type="bind"),))), "0.4.0"),
    "mount": (spec(ContainerEdits(mounts=(Mount("/a", "/b"),))), "0.3.0"),
    "host-path": (spec(ContainerEdits(device_nodes=(DeviceNode("/a", host_path="/b"),))), "0.5.0"),
    "digit-name": (spec(devices=(Device("0", container_edits=ENV),)), "0.5.0"),
    "arabic-digit": (spec(devices=(Device("\u0661", container_edits=ENV),)), "0.3.0"),
    "annotations": (spec(annotations={"a": "b"}), "0.6.0"),
    "device-annotations": (spec(devices=(Device("d", {"a": "b"}, ENV),)), "0.6.0"),
    "dotted-class": (spec(kind="v.com/c.d"), "0.6.0"),
    "dotted-vendor": (spec(kind="v.w.com/c"), "0.3.0"),
    "intel-rdt": (spec(ContainerEdits(intel_rdt=IntelRdt())), "0.7.0"),
    "gid-zero": (spec(ContainerEdits(additional_gids=(0,))), "0.7.0"),
    "net-devices": (spec(ContainerEdits(net_devices=(NetDevice("a", "b"),))), "1.1.0"),
    "schemata-empty": (spec(ContainerEdits(intel_rdt=IntelRdt(schemata=()))), "1.1.0"),
    "monitoring": (spec(ContainerEdits(intel_rdt=IntelRdt(enable_monitoring=True))), "1.1.0"),
    "global": (spec(container_edits=ContainerEdits(intel_rdt=IntelRdt(schemata=("x",)))), "1.1.0"),
}


@pytest.mark.parametrize("declared", VERSIONS)
@pytest.mark.parametrize("case", GATES)
def test_a_version_may_use_what_came_with_it_or_before(case: str, declared: str) -> None:
    """Every feature against every declared version."""
    value, minimum = GATES[case]
    versions = list(VERSIONS)

    assert minimum_version(value)[0] == minimum
    too_low = versions.index(declared) < versions.index(minimum)
    found = find_problem(attrs.evolve(value, cdi_version=declared))
    assert (found is not None and found.code == "CDI005") is too_low


def test_every_gate_has_a_case() -> None:
    """What a version brought is one of the cases above."""
    needed = [minimum_version(value) for value, _ in GATES.values()]
    seen = {(version, path[-1] if path else "") for version, path in needed}

    assert {(version, wire) for version, gates in VERSIONS.items() for _, wire, _ in gates} - seen == set()


@pytest.mark.parametrize("version", ["v0.3.0", "v1.1.0"])
def test_one_leading_v_is_allowed(version: str) -> None:
    """In lower case."""
    assert problem(spec(version=version)) is None


@pytest.mark.parametrize(
    "version", ["", "1.0", "0.3.1", "V1.1.0", "vv1.1.0", "1.1.0-rc1", "1.1.0+b", "1.2.0", " 1.1.0"]
)
def test_other_versions_are_unknown(version: str) -> None:
    """Also newer ones: there is no tolerance forward."""
    assert problem(spec(version=version)) == ("CDI005", "cdiVersion")


def test_a_new_version_is_one_table_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gates is found by the same walk."""
    from cdi_courier.cdi import validate

    gate = (DeviceNode, "permissions", lambda node: node.permissions == "none")
    monkeypatch.setattr(validate, "VERSIONS", {**VERSIONS, "1.2.0": (gate,)})
    monkeypatch.setattr(validate, "_ORDER", {version: rank for rank, version in enumerate(validate.VERSIONS)})
    edits = ContainerEdits(device_nodes=(DeviceNode("/a", permissions="none"),))

    assert problem(spec(edits, "1.1.0")) == (
        "CDI005",
        "devices.0.containerEdits.deviceNodes.0.permissions",
    )
    assert problem(spec(edits, "1.2.0")) is None


@pytest.mark.parametrize(
    "edits",
    [
        ContainerEdits(env=("A=", " =1", "A B=1")),
        ContainerEdits(device_nodes=(DeviceNode("a", type="u"), DeviceNode("/a", permissions="rrmw"))),
        ContainerEdits(device_nodes=(DeviceNode("/a", permissions="none", major=-1),)),
        ContainerEdits(hooks=(Hook("prestart", "relative", timeout=-1),)),
        ContainerEdits(mounts=(Mount("a", "b"),)),
        ContainerEdits(intel_rdt=IntelRdt("/")),
        ContainerEdits(intel_rdt=IntelRdt("a" * 4095)),
        ContainerEdits(net_devices=(NetDevice("a", "b"), NetDevice("b", "a"))),
        ContainerEdits(additional_gids=(0,)),
        ContainerEdits(intel_rdt=IntelRdt()),
    ],
    ids=repr,
)
def test_what_the_loader_does_not_check_is_valid(edits: ContainerEdits) -> None:
    """The reference's loader is the judge, not the specification's text."""
    assert problem(spec(edits)) is None


@pytest.mark.parametrize(
    ("edits", "path"),
    [
        (ContainerEdits(), ""),
        (ContainerEdits(env=("A=1", "")), "containerEdits.env.1"),
        (ContainerEdits(env=("=x",)), "containerEdits.env.0"),
        (ContainerEdits(env=("A",)), "containerEdits.env.0"),
        (ContainerEdits(device_nodes=(DeviceNode(""),)), "containerEdits.deviceNodes.0"),
        (ContainerEdits(device_nodes=(DeviceNode("/a", type="C"),)), "containerEdits.deviceNodes.0.type"),
        (
            ContainerEdits(device_nodes=(DeviceNode("/a", permissions="nonee"),)),
            "containerEdits.deviceNodes.0.permissions",
        ),
        (ContainerEdits(hooks=(Hook("Prestart", "/h"),)), "containerEdits.hooks.0.hookName"),
        (ContainerEdits(hooks=(Hook("prestart", ""),)), "containerEdits.hooks.0"),
        (ContainerEdits(hooks=(Hook("prestart", "/h", env=("x",)),)), "containerEdits.hooks.0.env.0"),
        (ContainerEdits(mounts=(Mount("", "/b"),)), "containerEdits.mounts.0"),
        (ContainerEdits(mounts=(Mount("/a", ""),)), "containerEdits.mounts.0"),
        (ContainerEdits(intel_rdt=IntelRdt("é" * 2048)), "containerEdits.intelRdt.closID"),
        (ContainerEdits(intel_rdt=IntelRdt(".")), "containerEdits.intelRdt.closID"),
        (ContainerEdits(intel_rdt=IntelRdt("a\n")), "containerEdits.intelRdt.closID"),
        (ContainerEdits(net_devices=(NetDevice("", "b"),)), "containerEdits.netDevices.0"),
        (
            ContainerEdits(net_devices=(NetDevice("a", "b"), NetDevice("a", "c"))),
            "containerEdits.netDevices.1.hostInterfaceName",
        ),
    ],
    ids=repr,
)
def test_each_rule_names_its_place(edits: ContainerEdits, path: str) -> None:
    """In the edits of a device, and the same in those of the whole spec, where emptiness is fine."""
    assert problem(spec(edits)) == ("CDI006", ".".join(filter(None, ("devices.0", path))))
    assert problem(spec(container_edits=edits)) == (("CDI006", path) if path else None)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (spec(devices=()), "devices"),
        (
            spec(devices=(Device("d", container_edits=ENV), Device("d", container_edits=ENV))),
            "devices.1.name",
        ),
        (spec(devices=(Device("", container_edits=ENV),)), "devices.0.name"),
        (spec(devices=(Device("a b", container_edits=ENV),)), "devices.0.name"),
        (spec(kind=""), "kind"),
        (spec(kind="v.com"), "kind"),
        (spec(kind="v.com/c/d"), "kind"),
        (spec(kind="v.com/1"), "kind"),
    ],
)
def test_devices_and_kind_are_checked(value: Spec, path: str) -> None:
    """Names by the rules of qualified names, devices for being there once."""
    assert problem(value) == ("CDI006", path)
