"""Discovery: a plugin that is broken, foreign or disabled is reported and hurts nobody."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cdi_courier.annotations import NVIDIA, Dialect, comma_list
from cdi_courier.dialects import cdi_courier_dialects
from cdi_courier.generate import BUILT_IN
from cdi_courier.hookspecs import API_VERSION, Generator, hookimpl
from cdi_courier.plugins import Plugins, discover

OWN = {dialect.name for dialect in cdi_courier_dialects()}


class FakeEntryPoint:
    """An entry point whose loading does what the test says."""

    group = "cdi_courier"

    def __init__(self, name: str, plugin: Any) -> None:
        self.name = name
        self._plugin = plugin
        self.loaded = False

    def load(self) -> Any:
        self.loaded = True
        if isinstance(self._plugin, BaseException):
            raise self._plugin
        return self._plugin


def plugin(**hooks: Any) -> ModuleType:
    module = ModuleType("fake")
    for name, hook in hooks.items():
        setattr(module, name, hookimpl(hook))
    return module


def backend(name: str, version: int = API_VERSION) -> ModuleType:
    made = SimpleNamespace(name=name, api_version=version)
    return plugin(cdi_courier_backend=lambda: made)


def dialect(name: str) -> ModuleType:
    made = (Dialect(name, ("{domain}/x",), comma_list),)
    return plugin(cdi_courier_dialects=lambda: made)


def generator(name: str) -> ModuleType:
    made = (Generator(name, "for a test", lambda *_: None),)  # type: ignore[arg-type,return-value]
    return plugin(cdi_courier_generators=lambda: made)


def found(*points: FakeEntryPoint, disabled: tuple[str, ...] = ()) -> Plugins:
    return discover(disabled, points)


def fails(words: str) -> Any:
    def hook() -> Any:
        raise RuntimeError(words)

    return hook


def spec_mismatch() -> ModuleType:
    def cdi_courier_backend(unknown: int) -> None: ...

    return plugin(cdi_courier_backend=cdi_courier_backend)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (ImportError("no module \x1b[2J"), "ImportError"),
        (SyntaxError("bad"), "SyntaxError"),
        (backend("bad", API_VERSION + 1), f"API version {API_VERSION + 1}"),
        (backend("other"), "other"),
        (plugin(cdi_courier_backend=fails("hook")), "RuntimeError: hook"),
        (plugin(cdi_courier_backend=lambda: object()), "AttributeError"),
        (plugin(cdi_courier_dialects=fails("hook")), "RuntimeError: hook"),
        (plugin(cdi_courier_dialects=lambda: 5), "TypeError"),
        (plugin(cdi_courier_dialects=lambda: ["text"]), "no Dialect"),
        (plugin(cdi_courier_generators=fails("hook")), "RuntimeError: hook"),
        (plugin(cdi_courier_generators=lambda: None), "TypeError"),
        (plugin(cdi_courier_generators=lambda: [NVIDIA]), "no Generator"),
        (plugin(cdi_courier_generators=lambda: [Generator("alias", "", fails(""))]), "ValueError"),
        (plugin(cdi_courier_generators=lambda: [Generator("a b", "", fails(""))]), "ValueError"),
        (plugin(cdi_courier_generators=lambda: [Generator("a", "", fails(""), ())]), "ValueError"),
        (plugin(cdi_courier_generators=lambda: [Generator("a", "", fails(""), "ab")]), "TypeError"),  # type: ignore[arg-type]
        (plugin(cdi_courier_unknown=lambda: None), "cdi_courier_unknown"),
        (spec_mismatch(), "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_plugin_is_reported_and_hurts_no_other(broken: Any, words: str) -> None:
    """A plugin that fails anywhere is PLG001 with its words, and the plugins around it are found."""
    result = found(
        FakeEntryPoint("a", backend("a")), FakeEntryPoint("bad", broken), FakeEntryPoint("z", backend("z"))
    )

    assert set(result.backends) == {"a", "z"}
    assert set(result.problems) == {"bad"}
    assert result.problems["bad"].code == "PLG001"
    assert words in result.problems["bad"].message
    assert "\x1b" not in str(result.problems["bad"])
    assert set(result.dialects) == OWN
    assert set(result.generators) == {"nvidia"}


def test_a_disabled_plugin_is_never_imported() -> None:
    """The entry point of a disabled name is not loaded."""
    point = FakeEntryPoint("off", RuntimeError("imported"))

    result = found(point, disabled=("off", "absent"))

    assert not point.loaded
    assert result.disabled == ("off",)
    assert not result.problems


def test_a_plugin_may_bring_a_dialect() -> None:
    """A dialect under a name of its own is known beside the built-in ones."""
    result = found(FakeEntryPoint("x", dialect("mine")))

    assert set(result.dialects) == {*OWN, "mine"}
    assert not result.problems


def test_a_plugin_may_bring_a_generator() -> None:
    """A generator under a name of its own is known beside the built-in one."""
    result = found(FakeEntryPoint("x", generator("mine")))

    assert set(result.generators) == {"nvidia", "mine"}
    assert not result.problems


@pytest.mark.parametrize("name", ["a", "zz", "built", "built-in-generator"])
def test_a_built_in_generator_cannot_be_taken_over(name: str) -> None:
    """A plugin that offers the generator nvidia is reported, whatever its entry point is called."""
    result = found(FakeEntryPoint(name, generator("nvidia")))

    assert result.generators["nvidia"] is BUILT_IN[0]
    assert "exists already" in result.problems[name].message


def test_one_plugin_may_bring_everything() -> None:
    """A backend, a dialect and a generator of one plugin are all found."""
    hooks = vars(backend("x")) | vars(dialect("mine")) | vars(generator("mine"))
    module = ModuleType("fake")
    vars(module).update({name: hook for name, hook in hooks.items() if name.startswith("cdi_courier_")})
    result = found(FakeEntryPoint("x", module))

    assert ("x" in result.backends, "mine" in result.dialects, "mine" in result.generators) == (True,) * 3
    assert not result.problems


@pytest.mark.parametrize("name", ["a", "zz", "built", "Built-in"])
def test_a_built_in_dialect_cannot_be_taken_over(name: str) -> None:
    """A plugin that offers nvidia is reported, whatever its entry point is called."""
    result = found(FakeEntryPoint(name, dialect("nvidia")))

    assert result.dialects["nvidia"] is NVIDIA
    assert "exists already" in result.problems[name].message


@pytest.mark.parametrize("name", ["built-in", "built-in-generators"])
def test_a_plugin_cannot_pass_for_the_built_in_one(name: str) -> None:
    """An entry point called as the built-in ones are is reported and changes nothing."""
    result = found(FakeEntryPoint(name, dialect("nvidia")))

    assert set(result.problems) == {name}
    assert set(result.dialects) == OWN
    assert result.dialects["nvidia"] is NVIDIA


def test_a_dialect_offered_twice_is_the_first_ones() -> None:
    """Of two plugins with one dialect name the first by entry-point name keeps it."""
    first, second = dialect("mine"), dialect("mine")

    result = found(FakeEntryPoint("b", second), FakeEntryPoint("a", first))

    assert result.dialects["mine"] is first.cdi_courier_dialects()[0]
    assert set(result.problems) == {"b"}


def test_a_second_entry_point_of_one_name_is_reported() -> None:
    """Of two distributions that bring one name, the first keeps it and the other is a problem."""
    result = found(FakeEntryPoint("a", backend("a")), FakeEntryPoint("a", backend("a")))

    assert set(result.backends) == {"a"}
    assert set(result.problems) == {"a"}


def test_one_module_under_two_names_is_reported() -> None:
    """The second entry point of one module is a problem of its own and the first one stays."""
    module = backend("a")

    result = found(FakeEntryPoint("a", module), FakeEntryPoint("b", module))

    assert set(result.backends) == {"a"}
    assert set(result.problems) == {"b"}


def test_the_installed_distributions_are_discovered() -> None:
    """The three backends of this workspace are found under their names, and both built-in dialects."""
    result = discover()

    assert {"nri", "cri_o_drop_in", "oci_hook"} <= set(result.backends)
    assert set(result.dialects) >= OWN
    assert not {"nri", "cri_o_drop_in", "oci_hook"} & set(result.problems)
