"""TLS on the clients' port."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import httpx
import pytest

from pdproxy.__main__ import main
from tests.watch.process import SOON, serving

HERE = Path(__file__).parents[1] / "transport" / "tls"
CERTIFICATE, KEY, LOCKED = HERE / "certificate.pem", HERE / "key.pem", HERE / "locked.pem"


async def test_clients_speak_tls_and_operators_need_not(tmp_path: Path) -> None:
    listen = {"port": 0, "admin_port": 0, "tls_certificate": str(CERTIFICATE), "tls_key": str(KEY)}
    trusting = ssl.create_default_context(cafile=CERTIFICATE)
    async with (
        serving(tmp_path, {"listen": listen}) as process,
        httpx.AsyncClient(trust_env=False, verify=trusting) as client,
    ):
        secure = process.clients.replace("http://", "https://")
        await listening(client, secure + "/health")
        assert (await client.get(process.operators + "/health")).status_code == 200
        late = await client.post(secure + "/v1/completions", content=b"x" * 100, headers=BROTLI)
        assert late.status_code == 415
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(process.clients + "/health")


BROTLI = {"content-type": "application/json", "content-encoding": "br"}


async def listening(client: httpx.AsyncClient, url: str) -> None:
    """Wait until a page answers: the address is told as soon as it is taken."""
    async with asyncio.timeout(SOON):
        while True:
            with contextlib.suppress(httpx.ConnectError):
                assert (await client.get(url)).status_code == 200
                return
            await asyncio.sleep(0.05)


def _words(certificate: Path, key: Path) -> list[str]:
    ports = ["--listen-port", "0", "--listen-admin-port", "0"]
    return ["serve", *ports, "--listen-tls-certificate", str(certificate), "--listen-tls-key", str(key)]


@pytest.mark.parametrize("pair", [(CERTIFICATE, CERTIFICATE), (KEY, KEY), (CERTIFICATE, LOCKED)], ids=range(3))
def test_an_unusable_certificate_or_key_is_named_in_one_line(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words(*pair)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("pdproxy: listen.tls_certificate, listen.tls_key: ")
