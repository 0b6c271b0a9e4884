"""The command line, and a run's course: what is shown, run, skipped, resumed and refused. Nothing is started here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.gpu import answers, attacks, kills, preflight
from deploy.gpu import run as course
from deploy.gpu.__main__ import list_of_steps, main
from deploy.gpu.asking import Known, to_json
from deploy.gpu.bounds import OverdueError, bounded
from deploy.gpu.bounds import run as run_apart
from deploy.gpu.fleet import Fleet
from deploy.gpu.options import Options, RunError, on_cpu, remember, with_changes
from deploy.gpu.results import Check, Step, StepResult, load, save
from deploy.gpu.run import Run, key_of, lanes_of
from deploy.local.readiness import NotReadyError

COMMIT = "a" * 40
PAIR = [Step.ANSWERS, Step.ATTACKS, Step.KILLS]
HELD = Check("held", True, "well")
LOST = Check("lost", False, "badly", "look")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return on_cpu(tmp_path / "run")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def book(options: Options, said: list[str]) -> Run:
    remember(options)
    return Run(options, said.append)


def told(step: Step, *checks: Check) -> StepResult:
    return StepResult(step, list(checks), 1.0)


class TestCommandLine:
    """`main`."""

    def test_a_plan_has_every_command_and_no_key(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        told = ["--dry-run", "--model", "org/model", "--revision", COMMIT, "--decode-gpus", "1,2"]
        assert main([*told, "--folder", str(tmp_path / "x")]) == 0
        shown = capsys.readouterr().out
        assert shown.count(" serve org/model ") == 4, "one alone, a prefill node and two decode nodes"
        assert f"--revision {COMMIT}" in shown
        assert "PDPROXY_TICKET_KEYS='…'" in shown
        assert "-m pdproxy serve" in shown
        assert all(f"\n{step}: " in shown for step in Step)
        assert not (tmp_path / "x").exists()

    @pytest.mark.parametrize(
        ("told", "said"),
        [
            ([], "name a model"),
            (["--cpu", "--model", "m"], "has a model of its own"),
            (["--cpu", "--lengths", "5000"], "do not fit --max-model-len 4096"),
        ],
    )
    def test_what_does_not_go_together_is_refused(
        self, told: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(told) == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize("told", [["--steps", "anwsers"], ["--lengths", "0"], ["--decode-gpus", "1,"]])
    def test_a_word_that_makes_no_sense_is_refused(self, told: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["--cpu", *told])
        assert ended.value.code == 2

    def test_steps_are_run_in_their_order(self) -> None:
        assert list_of_steps("kills,preflight") == [Step.PREFLIGHT, Step.KILLS]


class TestFolder:
    """A run is resumed in its folder."""

    def test_other_options_are_refused_once_there_is_something_to_resume(self, options: Options) -> None:
        remember(options)
        other = with_changes(options, {"streams": 99, "lengths": None})
        remember(other)
        save(options.folder, told(Step.ALONE, HELD))
        remember(other)
        with pytest.raises(RunError, match="another streams"):
            remember(options)

    def test_results_are_read_again(self, options: Options) -> None:
        assert load(options.folder, Step.KILLS) is None
        save(options.folder, StepResult(Step.KILLS, [HELD, LOST], 2.5, "broke", {"a": [1]}))
        again = load(options.folder, Step.KILLS)
        assert again is not None
        assert (again.checks, again.seconds, again.broken, again.figures) == ([HELD, LOST], 2.5, "broke", {"a": [1]})
        assert not again.good
        assert again.at

    def test_the_key_stays_and_is_its_owners(self, options: Options) -> None:
        options.folder.mkdir()
        key = key_of(options.folder)
        assert len(key) == 64
        assert key_of(options.folder) == key
        assert (options.folder / "ticket.key").stat().st_mode & 0o077 == 0


class TestCourse:
    """`Run.go`, with steps that are answered for."""

    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch, book: Run, options: Options) -> list[str]:
        """What was started or checked, in order; everything holds."""
        ran = list[str]()

        @contextmanager
        def up(*_: object) -> Iterator[Fleet]:
            ran.append("up")
            yield Fleet.__new__(Fleet)
            ran.append("down")

        def start(*_: object) -> Iterator[Check]:
            yield HELD

        known = Known("?", "a", ("a",), (5.0,))
        monkeypatch.setattr(course, "running_pair", up)
        monkeypatch.setattr(Run, "_compatible", start)
        for module, name in (
            (answers, "check_answers"),
            (attacks, "check_attacks"),
            (kills, "check_kills"),
        ):

            def checks(*_: object, name: str = name) -> Iterator[Check]:
                ran.append(name)
                yield HELD

            monkeypatch.setattr(module, name, checks)
        monkeypatch.setattr(kills, "nothing_held", lambda *_: HELD)
        monkeypatch.setattr(Run, "_keep_metrics", lambda *_: None)
        monkeypatch.setattr(Fleet, "heal", lambda _: ran.append("heal"))
        figures = {"known": {step.value: to_json([known]) for step in PAIR}}
        save(options.folder, StepResult(Step.ALONE, [HELD], figures=figures))
        return ran

    def test_nodes_are_up_once_and_whole_before_each_step(self, book: Run, ran: list[str]) -> None:
        assert book.go([Step.ANSWERS, Step.KILLS], [])
        assert ran == ["up", "heal", "check_answers", "heal", "check_kills", "down"]

    def test_what_held_is_not_run_again(self, book: Run, ran: list[str], said: list[str]) -> None:
        save(book.options.folder, told(Step.ANSWERS, HELD))
        save(book.options.folder, told(Step.ATTACKS, LOST))
        assert book.go(PAIR[:2], [])
        assert "check_answers" not in ran
        assert "check_attacks" in ran
        assert any("answers: held before" in line for line in said)
        ran.clear()
        assert book.go(PAIR[:2], [Step.ANSWERS])
        assert "check_answers" in ran
        assert "check_attacks" not in ran

    def test_nothing_is_started_where_all_held(self, book: Run, ran: list[str]) -> None:
        save(book.options.folder, told(Step.ANSWERS, HELD))
        assert book.go([Step.ANSWERS], [])
        assert not ran

    def test_a_step_that_fails_keeps_no_other_from_running(
        self, book: Run, ran: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(answers, "check_answers", lambda *_: [HELD, LOST])
        assert not book.go(PAIR, [])
        assert ran[-3:] == ["heal", "check_kills", "down"]
        assert "  FAILED  lost: badly. What to do: look" in said
        assert said[-1] == "not all holds: answers. The first of them first"

    def test_a_step_that_breaks_off_says_what_to_do(
        self, book: Run, ran: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_: object) -> None:
            raise NotReadyError("not up after 9 s: prefill node:\n  | out of memory")

        monkeypatch.setattr(Fleet, "heal", broken)
        assert not book.go([Step.KILLS], [])
        [line] = [line for line in said if "FAILED  not up" in line]
        first, rest = line.split("\n")
        assert "prefill node. What to do: see logs/" in first
        assert "out of memory" in rest

    def test_without_the_one_engines_answers_nothing_is_compared(
        self, book: Run, ran: list[str], said: list[str]
    ) -> None:
        (book.options.folder / "results" / "alone.json").unlink()
        assert not book.go([Step.KILLS], [])
        assert "check_kills" not in ran
        assert any("run the step alone first" in line for line in said)

    def test_nothing_is_started_on_a_machine_that_is_not_fit(
        self, book: Run, ran: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preflight, "check_machine", lambda _: [LOST])
        assert not book.go([Step.PREFLIGHT, Step.KILLS, Step.COLLECT], [])
        assert not ran
        assert (book.options.folder / "summary.md").read_text().count("**no**") == 1
        assert [path.name for path in book.options.folder.parent.glob("run-*.tar.gz")]

    def test_the_summary_says_what_failed(self, book: Run, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answers, "check_answers", lambda *_: [LOST])
        book.go([Step.ANSWERS, Step.COLLECT], [])
        summary = (book.options.folder / "summary.md").read_text()
        assert "| lost | **no** | badly | look |" in summary
        assert "A dry run on CPUs" in summary
        assert "Not run: preflight, attacks, kills, measure." in summary


def test_the_ways_that_ucx_takes_are_found_in_logs(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "2" / "decode-0.1.log"
    log.parent.mkdir(parents=True)
    line = "[17.5] [vm:22:0]  ucp_worker.c:1997 UCX  INFO    02b7 intra-node cfg#0 rma(cuda_ipc/cuda)  am(tcp/lo)\n"
    log.write_text(f"started\n{line}{line}")
    assert lanes_of(tmp_path) == ["intra-node cfg#0 rma(cuda_ipc/cuda)  am(tcp/lo)"]


class TestBounds:
    """A step ends in time."""

    def test_a_step_that_takes_too_long_is_ended(self) -> None:
        with pytest.raises(OverdueError, match="not over"), bounded(0.05):
            time.sleep(20)

    def test_what_is_in_time_hears_nothing(self) -> None:
        with bounded(0.1):
            pass
        time.sleep(0.15)

    def test_work_in_a_loop_is_ended_and_cleans_up(self) -> None:
        import asyncio

        ended = list[str]()

        async def waits() -> None:
            try:
                await asyncio.sleep(20)
            finally:
                ended.append("ended")

        with pytest.raises(OverdueError), bounded(0.2):
            run_apart(waits())
        assert ended == ["ended"]

    def test_a_result_and_an_error_come_through(self) -> None:
        async def gives(number: int) -> int:
            return 1 // number

        assert run_apart(gives(1)) == 1
        with pytest.raises(ZeroDivisionError):
            run_apart(gives(0))
