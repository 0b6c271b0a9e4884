"""Settings: what is read, and the message for what cannot work."""

from pathlib import Path
from typing import Any

import pytest

from connector.config import ConfigError, ConnectorConfig, Role, from_vllm
from connector.ticket_keys import following

KEY = "0123456789abcdef"


def read(
    role: str = "kv_consumer", policy: str = "recompute", environ: dict[str, str] | None = None, **extra: Any
) -> ConnectorConfig:
    return ConnectorConfig.from_extra(role, policy, extra, environ or {})


def test_nothing_set_works() -> None:
    config = read()
    assert config.role is Role.DECODE
    assert config.keys == ()


def test_keys_come_from_a_file_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# the new one\n{KEY}-new\n\n{KEY}-old\n", encoding="utf-8")
    assert read(pdproxy_key_file=str(path)).keys == (f"{KEY}-new".encode(), f"{KEY}-old".encode())


def test_keys_come_from_the_environment() -> None:
    assert read(environ={"PDPROXY_TICKET_KEYS": f"{KEY}a, {KEY}b"}).keys == (f"{KEY}a".encode(), f"{KEY}b".encode())


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(read(environ={"PDPROXY_TICKET_KEYS": KEY}))


def test_keys_of_a_file_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY, encoding="utf-8")
    config = following(read(pdproxy_key_file=str(tmp_path / "keys")))
    assert tuple(config.keys) == (KEY.encode(),)
    assert KEY not in repr(config)
    assert KEY not in repr(config.keys)


def test_without_a_file_nothing_is_followed() -> None:
    config = read(environ={"PDPROXY_TICKET_KEYS": KEY})
    assert following(config) is config


def test_hosts_come_as_a_list_or_as_text() -> None:
    assert read(pdproxy_allowed_hosts=["a", "b"]).allowed_hosts == {"a", "b"}
    assert read(pdproxy_allowed_hosts="a, b").allowed_hosts == {"a", "b"}


def test_a_prefill_node_need_not_recompute() -> None:
    assert read(role="kv_producer", policy="fail").role is Role.PREFILL


@pytest.mark.parametrize(
    ("kv_role", "roles", "role"),
    [
        ("kv_consumer", ["prefill", "decode"], Role.BOTH),
        ("kv_consumer", "decode, prefill", Role.BOTH),
        ("kv_consumer", ["decode"], Role.DECODE),
        ("kv_producer", ["prefill"], Role.PREFILL),
        ("kv_both", ["prefill", "decode"], Role.BOTH),
        ("kv_both", None, Role.BOTH),
    ],
)
def test_a_node_of_both_roles_needs_no_role_of_vllm(kv_role: str, roles: object, role: Role) -> None:
    given = read(role=kv_role) if roles is None else read(role=kv_role, pdproxy_roles=roles)
    assert given.role is role


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"policy": "fail"}, "kv_load_failure_policy"),
        ({"role": "kv_producer", "pdproxy_roles": ["prefill", "decode"]}, "pdproxy_roles"),
        ({"role": "kv_both", "pdproxy_roles": ["decode"]}, "pdproxy_roles"),
        ({"pdproxy_roles": []}, "name prefill, decode, or both"),
        ({"pdproxy_roles": "both"}, "name prefill, decode, or both"),
        ({"pdproxy_roles": ["prefill"]}, "pdproxy_roles"),
        ({"role": "kv_nothing"}, "kv_role"),
        ({"bidirectional_kv_xfer": True}, "bidirectional_kv_xfer"),
        ({"pdproxy_key_file": "/nowhere/keys"}, "pdproxy_key_file"),
        ({"pdproxy_key_file": ""}, "pdproxy_key_file"),
        ({"environ": {"PDPROXY_TICKET_KEYS": ""}}, "PDPROXY_TICKET_KEYS"),
        ({"environ": {"PDPROXY_TICKET_KEYS": "short"}}, "shorter than 16"),
        ({"pdproxy_allowed_hosts": 7}, "pdproxy_allowed_hosts"),
        ({"pdproxy_read_deadline": 0}, "pdproxy_read_deadline"),
        ({"pdproxy_read_deadline": "30"}, "pdproxy_read_deadline"),
        ({"pdproxy_probe_timeout": -1}, "pdproxy_probe_timeout"),
        ({"pdproxy_verify_timeout": True}, "pdproxy_verify_timeout"),
        ({"pdproxy_progress_delay": -0.1}, "pdproxy_progress_delay"),
        ({"pdproxy_progress_delay": True}, "pdproxy_progress_delay"),
        ({"kv_lease_duration": 1e9}, "kv_lease_duration"),
        ({"pdproxy_keep_share": 1.1}, "pdproxy_keep_share"),
        ({"pdproxy_keep_share": "0.3"}, "pdproxy_keep_share"),
        ({"pdproxy_keep_share": True}, "pdproxy_keep_share"),
    ],
)
def test_what_cannot_work_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**given)


class Transfer:
    """The part of vLLM's KVTransferConfig that is read."""

    kv_role = "kv_producer"
    kv_load_failure_policy = "recompute"

    def get_from_extra_config(self, name: str, default: Any) -> Any:
        return {"pdproxy_read_deadline": 7, "unknown": 1}.get(name, default)


def test_vllm_s_own_config_is_read() -> None:
    config = from_vllm(Transfer(), {})
    assert (config.role, config.read_deadline, config.probe_timeout) == (Role.PREFILL, 7.0, 5.0)
