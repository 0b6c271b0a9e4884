"""The environment: its parts, when it counts as made, and how a failure is reported."""

import sys
from pathlib import Path

import pytest

from deploy.local.bootstrap import (
    COMPILED_FROM,
    LOCKS,
    STAMP,
    TORCH_INDEX,
    BootstrapError,
    Plan,
    check_python,
    fastest,
    locked_command,
    loop_time,
    make_pinned,
    pythons_on,
    run_first_that_works,
    torch_commands,
)
from deploy.local.paths import REQUIREMENTS

PROJECT = '[project]\nname = "x"\n'


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A repository with locks, and an environment that looks made."""
    (tmp_path / "requirements").mkdir()
    for name in LOCKS:
        (tmp_path / "requirements" / f"{name}.txt").write_text(f"{name}==1\n", encoding="utf-8")
    for file in COMPILED_FROM:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("int one;\n", encoding="utf-8")
    (tmp_path / "connector").mkdir()
    for folder in (tmp_path, tmp_path / "connector"):
        (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    made = Plan(tmp_path, tmp_path / "venv")
    made.python.parent.mkdir(parents=True)
    made.python.touch()
    (made.venv / STAMP).write_text(made.fingerprint(), encoding="utf-8")
    return made


def test_an_environment_that_is_made_is_not_made_again(plan: Plan) -> None:
    assert plan.is_made()


@pytest.mark.parametrize("lock", LOCKS)
def test_a_changed_lock_makes_it_stale(plan: Plan, lock: str) -> None:
    plan.lock(lock).write_text("other==2\n", encoding="utf-8")
    assert not plan.is_made()


@pytest.mark.parametrize("file", COMPILED_FROM)
def test_what_is_compiled_anew_makes_it_stale(plan: Plan, file: str) -> None:
    (plan.root / file).write_text("int two;\n", encoding="utf-8")
    assert not plan.is_made()


@pytest.mark.parametrize("distribution", [".", "connector"])
def test_only_what_the_project_declares_of_itself_counts(plan: Plan, distribution: str) -> None:
    settings = plan.root / distribution / "pyproject.toml"
    settings.write_text(PROJECT + "[tool.ruff]\nline-length = 1\n", encoding="utf-8")
    assert plan.is_made()
    settings.write_text('[project]\nname = "y"\n', encoding="utf-8")
    assert not plan.is_made()


def test_an_unfinished_environment_is_not_made(plan: Plan) -> None:
    (plan.venv / STAMP).unlink()
    assert not plan.is_made()


def test_without_an_interpreter_it_is_not_made(plan: Plan) -> None:
    plan.python.unlink()
    assert not plan.is_made()


def test_the_right_python_passes() -> None:
    check_python((3, 11, 9), "linux")


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 10, 0), (3, 12, 1), (4, 11, 0)])
def test_a_wrong_python_is_named_with_a_way_out(version: tuple[int, ...]) -> None:
    with pytest.raises(BootstrapError, match=rf"needs Python 3\.11.*found {'.'.join(map(str, version))}(.|\n)*PYTHON="):
        check_python(version, "linux")


def test_another_system_is_turned_away() -> None:
    with pytest.raises(BootstrapError, match="run on Linux; this is darwin"):
        check_python((3, 11, 9), "darwin")


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"asked": 1.0, "a": 0.9, "b": 0.7, "c": 0.8}, "b"),
        ({"asked": 1.0, "a": 0.9}, "asked"),
        ({"asked": 1.0, "a": None}, "asked"),
        ({"asked": None, "a": 2.0}, "a"),
        ({"asked": None}, "asked"),
    ],
)
def test_a_python_that_is_clearly_faster_is_taken(times: dict[str, float | None], best: str) -> None:
    assert fastest("asked", [name for name in times if name != "asked"], times.__getitem__) == best


def test_a_moment_in_which_the_machine_is_slow_decides_nothing() -> None:
    times = {"asked": iter([0.9, 1.0, 1.1]), "a": iter([1.4, 0.7, 1.5])}
    assert fastest("asked", ["a"], lambda name: next(times[name])) == "a"


def test_pythons_are_found_on_the_path_once_each(tmp_path: Path) -> None:
    one, two, link, empty = (tmp_path / name for name in ("one", "two", "link", "empty"))
    for folder in (one, two, link, empty):
        folder.mkdir()
    for folder in (one, two):
        (folder / "python3.11").touch(0o755)
    (two / "python3.12").touch(0o755)
    (link / "python3.11").symlink_to(one / "python3.11")
    assert pythons_on(f"{one}:{empty}::{two}:{link}") == [str(one / "python3.11"), str(two / "python3.11")]


def test_only_a_python_that_can_hold_the_environment_is_timed(tmp_path: Path) -> None:
    unusable = tmp_path / "python3.11"
    unusable.write_text("#!/bin/sh\nexit 1\n")
    unusable.chmod(0o755)
    assert loop_time(str(unusable)) is None
    seconds = loop_time(sys.executable)
    assert seconds is None or 0 < seconds < 10  # None: without headers


def test_torch_is_looked_for_where_pip_is_configured_first(plan: Plan) -> None:
    configured, public = torch_commands(plan)
    assert TORCH_INDEX not in configured
    assert public == [*configured, "--index-url", TORCH_INDEX]


def test_nothing_is_left_to_the_resolver(plan: Plan) -> None:
    command = locked_command(plan)
    assert "--no-deps" in command
    assert [part for part in command if part.endswith(".txt")] == [
        str(plan.lock(name)) for name in ("proxy", "cpu", "dev")
    ]


def test_the_next_command_is_tried_when_one_fails(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    run_first_that_works([[sys.executable, "-c", "raise SystemExit(1)"], ["touch", str(proof)]])
    assert proof.exists()


def test_a_failure_has_the_output_of_each_command() -> None:
    failing = [[sys.executable, "-c", f"raise SystemExit({word!r})"] for word in ("first words", "second words")]
    with pytest.raises(BootstrapError, match=r"first words(.|\n)*second words"):
        run_first_that_works(failing)


def test_the_locks_pin_everything_exactly_once_and_leave_cuda_builds_out() -> None:
    pins = [line for name in LOCKS for line in (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()]
    names = [pin.partition("==")[0] for pin in pins]
    assert all("==" in pin for pin in pins)
    assert len(set(names)) == len(names)
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
    assert "torch==2.13.0+cpu" in pins


def test_an_environment_of_pins_is_made_when_they_change_and_when_it_was_not_finished(plan: Plan) -> None:
    pins, installed = plan.root / "pins.txt", plan.root / "installed"
    pins.write_text("one==1\n", encoding="utf-8")
    plan.python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    plan.python.chmod(0o755)
    with pytest.raises(BootstrapError):
        make_pinned(plan, pins)
    plan.python.write_text(f'#!/bin/sh\necho "$@" >> {installed}\n', encoding="utf-8")
    for text in ("one==1\n", "one==1\n", "one==2\n", "one==2\n"):
        pins.write_text(text, encoding="utf-8")
        make_pinned(plan, pins)
    assert len(installed.read_text(encoding="utf-8").splitlines()) == 2
