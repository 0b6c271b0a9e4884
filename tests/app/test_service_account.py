"""The service account of a pod."""

from pathlib import Path

import pytest

from pdproxy.app.host import ServiceAccount, api_address
from pdproxy.errors import SettingsError


def test_the_token_may_be_missing(tmp_path: Path) -> None:
    account = ServiceAccount(tmp_path)
    assert account.token is None
    (tmp_path / "token").write_text("t0ken")
    assert account.token == tmp_path / "token"


def test_the_namespace_is_the_pods_own(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="namespace"):
        ServiceAccount(tmp_path).namespace()
    (tmp_path / "namespace").write_text("ai")
    assert ServiceAccount(tmp_path).namespace() == "ai"
    assert ServiceAccount(tmp_path).authorities == tmp_path / "ca.crt"


def test_the_api_is_where_the_environment_says() -> None:
    host = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert api_address(host) == "https://10.96.0.1:443"
    assert api_address({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}) == (
        "https://[fd00::1]:6443"
    )
    with pytest.raises(SettingsError, match="KUBERNETES_SERVICE_HOST"):
        api_address({})
