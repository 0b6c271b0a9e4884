"""One run of guidellm against one address, and what its report says of each request."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deploy.bench.engines.environment import GUIDELLM_VENV
from deploy.bench.engines.loads import Load, Question, Shape, rows
from deploy.bench.rounds import BenchError
from deploy.local.node import SERVED_NAME
from deploy.local.paths import MODEL
from deploy.local.supervise import Supervisor, inherited

T = TypeVar("T")
TRIES = 3
REQUEST_SECONDS = 60.0
START_SECONDS = 120.0
"""For the tool itself, which takes five seconds to load on a quiet machine."""


class LostReportError(BenchError):
    """guidellm's report lacks a request that it does not call failed either.

    Seen with 0.8.1 on a machine with far too much to do: its coordinator stops reading when all has ended, and may do
    so before it has read what came of the last request (`WorkerProcessGroup.request_updates`). That one may be the
    slowest, so a run without it has no figures.
    """


class Answer(NamedTuple):
    """The measurements of guidellm for one request.

    Attributes:
        right: whether the text is what the model should say.
        began, ended: seconds of the clock, from the request's first byte to the end of its answer.
        first_token: milliseconds from its beginning to the first text.
        inter_token: milliseconds between two tokens, the mean of this answer's.
        tokens: of the answer.
    """

    shape: Shape
    right: bool
    began: float
    ended: float
    first_token: float
    inter_token: float
    tokens: int


def until_reported(attempt: Callable[[], T], say: Callable[[str], None]) -> T:
    """Try again, `TRIES` times in all, where the tool lost a report; no other failure is tried again."""
    for _ in range(TRIES - 1):
        try:
            return attempt()
        except LostReportError as error:
            say(f"{error}; once more, with other prompts …")
    return attempt()


def ask(url: str, load: Load, asked: Sequence[Question], folder: Path) -> list[Answer]:
    """Have guidellm send these requests; its files stay in `folder`. The first requests of the load are left out.

    Raises:
        LostReportError: see there; worth another run.
        BenchError: the tool failed, or a request did.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text(rows(asked), encoding="utf-8")
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    (folder / "scenario.json").write_text(json.dumps(scenario(url, load, folder), indent=1), encoding="utf-8")
    _run([str(GUIDELLM_VENV / "bin" / "python"), "-m", "guidellm", "run", "-c", "scenario.json"], load, folder)
    return answers(json.loads(report.read_text(encoding="utf-8")), asked)[load.first :]


def scenario(url: str, load: Load, folder: Path) -> dict[str, Any]:
    """guidellm's configuration of such a run."""
    backend: dict[str, Any] = {
        "kind": "openai_http",
        "target": url,
        "model": SERVED_NAME,
        "request_format": "/v1/completions",
    }
    backend |= {"http2": False, "timeout": REQUEST_SECONDS, "extras": {"body": {"temperature": 0}}}
    limits = [{"kind": "max_requests", "count": load.requests}, {"kind": "max_duration", "seconds": load.seconds}]
    spec = {"backend": backend, "profile": dict(load.profile), "constraints": limits}
    spec |= {"tokenizer": {"kind": "huggingface_auto", "model": str(MODEL)}}
    spec |= {"data": [{"kind": "json_file", "path": str(folder / "prompts.jsonl")}]}
    return {"spec": spec | {"outputs": [{"kind": "json", "path": str(folder / "report.json")}]}}


def _run(command: Sequence[str], load: Load, folder: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    small = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    small |= {"GUIDELLM__MP_POLL_INTERVAL": "1"}  # seconds; it looks ten times less often whether it may stop reading
    environment = {**inherited(), **offline, **small}
    with Supervisor(folder) as supervisor:  # which ends the tool's own processes too, whatever happens
        part = supervisor.start("guidellm", [*command, "--disable-console-interactive"], environment, folder)
        try:
            code = part.process.wait(START_SECONDS + load.seconds)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"guidellm did not end in time; the end of {part.log}:\n{part.last_lines()}") from error
    if code != 0:
        raise BenchError(f"guidellm ended with code {code}; the end of {part.log}:\n{part.last_lines()}")


def answers(report: Mapping[str, Any], asked: Sequence[Question]) -> list[Answer]:
    """The requests of a report, in the order in which they were sent.

    Raises:
        LostReportError: a request is not in the report.
        BenchError: one was not answered in full, or guidellm lacks a time of it.
    """
    [benchmark] = report["benchmarks"]
    requests = {kind: found or [] for kind, found in benchmark["requests"].items()}
    failed = [each for kind in ("errored", "incomplete") for each in requests.get(kind, [])]
    done = sorted(requests["successful"], key=lambda each: float(each["request_start_time"]))
    if failed:
        why = "; ".join(sorted({str(each["info"]["error"]) for each in failed})[:3])
        raise BenchError(f"{len(done)} of {len(asked)} requests were answered, {len(failed)} failed: {why}")
    if len(done) != len(asked):
        raise LostReportError(f"guidellm tells of {len(done)} of {len(asked)} requests, and of no failure")
    by_prompt = {question.prompt: question for question in asked}
    return [_answer(each, by_prompt) for each in done]


def _answer(request: Mapping[str, Any], by_prompt: Mapping[str, Question]) -> Answer:
    question = by_prompt[json.loads(request["request_args"])["body"]["prompt"]]
    text, tokens = request["output"] or "", request["output_tokens"]
    first_token, inter_token = request["time_to_first_token_ms"], request["inter_token_latency_ms"]
    if tokens != question.shape.answer or first_token is None or inter_token is None:
        times = f"first token after {first_token} ms, then one every {inter_token} ms"
        raise BenchError(f"an answer has {tokens} tokens instead of {question.shape.answer} ({times}): {text!r}")
    began, ended = float(request["request_start_time"]), float(request["request_end_time"])
    right = bool(text) and question.answer.startswith(text)
    return Answer(question.shape, right, began, ended, float(first_token), float(inter_token), int(tokens))
