"""Names in `.env` that compose.yaml does not know are refused before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.env_check import known, main, unknown
from deploy.local.paths import ROOT
from tests.deploy.compose import COMPOSE, EXAMPLE, resolved

NAMES = {"MODEL", "MAX_NUM_SEQS", "NODE_ADDRESS"}


def site(folder: Path, env: str | None) -> Path:
    """A project's folder."""
    (folder / "compose.yaml").write_text(COMPOSE.read_text(encoding="utf-8"), encoding="utf-8")
    if env is not None:
        (folder / ".env").write_text(env, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("MODEL=a\n# MODELL=b\nexport MAX_NUM_SEQS=3\nNODE_ADDRESS: 10.0.0.1\n\n", []),
        ("COMPOSE_PROJECT_NAME=x\nDOCKER_HOST=y\nhttps_proxy=z\n", []),
        ("MAX_NUM_SEQ=3", [".env: compose.yaml has no MAX_NUM_SEQ: did you mean MAX_NUM_SEQS?"]),
        ("max_num_seqs=3", [".env: compose.yaml has no max_num_seqs: did you mean MAX_NUM_SEQS?"]),
        ("A=1\nA=2\n  Ä=3", [".env: compose.yaml has no A: see .env.example"]),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_one(env: str, said: list[str]) -> None:
    assert list(unknown(env, NAMES)) == said


def test_every_name_of_the_example_is_known() -> None:
    names = known(COMPOSE.read_text(encoding="utf-8"))
    set_there = EXAMPLE.read_text(encoding="utf-8").replace("# ", "").splitlines()
    mine = "\n".join(line for line in set_there if line.split("=")[0].isupper())
    assert mine.count("\n") > 30
    assert list(unknown(mine, names)) == []
    assert {"MODEL", "PDPROXY_CONFIG", "VLLM_API_KEY", "TOOL_PARSER"} <= names


def test_the_exit_status_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(site(tmp_path, None), (), {}) == 0
    assert main(site(tmp_path, "MODEL=a"), (), {}) == 0
    assert main(site(tmp_path, "NODE_ADRESS=10.0.0.1"), (), {}) == 1
    assert capsys.readouterr().err == ".env: compose.yaml has no NODE_ADRESS: did you mean NODE_ADDRESS?\n"
    (tmp_path / ".env").write_bytes(b"\xff")
    assert main(tmp_path, (), {}) == 1
    (tmp_path / ".env").unlink()
    (tmp_path / "compose.yaml").unlink()
    assert main(tmp_path, (), {}) == 1


@pytest.mark.parametrize(
    ("profile", "name"),
    [("prefill", "env-check"), ("decode", "env-check"), ("node", "env-check"), ("cpu", "cpu-env-check")],
)
def test_compose_runs_it_before_any_node(profile: str, name: str, tmp_path: Path) -> None:
    services = resolved(profile)
    nodes = {each for each in services if each.removeprefix("cpu-") in ("prefill", "decode", "node")}
    assert nodes
    for each in nodes:
        assert services[each]["depends_on"][name]["condition"] == "service_completed_successfully"
        assert services[name]["image"] == services[each]["image"]
    line: list[str] = services[name]["entrypoint"] + services[name]["command"]
    python, words = line[0], line[1:]
    assert python == "python3"
    assert services[name]["volumes"] == [".:/site:ro"]
    gpu = profile != "cpu"
    assert services[name].get("environment", {}).keys() == ({"NODE_ADDRESS"} if gpu else set())
    for env, address, said in (
        ("MODEL=a", "10.0.0.1", ""),
        ("MODELL=a", "10.0.0.1", ".env: compose.yaml has no MODELL: did you mean MODEL?\n"),
        ("MODEL=a", "", "set NODE_ADDRESS in .env: the address by which the other hosts" if gpu else ""),
    ):
        folder = site(tmp_path, env)
        (folder / "deploy").mkdir(exist_ok=True)
        (folder / "deploy" / "env_check.py").write_bytes((ROOT / "deploy" / "env_check.py").read_bytes())
        here = [sys.executable, *(word.replace("/site", str(folder)) for word in words)]
        ran = subprocess.run(here, env={"NODE_ADDRESS": address}, check=False, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr[: len(said)]) == (1 if said else 0, said)
