"""Run the scripts of official clients in `clients/`: their environments, their questions, their output.

Each client has an environment of its own, made once in `.run`, with the versions that `clients/` pins. Our own
environment stays free of their dependencies.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploy.local.bootstrap import Plan, make_pinned
from deploy.local.model.quiz import Quiz, recite
from deploy.local.node import SERVED_NAME
from deploy.local.paths import ROOT, RUNS
from deploy.local.ports import HOST
from tests.e2e.quiz_parsers import CALL_BEGINS, THINKING_END
from tests.e2e.stream_shapes import TOOLS, calling, recital, thinking, thinking_and_calling

Json = dict[str, Any]

SCRIPTS = Path(__file__).parent / "clients"
PINS = SCRIPTS / "requirements.txt"
VENV = RUNS / "clients-venv"
PACKAGES = RUNS / "clients-npm"
WITHIN_S = 600.0
"""Seconds for all checks of one client."""
EACH = 32
"""Questions of each kind for one script."""
PICK: Json = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
"""The parameters of the forced tool. Only one text satisfies the schema, so that rounding cannot change the answer."""
KINDS: Mapping[str, Callable[[int], Quiz]] = {
    "recital": recital,
    "thinking": thinking,
    "calling": calling,
    "both": thinking_and_calling,
    "forced": recital,
    "long": partial(recite, tokens=1000, lines=190),
}
"""Kinds of questions. `long` has an answer of 950 tokens: clients that leave at its first token leave before the
last."""


class ClientError(Exception):
    """A script ended before its last check, or cannot run here; the message says why."""


def command(file: str) -> tuple[list[str], Path]:
    """The script's command line and its folder. Its environment is made first if it is missing."""
    if file.endswith(".mjs"):
        return [make_packages(), file], PACKAGES
    plan = Plan(ROOT, VENV)
    make_pinned(plan, PINS)
    return [str(plan.python), "-m", f"tests.e2e.clients.{file.removesuffix('.py')}"], ROOT


def make_packages() -> str:
    """Install the Node clients beside the scripts, where Node looks for packages. Returns the path of Node.

    Raises ClientError where there is no Node. A skip would report clients as working that nobody has run.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise ClientError("the clients for Node need Node.js 20 or newer: `node` and `npm` are not on PATH")
    PACKAGES.mkdir(parents=True, exist_ok=True)
    lock = "package-lock.json"
    made = PACKAGES / "node_modules" / ".made-from"
    wanted = (SCRIPTS / lock).read_text(encoding="utf-8")
    for file in (*SCRIPTS.glob("*.mjs"), SCRIPTS / "package.json", SCRIPTS / lock):
        shutil.copy(file, PACKAGES)
    if not made.exists() or made.read_text(encoding="utf-8") != wanted:
        install = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(install, cwd=PACKAGES, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClientError(f"npm ci failed:\n{done.stderr[-2000:]}")
        made.write_text(wanted, encoding="utf-8")
    return node


@dataclass(frozen=True)
class Answer:
    """The result of one check. `question`: the name of the question; empty where it does not matter."""

    check: str
    question: str
    got: Json


def questions(first_seed: int) -> dict[str, dict[str, Quiz]]:
    """Questions by kind and name. Seeds that are 200 apart share no prompt."""
    return {
        kind: {f"{kind} {number}": make(first_seed + place * EACH + number) for number in range(EACH)}
        for place, (kind, make) in enumerate(KINDS.items())
    }


def task(url: str, asked: Mapping[str, Mapping[str, Quiz]]) -> Json:
    """The script's standard input."""
    free = {"type": "object"}
    return {
        "url": url,
        "model": SERVED_NAME,
        "tools": [{"type": "function", "function": {"name": name, "parameters": free}} for name in TOOLS],
        "forced": {"type": "function", "function": {"name": "pick", "parameters": PICK}},
        "questions": {
            kind: [
                {"name": name, "messages": quiz.messages(), "prompt": quiz.prompt(), "then": str(next_asked(quiz))}
                for name, quiz in each.items()
            ]
            for kind, each in asked.items()
        },
    }


def next_asked(quiz: Quiz) -> object:
    """The tool's result: the next question about the list."""
    return quiz.ask(0).asked[0]


def right(kind: str, quiz: Quiz) -> Json:
    """The right answer to a question, split as the nodes' parsers split it."""
    then = quiz.ask(0).answer
    if kind == "forced":
        return {"text": "", "reasoning": "", "calls": [{"name": "pick", "arguments": {"n": 7}}], "then": then}
    before, mark, after = quiz.answer.partition(THINKING_END)
    reasoning, said = (before, after) if mark else ("", before)
    text, called, call = said.partition(f"{CALL_BEGINS} ")
    number, *lines = call.splitlines() if called else ("0",)
    arguments = dict(line.split() for line in lines[:-1])
    calls = [{"name": TOOLS[int(number) % len(TOOLS)], "arguments": arguments}] if called else []
    return {"text": text, "reasoning": reasoning, "calls": calls, "then": then}


def run(script: str, url: str, asked: Mapping[str, Mapping[str, Quiz]]) -> list[Answer]:
    """Run a script against a server and read its checks. Raises ClientError or BootstrapError."""
    line, folder = command(script)
    local = {"NO_PROXY": HOST, "no_proxy": HOST, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        line,
        input=json.dumps(task(url, asked)),
        cwd=folder,
        env={**os.environ, **local},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise ClientError(f"{script} ended with {done.returncode}:\n{done.stdout[-500:]}\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [Answer(line["check"], line["question"] or "", line["got"]) for line in lines]


def wrong(answers: Sequence[Answer], asked: Mapping[str, Mapping[str, Quiz]]) -> list[str]:
    """Wrong answers, one line each."""
    found = []
    for answer in answers:
        if not answer.question:
            continue
        kind = answer.question.partition(" ")[0]
        expected = right(kind, asked[kind][answer.question])
        found += [
            f"{answer.check}: {part} is {value!r} instead of {expected[part]!r}"
            for part, value in answer.got.items()
            if part in expected and value != expected[part]
        ]
    return found


def differences(alone: Sequence[Answer], through: Sequence[Answer]) -> list[str]:
    """Answers through the proxy that differ from one engine's, one line each."""
    checks = {answer.check: answer.got for answer in alone}
    found = [
        f"{each.check}: {each.got} instead of {checks.get(each.check)}"
        for each in through
        if each.got != checks.get(each.check)
    ]
    return found + [f"{check}: only from the engine" for check in checks.keys() - {each.check for each in through}]
