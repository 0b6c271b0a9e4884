"""Settings from a file, the environment and flags, and what is said when they cannot be used."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdproxy.errors import SettingsError
from pdproxy.settings.catalog import every_setting
from pdproxy.settings.load import load
from pdproxy.settings.model import ConfiguredNode, Settings
from pdproxy.settings.sources import FlagSource, add_flags
from pdproxy.settings.types import DiscoveryKind, OnPrefillFailure, Role

P = {"url": "http://p:1", "role": Role.PREFILL}


def flags(*words: str) -> FlagSource:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    parsed: argparse.Namespace = parser.parse_args(words)
    return FlagSource(parsed)


def file(folder: Path, text: str) -> Path:
    path = folder / "pdproxy.yaml"
    path.write_text(text)
    return path


def complaint(
    given: FlagSource | None = None, config: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    with pytest.raises(SettingsError) as caught:
        load(given, config, environment)
    return str(caught.value)


def test_without_sources_the_defaults_hold() -> None:
    assert load() == Settings()


def test_two_flags_are_enough() -> None:
    settings = load(flags("--prefill", "http://p:1/", "--decode", "http://d:1", "--decode", "http://d:2"))
    assert settings.nodes == (
        ConfiguredNode(url="http://p:1", roles=(Role.PREFILL,)),
        ConfiguredNode(url="http://d:1", roles=(Role.DECODE,)),
        ConfiguredNode(url="http://d:2", roles=(Role.DECODE,)),
    )


def test_a_file_sets_everything(tmp_path: Path) -> None:
    text = """
    listen: {host: 0.0.0.0, port: 9000}
    nodes:
      - {url: "http://p:1", role: prefill, model: m, aliases: [lora], weight: 2}
    deadlines: {stall: 90s}
    limits: {body_bytes: 1MiB}
    policy: {on_prefill_failure: local, migrations: 0, ticket_life: 10m}
    keys:
    """
    settings = load(config=file(tmp_path, text))
    assert (settings.listen.host, settings.listen.port) == ("0.0.0.0", 9000)
    assert settings.nodes == (
        ConfiguredNode(url="http://p:1", roles=(Role.PREFILL,), model="m", aliases=("lora",), weight=2.0),
    )
    assert settings.deadlines.stall == 90.0
    assert settings.deadlines.connect == 5.0
    assert settings.limits.body_bytes == 2**20
    assert settings.policy.on_prefill_failure is OnPrefillFailure.LOCAL
    assert (settings.policy.migrations, settings.policy.ticket_life) == (0, 600.0)


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    config = file(tmp_path, "deadlines: {connect: 1, stall: 1, drain: 1}")
    environment = {"PDPROXY_CONFIG": str(config), "PDPROXY_DEADLINES_STALL": "2", "PDPROXY_DEADLINES_DRAIN": "2"}
    deadlines = load(flags("--deadlines-drain", "3"), None, environment).deadlines
    assert (deadlines.connect, deadlines.stall, deadlines.drain) == (1.0, 2.0, 3.0)


def test_nodes_come_from_the_first_source_that_names_any(tmp_path: Path) -> None:
    config = file(tmp_path, "nodes: [{url: 'http://file:1', role: decode}]")
    environment = {"PDPROXY_PREFILL": "http://p:1, http://p:2", "PDPROXY_DECODE": "http://d:1"}
    assert [node.url for node in load(None, config).nodes] == ["http://file:1"]
    assert [node.url for node in load(None, config, environment).nodes] == ["http://p:1", "http://p:2", "http://d:1"]
    assert [node.url for node in load(flags("--decode", "http://f:1"), config, environment).nodes] == ["http://f:1"]


def test_every_setting_has_a_variable_and_a_flag_of_its_own() -> None:
    every = every_setting()
    assert len(every) > 30
    assert len({each.variable for each in every}) == len({each.flag for each in every}) == len(every)
    for each in every:
        assert each.description.endswith(".")
        assert each.description[0].isupper()


def test_a_list_in_a_variable_or_a_flag_has_commas() -> None:
    environment = {"PDPROXY_LISTEN_ADMIN_NAMES": "a.example, b.example,"}
    assert load(environment=environment).listen.admin_names == ("a.example", "b.example")
    assert load(flags("--listen-admin-names", "c"), environment=environment).listen.admin_names == ("c",)
    assert load(environment={"PDPROXY_LISTEN_ADMIN_NAMES": ""}).listen.admin_names == ()


def test_short_flags() -> None:
    listen = load(flags("--host", "::1", "--port", "0", "--admin-port", "0")).listen
    assert (listen.host, listen.port, listen.admin_port) == ("::1", 0, 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"PDPROXY_DEADLINE_STALL": "1"},
            "the environment variable PDPROXY_DEADLINE_STALL names no setting. Did you mean PDPROXY_DEADLINES_STALL?",
        ),
        (
            {"PDPROXY_LISTN_PORT": "1"},
            "the environment variable PDPROXY_LISTN_PORT names no setting. Did you mean PDPROXY_LISTEN_PORT?",
        ),
        (
            {"PDPROXY_NONE_SUCH": "1"},
            "the environment variable PDPROXY_NONE_SUCH names no setting. `pdproxy settings` lists them.",
        ),
        (
            {"PDPROXY_DEADLINES_STALL": "soon"},
            "PDPROXY_DEADLINES_STALL: deadlines.stall must be a number of seconds above 0, not 'soon'.",
        ),
        (
            {"PDPROXY_PREFILL": "p:1"},
            "PDPROXY_PREFILL: url must be an address such as http://10.0.0.1:8000, not 'p:1'.",
        ),
        (
            {"PDPROXY_LISTEN_ADMIN_NAMES": "a:1"},
            "PDPROXY_LISTEN_ADMIN_NAMES: listen.admin_names must be a list of names such as x.example, not 'a:1'.",
        ),
        ({"PDPROXY_CONFIG": "/nowhere"}, "the file /nowhere cannot be read: No such file or directory."),
    ],
)
def test_faults_in_the_environment_are_named(environment: dict[str, str], message: str) -> None:
    assert complaint(environment=environment) == message


def test_foreign_variables_are_ignored() -> None:
    others = {
        "PDPROXY_SERVICE_HOST": "10.0.0.1",
        "PDPROXY_SERVICE_PORT_HTTP": "80",
        "PDPROXY_PORT": "tcp://10.0.0.1:80",
        "PDPROXY_PORT_80_TCP_ADDR": "10.0.0.1",
        "PDPROXY_ADMIN_SERVICE_HOST": "10.0.0.2",
        "PDPROXY_TICKET_KEYS": "secret",
        "PATH": "/bin",
    }
    assert load(environment=others) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deadline: {}", "there is no section 'deadline'. Did you mean deadlines?"),
        ("zzz: {}", "there is no section 'zzz'. There are listen, discovery, upstream, deadlines, limits,"),
        ("log: {zzz: 1}", "there is no setting 'log.zzz'. There are log.level, log.format."),
        ("listen: {stall: 1}", "there is no setting 'listen.stall'. Did you mean deadlines.stall?"),
        ("limits: {bodybytes: 1}", "there is no setting 'limits.bodybytes'. Did you mean limits.body_bytes?"),
        ("limits: 5", "limits must map names to values, not be 5."),
        ("[1]", "the file must map names to values, not be [1]."),
        ("log: {level: loud}", "log.level must be one of debug, info, warning, error, not 'loud'."),
        ("log: {level: info}\nlog: {format: json}", "'log' is there twice"),
        ("log: {", "is not YAML"),
        ("listen: {PORT: 1}", "there is no setting 'listen.PORT'. Did you mean listen.port?"),
        ("nodes: [5]", "nodes[0]: a node must map names to values, not be 5."),
        ("nodes: {}", "nodes must be a list of entries with url and roles."),
        ("nodes: [{role: decode}]", "nodes[0]: a node needs url."),
        ("nodes: [{url: 'http://a', role: decode, wieght: 2}]", "there is no setting 'wieght'. Did you mean weight?"),
        ("nodes: [{url: 'http://a', role: both}]", "roles must be one or both of prefill, decode, not 'both'."),
        ("nodes: [{url: 'http://a', roles: []}]", "roles must be one or both of prefill, decode, not []."),
        ("nodes: [{url: 'http://a', roles: [5]}]", "roles must be one or both of prefill, decode, not [5]."),
        ("nodes: [{url: 'http://a', role: decode, roles: prefill}]", "there is no setting 'role'."),
        (
            "nodes: [{url: 'http://a', role: decode}, {url: 'http://a', role: prefill, weight: 2}]",
            "the node http://a is there twice: it is one node, so write it once, with its roles.",
        ),
        ("nodes: [{url: 'http://a', role: decode, weight: 0}]", "weight must be a number above 0, not 0."),
        ("nodes: [{url: 'http://a/', role: decode}, {url: 'http://a', role: decode}]", "is there twice; use weight"),
        ("nodes: [{url: 'http://u:p@a', role: decode}]", "url must be an address without credentials"),
        ("nodes: [{url: 'http://a/v1', role: decode}]", "url must be an address such as http://10.0.0.1:8000, not"),
        ("nodes: [{url: 'http://a:99999', role: decode}]", "url must be an address such as http://10.0.0.1:8000, not"),
        ("limits: {body_bytes: 2MiB, held_bytes: 1MiB}", "limits.held_bytes (1048576) is less than limits.body_bytes"),
        ("listen: {port: 1, admin_port: 1}", "listen.port and listen.admin_port are both 1"),
        ("listen: {metrics: both, reuse_port: on}", "a scrape of the clients' port would reach one of the proxies"),
        ("listen: {port: 0, reuse_port: on}", "each proxy would pick a port of its own"),
        ("listen: {metrics: clients}", "listen.metrics must be one of operators, both, not 'clients'."),
        ("listen: {admin_names: ['a:1']}", "listen.admin_names must be a list of names such as x.example, not"),
        ("listen: {admin_names: 'http://a'}", "listen.admin_names must be a list of names such as"),
        ("listen: {admin_names: ['*.example.com']}", "listen.admin_names must be a list of names such as"),
        (f"listen: {{tls_key: {__file__}}}", "listen.tls_certificate and listen.tls_key go together"),
        ("policy: {migrations: 101}", "policy.migrations must be a whole number from 0 to 100, not 101."),
        ("policy: {migrations: -1}", "policy.migrations must be a whole number from 0 to 100, not -1."),
        ("policy: {ticket_life: 2h}", "policy.ticket_life must be a number of seconds from 0 to 3600, not '2h'."),
        (
            "deadlines: {drain: 10 minutes}",
            "deadlines.drain must be a number of seconds, at least 0, not '10 minutes'. Write 10m.",
        ),
        ("deadlines: {drain: 1.5 Hours}", "not '1.5 Hours'. Write 1.5h."),
        ("deadlines: {drain: 5sec}", "not '5sec'. Write 5s."),
        ("limits: {body_bytes: 64MB}", "not '64MB'. Write 64MiB."),
        ("policy: {ticket_life: -1}", "policy.ticket_life must be a number of seconds from 0 to 3600, not -1."),
        ("policy: {migrate: off}", "there is no setting 'policy.migrate'. Did you mean policy.migrations?"),
        ("keys: {file: /nowhere}", "keys.file: there is no file /nowhere."),
        ("upstream: {credential: replace}", "name the file in upstream.credential_file."),
        (
            "otel: {export: otlp, endpoint: here}",
            "otel.endpoint must be an address such as http://10.0.0.1:8000, not 'here'.",
        ),
        ("? [a, b]\n: 1", "found unhashable key"),
    ],
)
def test_faults_in_the_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    assert message in complaint(config=file(tmp_path, text))


def test_a_file_may_use_anchors(tmp_path: Path) -> None:
    text = """
    nodes:
      - &first {url: "http://a", role: decode, weight: 3}
      - {<<: *first, url: "http://b"}
    """
    assert [node.weight for node in load(config=file(tmp_path, text)).nodes] == [3.0, 3.0]


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not YAML" in complaint(config=path)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("--discovery-prefill", "file"), "discovery.file"),
        (("--discovery-decode", "dns", "--discovery-prefill-name", "p"), "discovery.decode_name"),
        (("--discovery-prefill", "kubernetes"), "discovery.prefill_selector"),
    ],
)
def test_each_kind_of_discovery_needs_its_settings(words: tuple[str, ...], missing: str) -> None:
    assert complaint(flags(*words)).endswith(f"that needs {missing}.")


def test_discovery_is_set_by_the_environment() -> None:
    said = {"PDPROXY_DISCOVERY_DECODE": "dns", "PDPROXY_DISCOVERY_DECODE_NAME": "d", "PDPROXY_DISCOVERY_DNS_PORT": "80"}
    discovery = load(environment=said).discovery
    assert (discovery.decode, discovery.decode_name, discovery.dns_port) == (DiscoveryKind.DNS, "d", 80)
    assert discovery.prefill is DiscoveryKind.STATIC


def test_the_kubernetes_api_must_be_an_address() -> None:
    assert "discovery.api" in complaint(flags("--discovery-api", "cluster"))


TEXT = """\
limits: 5
log:
  format: json
  level: loud
nodes:
  - url: "http://a"
    role: both
    aliases: [1, 2]
  - &b {url: "http://b", role: decode}
  - {<<: *b, wieght: 2}
keys: {file: /nowhere}
"""


def test_every_fault_is_named_with_its_place(tmp_path: Path) -> None:
    path = file(tmp_path, TEXT)
    given = {"PDPROXY_LISTEN_PORT": "no", "PDPROXY_LISTN_HOST": "x"}
    faults = complaint(flags("--otel-export", "maybe"), path, given).splitlines()
    assert sorted(faults) == sorted(
        [
            "the environment variable PDPROXY_LISTN_HOST names no setting. Did you mean PDPROXY_LISTEN_HOST?",
            "PDPROXY_LISTEN_PORT: listen.port must be a whole number from 0 to 65535, not 'no'.",
            "--otel-export: otel.export must be one of off, otlp, not 'maybe'.",
            f"the file {path}, line 1: limits must map names to values, not be 5.",
            f"the file {path}, line 4: log.level must be one of debug, info, warning, error, not 'loud'.",
            f"the file {path}, line 7, nodes[0]: roles must be one or both of prefill, decode, not 'both'.",
            f"the file {path}, line 8, nodes[0]: aliases must be a list of texts, not [1, 2].",
            f"the file {path}, line 10, nodes[2]: there is no setting 'wieght'. Did you mean weight?",
            f"the file {path}, line 11: keys.file: there is no file /nowhere.",
        ]
    )


def test_a_node_twice_is_named_with_its_source() -> None:
    assert complaint(flags("--decode", "http://a", "--decode", "http://a/")) == (
        "--decode: the decode node http://a is there twice; use weight to give it more."
    )


@pytest.mark.parametrize(
    "url", ["http://me:secret@a", "me:secret@a:1", "http://me:secret@a:99999", "ftp://me:secret@a"]
)
def test_a_possible_password_is_not_shown(url: str) -> None:
    message = complaint(environment={"PDPROXY_DECODE": url})
    assert message == "PDPROXY_DECODE: url must be an address without credentials, query or fragment."


def test_settings_made_directly_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("listen", "PDPROXY_LISTEN_PORT", "LISTEN"):
        monkeypatch.setenv(name, '{"port": 1}')
    assert Settings().listen.port == 8080
