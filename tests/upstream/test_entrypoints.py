"""Which server a file of vLLM's tests gets, and when a comparison fails."""

from pathlib import Path

import pytest

from tests.upstream.entrypoints import SERVERS, Comparison, Outcome, report
from tests.upstream.ledger import Ledger

PASSED, FAILED = Outcome("passed", ""), Outcome("failed", "assert 1 == 2")
STARTS = "def server():\n    RemoteOpenAIServer(MODEL, [{flag!r}])\n"


def server_for(file: Path) -> str:
    return next(server.name for server in SERVERS if server.is_for(file))


@pytest.mark.parametrize(("flag", "name"), [("--reasoning-parser", "reasoning"), ("--dtype", "plain")])
def test_a_file_gets_a_server_with_the_flags_of_its_own(tmp_path: Path, flag: str, name: str) -> None:
    file = tmp_path / "test_a.py"
    file.write_text(STARTS.format(flag=flag))
    assert server_for(file) == name


@pytest.mark.parametrize(("argument", "name"), [("client", "reasoning"), ("question", "plain")])
def test_a_server_of_the_folders_fixtures_counts_where_it_is_asked(tmp_path: Path, argument: str, name: str) -> None:
    (tmp_path / "conftest.py").write_text(STARTS.format(flag="--reasoning-parser"))
    file = tmp_path / "test_a.py"
    file.write_text(f"async def test_a({argument}):\n    pass\n")
    assert server_for(file) == name


@pytest.mark.parametrize(
    ("proxied", "reasons", "code"),
    [
        ({"a": PASSED}, {}, 0),
        ({"a": FAILED}, {}, 1),
        ({"a": Outcome("skipped", "")}, {}, 1),
        ({"a": FAILED}, {"a": "why"}, 0),
        ({"a": PASSED}, {"a": "why"}, 1),
        ({"a": PASSED}, {"b": "why"}, 1),
    ],
    ids=["same", "new", "skipped through the proxy", "with a reason", "passes now", "fails alone"],
)
def test_a_run_fails_for_a_difference_without_a_row_and_for_a_row_without_a_difference(
    proxied: dict[str, Outcome], reasons: dict[str, str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Comparison({"a": PASSED, "b": FAILED}, proxied)
    assert report("0", found, Ledger(reasons, {}, ()), whole=True) == code
    assert ("NEW" in capsys.readouterr().out) == (code == 1 and not reasons)
