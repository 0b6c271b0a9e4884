"""The archive has everything that a run left, and no secret of it."""

import tarfile
from pathlib import Path

import pytest

from deploy.gpu import archive
from deploy.gpu.archive import archive_name, files_in, pack, search, secrets_of, without_secrets
from deploy.gpu.options import RunError

KEY = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
HUB = "hf_" + "Ab1" * 11


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "logs" / "1").mkdir(parents=True)
    (run / "logs" / "1" / "prefill.1.log").write_text(
        f"started with {KEY}\nauthorization: Bearer abcdefgh12345678\n{HUB}\n"
    )
    (run / "summary.md").write_text("# all is well\n")
    (run / "ticket.key").write_text(KEY)
    (run / "elsewhere.txt").symlink_to("/etc/hostname")
    (run / "core").write_bytes(b"\0" * 10)
    return run


def texts(path: Path) -> dict[str, str]:
    with tarfile.open(path) as packed:
        return {
            each.name: source.read().decode() for each in packed if (source := packed.extractfile(each)) is not None
        }


def test_what_is_known_and_what_looks_secret_is_left_out(folder: Path) -> None:
    to = folder.with_name("run-1.tar.gz")
    names = pack(folder, to, {"the ticket key": KEY.encode()})
    assert names == ["run-1/logs/1/prefill.1.log", "run-1/summary.md"]
    held = texts(to)
    assert held["run-1/summary.md"] == "# all is well\n"
    log = held["run-1/logs/1/prefill.1.log"]
    assert log.startswith("started with [left out: the ticket key]\n")
    assert not any(each in log for each in (KEY, HUB, "abcdefgh12345678"))
    assert not search(to, {"the ticket key": KEY.encode()})


def test_an_archive_that_holds_a_secret_is_not_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "without_secrets", lambda content, _: content)
    to = folder.with_name("run-1.tar.gz")
    with pytest.raises(RunError, match="the ticket key is still in the archive"):
        pack(folder, to, {"the ticket key": KEY.encode()})
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


def test_links_and_other_kinds_of_files_are_not_taken(folder: Path) -> None:
    assert [path.name for path in files_in(folder)] == ["prefill.1.log", "summary.md"]


def test_names_of_files_are_searched_too(folder: Path) -> None:
    (folder / f"{KEY}.txt").write_text("")
    with pytest.raises(RunError):
        pack(folder, folder.with_name("run-1.tar.gz"), {"the ticket key": KEY.encode()})


def test_secrets_are_found_by_the_names_of_variables(tmp_path: Path) -> None:
    keys = tmp_path / "api.keys"
    keys.write_text("# clients\nfirst-client-key team-a 5\nsecond-client-key\n")
    found = secrets_of({
        "HF_TOKEN": HUB, "PDPROXY_TICKET_KEYS": "one-ticket-key,another-ticket-key", "PDPROXY_KEYS_FILE": str(keys),
        "HTTPS_PROXY": "http://user:a-long-password@proxy:3128", "VLLM_API_KEY": "short", "HOME": "/home/somebody",
        "GIT_AUTHOR_NAME": "Some Body Else",
    })  # fmt: skip
    values = {value.decode() for value in found.values()}
    assert {HUB, "one-ticket-key", "another-ticket-key", "first-client-key", "second-client-key"} <= values
    assert "a-long-password" in values
    assert not values & {"short", "/home/somebody", "Some Body Else", "team-a", "#"}


@pytest.mark.parametrize(
    "secret",
    [HUB, "sk-proj-0123456789abcdef0", "Bearer a1b2c3d4e5f6g7h8", "https://me:p4ssw0rd@host/x",
     "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----"],
)  # fmt: skip
def test_what_looks_secret_is_left_out(secret: str) -> None:
    kept = without_secrets(f"before {secret} after".encode(), {}).decode()
    assert kept.startswith("before ")
    assert kept.endswith(" after")
    assert "left out" in kept
    assert not any(part in kept for part in (HUB, "0123456789abcdef0", "a1b2c3d4e5f6g7h8", "p4ssw0rd", "MIIE"))


@pytest.mark.parametrize(
    "plain", ["tcp://127.0.0.1:5600", "http://127.0.0.1:8000/v1?x=a@b", "sk-tiny", "the bearer is"]
)
def test_what_is_no_secret_stays(plain: str) -> None:
    assert without_secrets(plain.encode(), {}) == plain.encode()


def test_an_archive_lies_beside_its_folder() -> None:
    assert archive_name(Path("/x/.run/gpu-m"), 0.0) == Path("/x/.run/gpu-m-19700101-000000.tar.gz")
