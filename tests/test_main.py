"""The command line, without starting anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from pdproxy.__main__ import main
from pdproxy.settings.reference import reference


def test_settings_prints_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    assert capsys.readouterr().out == reference()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--prot", "1"], "--prot is no flag of this command. Did you mean --port?"),
        (["serve", "--port", "no"], "--listen-port: listen.port must be a whole number from 0 to 65535, not 'no'."),
        (["serve", "--prefill", "x"], "the prefill node: 'x' is not an address"),
        (["serve", "--deadlines-stall"], "expected one argument"),
        (["check"], "there are no nodes to check"),
        (["srve"], "invalid choice: 'srve'"),
        ([], "required: COMMAND"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("pdproxy: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["check", "--help"], ["--version"]])
def test_help_is_there(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert "pdproxy" in capsys.readouterr().out


def test_the_module_can_be_run() -> None:
    command = [sys.executable, "-m", "pdproxy", "--version"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=True, timeout=120)
    assert done.stdout.startswith(b"pdproxy ")
