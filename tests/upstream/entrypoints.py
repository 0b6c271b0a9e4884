"""Run vLLM's own entrypoint tests against a single engine, and through the proxy in front of a pair.

python -m tests.upstream.entrypoints             against `entrypoints.toml`; 1 for a test that passes alone and fails
                                                 through the proxy without a reason, or has a reason and passes
python -m tests.upstream.entrypoints -k WORDS    some of them

The tests are those that start a server of their own; they get one that runs already, which serves one small model under
every name that they use (`wordy_model.py`). What depends on a real model fails in both places, and is not compared.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from connector.vllm_version import release_of, running_version
from deploy.local.node import NodeSpec, Role
from deploy.local.stack import ProxySpec, logs_of, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from tests.upstream import wordy_model
from tests.upstream.ledger import Ledger, judge, read
from tests.upstream.sdist import NotFetchedError, tests_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".run" / "upstream"
LEDGER = HERE / "entrypoints.toml"
CREDENTIAL = CACHE / "credential"
TESTS = "tests/entrypoints"
FOLDERS = ("openai", "anthropic", "generate", "serve/tokenize", "serve/instrumentator")
STARTS = "RemoteOpenAIServer("
LONGEST_S = 1800.0
_NAME = re.compile(r'(?:MODEL\w*\s*=\s*|--served-model-name",\s*|model=|model_name", \[)"([^"\s]+)"|"(\w+-lora)"')


@dataclass(frozen=True, slots=True)
class Server:
    """How a server is started, and whose tests it is for: the files that say one of the words.

    Attributes:
        arguments: what those files' own servers are told.
        script: of its model, see `wordy_model`.
        proxy: what a proxy before such nodes is told.
    """

    name: str
    words: tuple[str, ...]
    arguments: tuple[str, ...]
    script: tuple[str, ...] = wordy_model.NO_SCRIPT
    proxy: tuple[str, ...] = ()

    def is_for(self, file: Path) -> bool:
        """Whether the file's tests ask this server."""
        return any(word in _text(file) for word in self.words)


TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SERVERS = (
    Server("reasoning", ("--reasoning-parser",), (*TOOLS, "--reasoning-parser", "qwen3"), wordy_model.THINKING),
    Server(
        "keyed",
        ("--root-path",),
        ("--root-path", "/llm", "--api-key", "abc-123"),
        wordy_model.TALKING,
        ("--listen-root-path", "/llm", "--upstream-credential-file", str(CREDENTIAL)),
    ),
    Server(
        "odd",
        ("--return-tokens-as-token-ids", "--enable-force-include-usage", "--max-logprobs", "anthropic"),
        (*TOOLS, "--return-tokens-as-token-ids", "--enable-force-include-usage", "--max-logprobs", "-1"),
        wordy_model.TALKING,
    ),
    Server("plain", ("",), (*TOOLS, "--enable-tokenizer-info-endpoint", "--enable-server-load-tracking")),
)
"""The first one whose words a file says."""
ENVIRONMENT = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a test; `why`: the error, cut."""

    result: str
    why: str


class NothingPassedError(Exception):
    """There is nothing to compare; the text says for what."""


LOST = Outcome("failed", "pytest did not come to its end")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Test → outcome; `proxied` has those that passed alone."""

    alone: Mapping[str, Outcome]
    proxied: Mapping[str, Outcome]


def main(arguments: Sequence[str]) -> int:
    """Fetch, start, run twice, compare; 1 when something differs without a reason, 2 when nothing could run."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.entrypoints")
    parser.add_argument("-k", dest="words", help="only tests whose name fits, as pytest's -k")
    given = parser.parse_args(arguments)
    version = release_of(running_version())
    try:
        folder = tests_of(version, CACHE)
    except NotFetchedError as error:
        print(f"The source distribution of vLLM {version} could not be fetched. pip said:\n{error}")
        return 2
    ledger = read(LEDGER.read_text(encoding="utf-8"))
    try:
        found = _compare(folder, ledger, given.words)
    except NothingPassedError as error:
        print(f"No test for {error} passed on a single engine: see above.")
        return 2
    return report(version, found, ledger, whole=not given.words)


def _compare(folder: Path, ledger: Ledger, words: str | None) -> Comparison:
    """All servers, one after another. Raises NothingPassedError."""
    files = list(_files(folder / TESTS))
    names = sorted({name or adapter for file in files for name, adapter in _NAME.findall(_text(file))})
    options = [f"--deselect={TESTS}/{test}" for test in ledger.left_out] + (["-k", words] if words else [])
    alone: dict[str, Outcome] = {}
    proxied: dict[str, Outcome] = {}
    for server in SERVERS:
        mine = [file for file in files if server is next(each for each in SERVERS if each.is_for(file))]
        model = CACHE / f"model-{server.name}"
        wordy_model.make(model, server.script, "".join(map(_text, files)))
        _provide(folder, model, names)
        print(f"{server.name}: {len(mine)} files of tests")
        found = _compare_at(server, folder, model, names, [*(str(file.relative_to(folder)) for file in mine), *options])
        if not found.proxied and not words:
            raise NothingPassedError(f"the server {server.name!r}")
        alone |= found.alone
        proxied |= found.proxied
    if not proxied:
        raise NothingPassedError(f"{words!r}")
    return Comparison(alone, proxied)


def _compare_at(server: Server, folder: Path, model: Path, names: Sequence[str], chosen: Sequence[str]) -> Comparison:
    """Run tests at a single engine, and those of them that pass through the proxy."""
    CREDENTIAL.write_text("abc-123", encoding="utf-8")
    with Supervisor(logs_of(f"entrypoints-{server.name}")) as supervisor:
        prefill, decode, reference = start_nodes(supervisor, _specs(server, model, names), print)
        proxy = start_proxy(supervisor, ProxySpec(more_arguments=server.proxy), [prefill, decode], print)
        alone = _run(folder, chosen, reference.url, model)
        passed = [test for test, outcome in alone.items() if outcome.result == "passed"]
        proxied = _run(folder, [f"{TESTS}/{test}" for test in passed], proxy.url, model) if passed else {}
        return Comparison(alone, {test: proxied.get(test, LOST) for test in passed})


def _specs(server: Server, model: Path, names: Sequence[str]) -> list[NodeSpec]:
    more = ("--served-model-name", *names, *server.arguments)
    return [
        NodeSpec(
            name,
            role,
            0,
            0,
            model=model,
            max_model_len=wordy_model.LENGTH,
            block_size=None,
            prefix_match_unit=None,
            more_arguments=more,
            more_environment=ENVIRONMENT,
        )
        for name, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE), ("reference", Role.PLAIN))
    ]


def _files(tests: Path) -> Iterator[Path]:
    for each in FOLDERS:
        for file in sorted((tests / each).rglob("test_*.py")):
            if STARTS in _text(file):
                yield file


def _text(file: Path) -> str:
    """A test file's, with that of its folder's fixtures where it uses a server of theirs."""
    text, fixtures = file.read_text(encoding="utf-8"), file.with_name("conftest.py")
    if STARTS in text or not fixtures.is_file() or not re.search(r"def test_\w+\(\s*client\b", text):
        return text
    return text + fixtures.read_text(encoding="utf-8")


def _provide(folder: Path, model: Path, names: Sequence[str]) -> None:
    """A folder of a model's name below the working directory is that model to vLLM and to transformers."""
    for name in names:
        path = folder / name
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(model, target_is_directory=True)


def _run(folder: Path, chosen: Sequence[str], url: str, model: Path) -> dict[str, Outcome]:
    """Test → outcome, for tests and options of pytest; empty when pytest did not come to its end."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}", "--import-mode=importlib"]
    command += ["-p", "served_plugin", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-o", "asyncio_mode=auto"]
    command += ["--continue-on-collection-errors", "-W", "ignore", "--timeout=60", "-q", "--no-header", "--tb=no"]
    command += ["--no-summary"]
    with tempfile.TemporaryDirectory() as temporary:
        outcomes, arguments = Path(temporary, "outcomes.json"), Path(temporary, "arguments")
        arguments.write_text("\n".join(chosen), encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (folder, HERE))),
            "HF_HUB_OFFLINE": "1",
            "UPSTREAM_URL": url,
            "UPSTREAM_MODEL": str(model),
            "UPSTREAM_OUTCOMES": str(outcomes),
            "TMPDIR": temporary,
        }
        subprocess.run([*command, f"@{arguments}"], cwd=folder, env=environment, check=False, timeout=LONGEST_S)
        raw = json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.is_file() else {}
    return {test.removeprefix(f"{TESTS}/"): Outcome(*outcome) for test, outcome in raw.items()}


def report(version: str, found: Comparison, ledger: Ledger, *, whole: bool) -> int:
    """Print what differs; 1 when something does without a reason, or a reason explains nothing.

    `whole`: all tests have run, so that each reason must explain something.
    """
    proxied = {test: "passed" if outcome.result == "passed" else "failed" for test, outcome in found.proxied.items()}
    known = {test: why for test, why in ledger.differences.items() if whole or test in proxied}
    verdict = judge(proxied, known)
    for test in verdict.new:
        print(f"NEW: passes alone, fails through the proxy, and has no reason: {test}\n    {found.proxied[test].why}")
    for test in verdict.mended:
        print(f"STALE: passes through the proxy, though the ledger has a reason why it fails; take it out: {test}")
    for test in verdict.gone:
        why = found.alone[test].why if test in found.alone else "there is no such test"
        print(f"STALE: in the ledger, but does not pass on a single engine: {test}\n    {why}")
    print(
        f"vLLM {version}: {len(proxied)} of {len(found.alone)} tests pass on a single engine; through the proxy "
        f"{verdict.passed} of these pass, {verdict.expected} fail with a reason, {len(verdict.new)} without one"
    )
    return 0 if verdict.exact else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
