"""The schema, the checks of every key, where an error stands, and merging."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
import pytest
from cdi_courier.errors import SettingsError
from cdi_courier.policy import BUILT_IN
from cdi_courier.settings import PolicyRule, RuntimeSettings, Settings, default_files, load, override
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

# Section → key → default: the schema that every issue shares.
SCHEMA: dict[str, dict[str, Any]] = {
    "backends": {"choose": "auto", "order": ["nri", "cri_o_drop_in", "oci_hook"], "disabled": []},
    "delivery": {"undeliverable": "fail", "on_denied": "fail", "on_unresolvable": "fail"},
    "annotations": {
        "dialects": ["nvidia"],
        "domains": ["nvidia.cdi.k8s.io"],
        "max_names": 64,
        "max_length": 4096,
    },
    "cdi": {"dirs": ["/etc/cdi", "/var/run/cdi"], "trust": "root-owned", "max_file_size": 2097152},
    "policy": {"default": "deny", "local": "allow", "rules": []},
    "nri": {
        "sockets": ["/var/run/nri/nri.sock"],
        "plugin_name": "cdi-courier",
        "plugin_index": "10",
        "delivery": "auto",
        "deadline": 0.7,
        "reconnect_max": 5.0,
    },
    "oci_hook": {
        "log": "journal",
        "device_cgroup": "enforce",
        "timeout": 10,
        "gate_dir": "/var/lib/cdi-courier/bin",
        "handler": "cdi-courier",
        "handler_mode": "default",
    },
    "cri_o_drop_in": {"mode": "auto", "config_dir": "/etc/crio/crio.conf.d"},
    "probe": {"timeout": 2.0, "interval": 30.0},
    "service": {"state_dir": "/run/cdi-courier", "log_level": "info", "log_format": "auto"},
    "metrics": {"listen": ""},
}
RULE = {"action": None, "namespaces": ["*"], "pods": ["*"], "containers": ["*"], "devices": ["*"]}
RUNTIME = {"backend": "", "ignore": False, "endpoint": "", "config": "", "restart": ""}
CHOICES = {
    "delivery.undeliverable": {"fail", "warn"},
    "delivery.on_denied": {"fail", "skip"},
    "delivery.on_unresolvable": {"fail", "skip"},
    "cdi.trust": {"root-owned", "any"},
    "policy.default": {"deny", "allow"},
    "policy.local": {"deny", "allow"},
    "nri.delivery": {"auto", "names", "edits"},
    "oci_hook.device_cgroup": {"enforce", "best-effort"},
    "oci_hook.handler_mode": {"default", "named"},
    "cri_o_drop_in.mode": {"auto", "nri", "handler", "hook"},
    "service.log_level": {"debug", "info", "warning", "error"},
    "service.log_format": {"auto", "text", "json"},
}


def keys_of(cls: Any) -> dict[str, attrs.Attribute[Any]]:
    return {a.name: a for a in attrs.fields(cls) if not a.metadata.get("internal")}


def write(folder: Path, *texts: str) -> list[Path]:
    paths = []
    for number, text in enumerate(texts):
        path = folder / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def read(folder: Path, *texts: str) -> Settings:
    return load(write(folder, *texts))


def refusal(folder: Path, text: str | bytes) -> SettingsError:
    path = folder / "x.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError) as caught:
        load([path])
    assert caught.value.fields["file"] == str(path)
    return caught.value


def test_the_model_has_exactly_the_keys_and_defaults_of_the_schema() -> None:
    """No key is missing, none is added, and every default is the documented one."""
    plain = attrs.asdict(Settings())
    model = {
        section: {
            key: list(v) if isinstance(v := plain[section][key], tuple) else v
            for key in keys_of(attribute.type)
        }
        for section, attribute in keys_of(Settings).items()
        if section != "runtimes"
    }

    assert model == SCHEMA
    assert all(type(model[s][k]) is type(v) for s, keys in SCHEMA.items() for k, v in keys.items())


def test_rules_and_runtimes_have_exactly_the_documented_keys() -> None:
    """A rule's and a runtime's keys and defaults are those of the schema; a rule's action is required."""
    rule = {
        k: list(a.default) if a.default is not attrs.NOTHING else None for k, a in keys_of(PolicyRule).items()
    }
    runtime = {key: attribute.default for key, attribute in keys_of(RuntimeSettings).items()}

    assert rule == RULE
    assert runtime == RUNTIME


def test_the_words_a_key_allows_are_those_of_the_schema() -> None:
    """Every key of fixed words allows exactly the documented ones."""
    found = {
        f"{section}.{key}": set(get_args(attribute.type))
        for section, outer in keys_of(Settings).items()
        if section != "runtimes"
        for key, attribute in keys_of(outer.type).items()
        if get_origin(attribute.type) is Literal
    }

    assert found == CHOICES


def test_the_built_in_rule_is_the_documented_one() -> None:
    """The built-in rule allows three namespaces everything."""
    assert BUILT_IN.action == "allow"
    assert BUILT_IN.namespaces == ("kube-system", "gpu-operator", "nvidia-gpu-operator")
    assert BUILT_IN.pods == BUILT_IN.containers == ("*",)


def test_the_defaults_written_out_are_accepted(tmp_path: Path) -> None:
    """A file that sets every key to its default gives the defaults."""
    text = "".join(
        f"[{section}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in keys.items())
        for section, keys in SCHEMA.items()
    )

    found = read(tmp_path, text)

    assert attrs.evolve(found, files=()) == Settings()


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value)


def wrong_values(type_: Any) -> list[str]:
    """TOML values of every type but the right one."""
    values = {
        str: '"no-such-word"',
        int: "7",
        float: "0.5",
        bool: "true",
        list: "[]",
        dict: "{}",
        "date": "1979-05-27",
        "ints": "[1]",
    }
    if get_origin(type_) is Literal:
        return list(values.values())
    right = {list} if get_origin(type_) is tuple else {type_}
    if type_ is float:
        right.add(int)
    return [text for kind, text in values.items() if kind not in right]


ALL_KEYS = [
    *(
        (f"[{section}]\n", f"{section}.{key}", key, attribute.type)
        for section, outer in keys_of(Settings).items()
        if section != "runtimes"
        for key, attribute in keys_of(outer.type).items()
        if key != "rules"
    ),
    *(
        ("[runtimes.docker]\n", f"runtimes.docker.{k}", k, a.type)
        for k, a in keys_of(RuntimeSettings).items()
    ),
    *(("[[policy.rules]]\n", f"policy.rules[1].{k}", k, a.type) for k, a in keys_of(PolicyRule).items()),
]


@pytest.mark.parametrize(("head", "path", "key", "type_"), ALL_KEYS, ids=[item[1] for item in ALL_KEYS])
def test_a_value_of_a_wrong_type_names_file_line_and_key(
    tmp_path: Path, head: str, path: str, key: str, type_: Any
) -> None:
    """Every key refuses every other type with SET004, its file, line and full name."""
    for value in wrong_values(type_):
        error = refusal(tmp_path, f"# first\n{head}\n{key} = {value}\n")

        assert error.code == "SET004", value
        assert f"{tmp_path / 'x.toml'}, line 4, {path}: expected " in error.message
        assert error.fields["key"] == path


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("[annotations]\nmax_names = 0", 2, "annotations.max_names"),
        ("[annotations]\nmax_length = -1", 2, "annotations.max_length"),
        ("[annotations]\nmax_names = true", 2, "annotations.max_names"),
        ("[annotations]\nmax_names = 1.0", 2, "annotations.max_names"),
        ('[annotations]\ndomains = ["a/b"]', 2, "annotations.domains"),
        ('[annotations]\ndomains = [""]', 2, "annotations.domains"),
        ("[cdi]\ndirs = []", 2, "cdi.dirs"),
        ('[cdi]\ndirs = ["etc/cdi"]', 2, "cdi.dirs"),
        ('[cdi]\ndirs = ["/etc\\u0000"]', 2, "cdi.dirs"),
        ("[nri]\nsockets = []", 2, "nri.sockets"),
        ('[nri]\nplugin_name = ""', 2, "nri.plugin_name"),
        ('[nri]\nplugin_name = "a b"', 2, "nri.plugin_name"),
        ('[nri]\nplugin_index = "1"', 2, "nri.plugin_index"),
        ('[nri]\nplugin_index = "１０"', 2, "nri.plugin_index"),
        ('[nri]\nplugin_index = "10\\n"', 2, "nri.plugin_index"),
        ("[nri]\ndeadline = 0.95", 2, "nri.deadline"),
        ("[nri]\ndeadline = 0.05", 2, "nri.deadline"),
        ("[nri]\ndeadline = nan", 2, "nri.deadline"),
        ("[nri]\nreconnect_max = inf", 2, "nri.reconnect_max"),
        ("[probe]\ntimeout = nan", 2, "probe.timeout"),
        ("[probe]\ninterval = -inf", 2, "probe.interval"),
        ('[oci_hook]\nlog = "file"', 2, "oci_hook.log"),
        ('[service]\nstate_dir = "run"', 2, "service.state_dir"),
        ('[metrics]\nlisten = "9000"', 2, "metrics.listen"),
        ('[metrics]\nlisten = "unix:x"', 2, "metrics.listen"),
        ("[policy]\nrules = 1", 2, "policy.rules"),
        ("[policy]\nrules = [1]", 2, "policy.rules[1]"),
        ('[[policy.rules]]\nnamespaces = ["a"]', 1, "policy.rules[1]"),
        ('[[policy.rules]]\naction = "allow"\ndevices = ["gpu"]', 3, "policy.rules[1].devices"),
        ("nri = 1", 1, "nri"),
        ("[[nri]]", 1, "nri"),
        ("runtimes = 1", 1, "runtimes"),
        ("[runtimes]\ndocker = 1", 2, "runtimes.docker"),
        # where the value begins, however it is written
        ('[nri]\nsockets = [\n  "/a",\n  "b",\n]\n', 2, "nri.sockets"),
        ('[cdi]\ndirs = [\n  "/a",\n]\nmax_file_size = 0', 5, "cdi.max_file_size"),
        ('[nri]\nplugin_name = """\na\nb"""\nplugin_index = 10', 2, "nri.plugin_name"),
        ("nri.delivery = 'names'\nnri.deadline = 2\n", 2, "nri.deadline"),
        (
            '[[policy.rules]]\naction = "allow"\n\n[[policy.rules]]\naction = "maybe"',
            5,
            "policy.rules[2].action",
        ),
        ('[policy]\nrules = [\n {action = "allow"},\n {action = "x"}]', 2, "policy.rules[2].action"),
        ('[runtimes]\n"docker" = { ignore = 1 }', 2, "runtimes.docker.ignore"),
        ("# a\r\n[nri]\r\ndeadline = 2\r\n", 3, "nri.deadline"),
    ],
)
def test_a_wrong_value_is_refused_at_its_line(tmp_path: Path, text: str, line: int, key: str) -> None:
    """A value outside what its key allows is SET004 at the line in which it begins."""
    error = refusal(tmp_path, text)

    assert error.code == "SET004"
    assert f", line {line}, {key}: " in error.message


@pytest.mark.parametrize(
    ("text", "line", "key", "allowed"),
    [
        ("\n[nope]\n", 2, "nope", "annotations"),
        ("nope = 1\n", 1, "nope", "backends"),
        ("files = []", 1, "files", "backends"),
        ("[nri]\nsocket = 1", 2, "nri.socket", "sockets"),
        ("[policy]\nsources = []", 2, "policy.sources", "rules"),
        (
            '[[policy.rules]]\naction = "allow"\nnamespace = ["a"]',
            3,
            "policy.rules[1].namespace",
            "namespaces",
        ),
        ("[runtimes.docker]\nbackends = 1", 2, "runtimes.docker.backends", "backend"),
        ("[runtimes]\nrkt = {}", 2, "runtimes.rkt", "podman"),
        ('[nri]\n"a\\u001bb" = 1', 2, "nri.a\\u001bb", "sockets"),
    ],
)
def test_an_unknown_table_or_key_names_the_known_ones(
    tmp_path: Path, text: str, line: int, key: str, allowed: str
) -> None:
    """What the schema does not have is SET003 with its line and what is allowed there."""
    error = refusal(tmp_path, text)

    assert error.code == "SET003"
    assert f", line {line}, {key}: " in error.message
    assert allowed in error.message


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    """TOML's 2 for 2.0 is accepted and becomes a float."""
    found = read(tmp_path, "[probe]\ntimeout = 3\n").probe.timeout

    assert found == 3.0
    assert type(found) is float


@pytest.mark.parametrize(
    "listen",
    ["0.0.0.0:9465", "[::]:9465", "192.0.2.1:9465", "example.com:9465", "127.0.0.1:0", "127.0.0.1:70000"],
)
def test_an_address_that_others_reach_is_refused(tmp_path: Path, listen: str) -> None:
    """Whoever connects is answered in the clear, so only this host may; and a port is one of 65,535."""
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, f'[metrics]\nlisten = "{listen}"')

    assert caught.value.code == "SET004"
    assert "a loopback address" in caught.value.message


@pytest.mark.parametrize("listen", ["", "127.0.0.1:9000", "[::1]:9000", "localhost:1", "unix:/run/x.sock"])
def test_an_address_is_accepted_in_its_three_forms(tmp_path: Path, listen: str) -> None:
    """Off, HOST:PORT and a unix socket are allowed."""
    found = read(tmp_path, f'[metrics]\nlisten = "{listen}"').metrics.listen

    assert found == listen


def test_scalars_and_arrays_of_a_later_file_replace(tmp_path: Path) -> None:
    """The last file that sets a key wins, and keys it does not set stay."""
    found = read(
        tmp_path,
        '[nri]\nsockets = ["/a", "/b"]\nplugin_index = "20"\n[cdi]\ntrust = "any"',
        '[nri]\nsockets = ["/c"]\n',
    )

    assert found.nri.sockets == ("/c",)
    assert found.nri.plugin_index == "20"
    assert found.cdi.trust == "any"
    assert found.files == (str(tmp_path / "0.toml"), str(tmp_path / "1.toml"))


def test_rules_of_a_later_file_are_tried_first(tmp_path: Path) -> None:
    """Within a file rules keep their order, and each is told by number and file."""
    rule = '[[policy.rules]]\naction = "allow"\nnamespaces = ["{}"]\n'

    found = read(tmp_path, rule.format("a") + rule.format("b"), rule.format("c"))
    policy = found.policy.compiled()

    assert [r.namespaces[0] for r in policy.rules[:-1]] == ["c", "a", "b"]
    assert policy.rules[-1] is BUILT_IN
    assert policy.rules[0].source == f"rule 1 of {tmp_path / '1.toml'}"
    assert policy.rules[2].source == f"rule 2 of {tmp_path / '0.toml'}"


def test_runtimes_merge_key_by_key(tmp_path: Path) -> None:
    """A later file changes single keys of a runtime and adds others."""
    found = read(
        tmp_path,
        '[runtimes]\ndocker = { ignore = true, config = "/x" }\n',
        '[runtimes]\ndocker = { ignore = false }\n"/run/y.sock" = { backend = "nri" }\n',
    )

    assert found.runtimes == {
        "docker": RuntimeSettings(ignore=False, config="/x"),
        "/run/y.sock": RuntimeSettings(backend="nri"),
    }


def test_no_file_gives_the_defaults() -> None:
    """Without a file every setting is its default."""
    assert load([]) == Settings()


def test_an_error_names_the_file_it_stands_in(tmp_path: Path) -> None:
    """Of several files the message names the wrong one."""
    paths = write(tmp_path, "[nri]\n", "[nri]\n\ndeadline = 3\n")

    with pytest.raises(SettingsError) as caught:
        load(paths)

    assert caught.value.message.startswith(f"{paths[1]}, line 3, nri.deadline")


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "a",
        "a = ",
        "[nri]\n[nri]\n",
        "x = 1\nx = 2",
        "a = " + "[" * 20000,
        b"a = '\0'",
        b"\xef\xbb\xbf[nri]",
    ],
)
def test_what_is_not_toml_is_refused(tmp_path: Path, text: str | bytes) -> None:
    """A syntax error is SET002 and names the file."""
    error = refusal(tmp_path, text)

    assert error.code == "SET002"
    assert "is not TOML" in error.message


@pytest.mark.parametrize(
    ("text", "code"),
    [("[nri]\ndeadline = 1" + 400 * "0", "SET004"), ("[nri]\ndeadline = " + 5000 * "1", "SET002")],
    ids=["for a float", "to be read"],
)
def test_a_number_of_too_many_digits_is_refused(tmp_path: Path, text: str, code: str) -> None:
    """It is an error like others, whoever meets it first."""
    assert refusal(tmp_path, text).code == code


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", "[nri]\nplugin_name = 'é'".encode("latin-1"), b"# \xed\xa0\x80"]
)
def test_what_is_not_utf_8_is_refused(tmp_path: Path, data: bytes) -> None:
    """Other encodings are SET002, and the message says which byte."""
    error = refusal(tmp_path, data)

    assert error.code == "SET002"
    assert "UTF-8" in error.message


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    """A file that was named and cannot be read is SET001."""
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingsError) as caught:
            load([path])

        assert caught.value.code == "SET001"
        assert words in caught.value.message


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without permission is SET001, also where root runs the test and could read it."""
    (path,) = write(tmp_path, "")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("cdi_courier.settings.open", refuse, raising=False)

    with pytest.raises(SettingsError, match="Permission denied") as caught:
        load([path])

    assert caught.value.code == "SET001"


def test_the_folder_is_read_bytewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.toml comes first, then the .toml files of conf.d in the order of their bytes."""
    monkeypatch.setattr("cdi_courier.settings.SYSTEM_DIR", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_files() == []
    (tmp_path / "conf.d").mkdir()
    for name in (
        "conf.d/é.toml",
        "conf.d/b.toml",
        "conf.d/B.toml",
        "conf.d/10.toml",
        "conf.d/x.toml~",
        "config.toml",
    ):
        (tmp_path / name).touch()

    names = [os.path.relpath(path, tmp_path) for path in default_files()]

    assert names == ["config.toml", "conf.d/10.toml", "conf.d/B.toml", "conf.d/b.toml", "conf.d/é.toml"]


def test_a_main_file_that_cannot_be_looked_at_is_refused_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a config.toml that is not there is none; one that leads in a circle is SET001."""
    monkeypatch.setattr("cdi_courier.settings.SYSTEM_DIR", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (tmp_path / "config.toml").symlink_to("config.toml")

    with pytest.raises(SettingsError) as caught:
        load()

    assert caught.value.code == "SET001"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conf.d that cannot be listed is SET001."""
    monkeypatch.setattr("cdi_courier.settings.SYSTEM_DIR", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (tmp_path / "conf.d").touch()

    with pytest.raises(SettingsError) as caught:
        load()

    assert caught.value.code == "SET001"


def test_an_option_is_checked_as_a_file_would_be() -> None:
    """A wrong option is SET004 and names the option."""
    with pytest.raises(SettingsError) as caught:
        override("nri", "plugin_index", "1", "--nri-index")

    assert caught.value.code == "SET004"
    assert "--nri-index" in caught.value.message
    assert override("nri", "plugin_index", "11", "--nri-index") == "11"


SECTIONS = st.sampled_from(
    ["nri", "cdi", "policy", "runtimes", "annotations", "[policy.rules]", "x", "runtimes.docker"]
)
KEYS = st.sampled_from(
    ["sockets", "dirs", "deadline", "rules", "action", "max_names", "docker", '"/x"', "ignore"]
)
VALUES = st.sampled_from(
    [
        "1",
        "-0.0",
        "nan",
        "1e999",
        "9" * 400,
        "true",
        '""',
        '"/x"',
        "[]",
        "{}",
        '["a"]',
        "[[]]",
        "[{}]",
        '"allow"',
        "07:32:00",
        "[\n1]",
        "'''\n'''",
    ]
)
LINES = st.one_of(SECTIONS.map("[{}]".format), st.builds("{} = {}".format, KEYS, VALUES))


@limits(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.lists(LINES, max_size=6).map("\n".join).map(str.encode),
        st.text(max_size=30).map(str.encode),
        st.binary(max_size=30),
    )
)
def test_any_text_gives_settings_or_a_settings_error(tmp_path: Path, text: bytes) -> None:
    """Whatever stands in a file, loading it gives Settings or one SettingsError with the file's name."""
    path = tmp_path / "x.toml"
    path.write_bytes(text)
    found: Settings | SettingsError
    try:
        found = load([path])
    except SettingsError as error:
        found = error

    assert isinstance(found, Settings) or str(path) in found.message
