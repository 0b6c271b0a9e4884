"""The page and the JSON schema of all settings are what the settings say."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from pdproxy.errors import SettingsError
from pdproxy.settings.catalog import every_setting, node_settings, sections
from pdproxy.settings.load import load
from pdproxy.settings.reference import printed_schema, reference, schema

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "text"), [("settings.md", reference()), ("settings.schema.json", printed_schema())], ids=["page", "schema"]
)
def test_generated_files_are_up_to_date(name: str, text: str) -> None:
    assert (DOCS / name).read_text() == text, "run: make generate"


def test_the_page_names_every_setting() -> None:
    page = reference()
    for section in (*sections(), "nodes"):
        assert f"## {section}\n" in page
    for each in (*every_setting(), *node_settings()):
        assert f"| `{each.name}`" in page


def test_the_schema_describes_every_setting() -> None:
    properties = schema()["properties"]
    for each in every_setting():
        described = properties[each.section]["properties"][each.name]
        assert described["description"] == each.description
    assert properties["nodes"]["items"]["properties"].keys() == {"role", *(each.name for each in node_settings())}
    assert jsonschema_rs.meta.is_valid(json.loads(printed_schema()))


GOOD = [
    "",
    "keys:",
    "nodes:",
    "listen: {port: 0, admin_port: '9000', tls_key: null}",
    "listen: {admin_names: [a, proxy-1.llm.svc.], metrics: both}",
    "listen: {admin_names: 'a, b.example'}",
    "nodes: [{url: 'http://[::1]:8000/', role: prefill, aliases: 'a, b', weight: '2.5'}]",
    "nodes: [{url: 'http://a'}, {url: 'http://b', roles: [decode, prefill]}, {url: 'http://c', roles: decode}]",
    "otel: {endpoint: 'http://[::1]:4318/a@b'}",
    "deadlines: {connect: 1, stall: 0.5, request: 90s, release: 1.5 h, drain: 0}",
    "limits: {body_bytes: 16MiB, held_bytes: 1 GiB, queue_seconds: 500ms}",
    "otel: {export: off, endpoint: ''}",
    "log: {level: warning, format: json}",
]
BAD = [
    "listn: {}",
    "listen: 5",
    "listen: {prot: 1}",
    "listen: {port: 65536}",
    "listen: {port: 1.5}",
    "listen: {port: '1.5'}",
    "listen: {host: ''}",
    "listen: {admin_names: ['a:1']}",
    "listen: {admin_names: ['-a']}",
    "listen: {tls_key: 5}",
    "nodes: {}",
    "nodes: [{role: decode}]",
    "nodes: [{url: 'http://a', roles: []}]",
    "nodes: [{url: 'http://a', roles: [both]}]",
    "nodes: [{url: a, role: decode}]",
    "nodes: [{url: 'http://u:p@a', role: decode}]",
    "nodes: [{url: 'http://a', role: both}]",
    "nodes: [{url: 'http://a', role: decode, weight: 0}]",
    "nodes: [{url: 'http://a', role: decode, aliases: [1]}]",
    "nodes: [{url: 'http://a/v1', role: decode}]",
    "deadlines: {connect: 0}",
    "deadlines: {connect: -1}",
    "deadlines: {stall: 5MiB}",
    "deadlines: {stall: true}",
    "limits: {body_bytes: 1023}",
    "policy: {migrations: 101}",
    "otel: {export: on}",
    "discovery: {decode_name: 5}",
]


def valid(text: str) -> bool:
    """Whether an editor would have nothing to say about a file."""
    values: Any = yaml.safe_load(text)
    return _checker().is_valid({} if values is None else values)


@cache
def _checker() -> jsonschema_rs.Validator:
    """A validator of the schema, which takes a fifth of a second to make."""
    return jsonschema_rs.validator_for(schema())


@pytest.mark.parametrize("text", GOOD)
def test_what_the_schema_accepts_the_proxy_accepts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pdproxy.yaml"
    path.write_text(text)
    assert valid(text)
    load(config=path)


@pytest.mark.parametrize("text", BAD)
def test_what_the_proxy_refuses_the_schema_refuses(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pdproxy.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError):
        load(config=path)
    assert not valid(text)


def test_defaults_stand_as_they_are_written_in_a_file() -> None:
    page = (Path(__file__).parents[2] / "docs/settings.md").read_text(encoding="utf-8")
    assert "`[prefill, decode]`" in page
    assert "<" not in "".join(line.split("|")[3] for line in page.splitlines() if line.count("|") == 5)
