"""The command line, without starting anything."""

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdproxy.__main__ import COMMANDS, main
from pdproxy.settings.reference import printed_schema, reference


def test_settings_prints_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    assert capsys.readouterr().out == reference()


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings-schema"]) == 0
    assert capsys.readouterr().out == printed_schema()


def test_each_fault_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "no", "--log-level", "loud"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("pdproxy: --l") for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--prot", "1"], "--prot is no flag of this command. Did you mean --port?"),
        (["serve", "--port", "no"], "--listen-port: listen.port must be a whole number from 0 to 65535, not 'no'."),
        (["serve", "--prefill", "x"], "--prefill: url must be an address such as http://10.0.0.1:8000, not 'x'."),
        (["serve", "--deadlines-stall"], "expected one argument"),
        (["check"], "there are no nodes to check"),
        (["srve"], "invalid choice: 'srve'"),
    ],
)
def test_unusable_arguments_are_named_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("pdproxy: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_without_a_command_all_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for name, text in COMMANDS.items():
        assert re.search(rf"(?m)^ +{name} +{re.escape(text)}$", said.err)


def test_help_names_the_kind_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    usage, _, _ = said.partition("\n")
    assert usage.startswith("usage: pdproxy serve [--config FILE] [--prefill URL] … [--decode URL] … [--node URL] … ")
    for flag in (
        "--deadlines-drain SECONDS",
        "--limits-body-bytes BYTES",
        "--keys-file FILE",
        "--log-format json|text",
    ):
        assert f"  {flag}" in said
    assert " VALUE\n" not in said


@pytest.mark.parametrize("module", ["pdproxy.app.run.serve", "pdproxy.settings.load.load"])
def test_ctrl_c_during_a_start_ends_it_without_a_traceback(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, interrupted)
    try:
        status = main(["serve", "--decode", "http://127.0.0.1:9"])
    except KeyboardInterrupt:
        pytest.fail("Python would print a traceback")
    assert status == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words", [["--help"], ["serve", "--help"], ["check", "--help"], ["settings", "-h"], ["--version"]]
)
def test_help_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert "pdproxy" in capsys.readouterr().out


def test_the_module_can_be_run() -> None:
    command = [sys.executable, "-m", "pdproxy", "--version"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=True, timeout=120)
    assert done.stdout.startswith(b"pdproxy ")


def test_help_and_version_load_no_library() -> None:
    code = "import sys; from pdproxy.__main__ import _commands; _commands().format_help(); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=True, timeout=120)
    assert {"pydantic", "yaml", "fastapi", "asyncio"}.isdisjoint(done.stdout.decode().split())


def test_settings_load_neither_server_nor_web_framework() -> None:
    command = [sys.executable, "-c", "import sys, pdproxy.settings.load; print(*sys.modules)"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=True, timeout=120)
    assert {"fastapi", "starlette", "uvicorn", "opentelemetry"}.isdisjoint(done.stdout.decode().split())


def test_serve_loads_nothing_that_a_port_needs_later_or_never() -> None:
    """A web framework for operators, an HTTP client for the preflight, YAML for a file and for the OpenAPI document."""
    code = "import sys, pdproxy.settings.load, pdproxy.app.run; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=True, timeout=120)
    loaded = done.stdout.decode().split()
    assert "uvicorn" in loaded
    assert {"fastapi", "starlette", "httpx", "yaml", "opentelemetry.sdk"}.isdisjoint(loaded)


def test_the_collector_rests_for_the_imports_alone() -> None:
    code = "import gc; from pdproxy.server.server import tune_collector as t; gc.disable(); t(); print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, check=True)
    assert done.stdout == b"True\n"
    assert main(["serve", "--listen-port", "-1"]) == 2
    assert gc.isenabled()
