"""Run vLLM's own entrypoint tests against a single engine, and through the proxy in front of a pair.

python -m tests.upstream.entrypoints             against `entrypoints.toml`; 1 for a test that passes alone and fails
                                                 through the proxy without a reason
python -m tests.upstream.entrypoints -k WORDS    some of them, with tracebacks

The tests are those that start a server of their own; they get one that runs already, which serves the tiny model under
every name that they use. What depends on a real model fails in both places, and is not compared.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from connector.vllm_version import release_of, running_version
from deploy.local.node import NodeSpec, Role
from deploy.local.paths import MODEL
from deploy.local.stack import ProxySpec, logs_of, pair_specs, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from tests.upstream.ledger import judge, read
from tests.upstream.sdist import NotFetchedError, tests_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".run" / "upstream"
FOLDERS = ("tests/entrypoints/openai", "tests/entrypoints/anthropic", "tests/entrypoints/serve/tokenize")
LONGEST_S = 1800.0
SERVED = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "qwen3",
    "--enable-tokenizer-info-endpoint",
)
"""What the tests' own servers are told most often."""
_NAME = re.compile(r'(?:MODEL\w*\s*=\s*|--served-model-name",\s*|model=)"([^"\s]+)"')


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
    files = list(_files(folder))
    names = sorted({name for file in files for name in _NAME.findall(file.read_text(encoding="utf-8"))})
    _provide(folder, names)
    more = ("--served-model-name", *names, *SERVED)
    specs = [*pair_specs(), NodeSpec("reference", Role.PLAIN, 0, 0)]
    specs = [_with(spec, more) for spec in specs]
    with Supervisor(logs_of("entrypoints")) as supervisor:
        prefill, decode, reference = start_nodes(supervisor, specs, print)
        proxy = start_proxy(supervisor, ProxySpec(), [prefill, decode], print)
        alone = _run(folder, files, reference.url, given.words)
        proxied = _run(folder, files, proxy.url, given.words)
    return _report(version, alone, proxied)


def _with(spec: NodeSpec, more: tuple[str, ...]) -> NodeSpec:
    return replace(spec, more_arguments=(*spec.more_arguments, *more))


def _files(folder: Path) -> Iterator[Path]:
    for each in FOLDERS:
        for file in sorted((folder / each).rglob("test_*.py")):
            if "RemoteOpenAIServer" in file.read_text(encoding="utf-8"):
                yield file


def _provide(folder: Path, names: Sequence[str]) -> None:
    """A folder of a model's name below the working directory is that model to vLLM and to transformers."""
    for name in names:
        path = folder / name
        if "/" in name and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(MODEL, target_is_directory=True)


def _run(folder: Path, files: Sequence[Path], url: str, words: str | None) -> dict[str, str]:
    """Test → outcome; empty when pytest did not come to its end."""
    outcomes = folder / "outcomes.json"
    outcomes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}", "--import-mode=importlib"]
    command += ["-p", "served_plugin", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-o", "asyncio_mode=auto"]
    command += [
        "--continue-on-collection-errors",
        "-W",
        "ignore",
        "--timeout=60",
        "-q",
        "--no-header",
        "--tb=short" if words else "--tb=no",
    ]
    command += [str(file.relative_to(folder)) for file in files] + (["-k", words] if words else [])
    with tempfile.TemporaryDirectory() as temporary:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (folder, HERE))),
            "HF_HUB_OFFLINE": "1",
            "UPSTREAM_URL": url,
            "UPSTREAM_MODEL": str(MODEL),
            "UPSTREAM_OUTCOMES": str(outcomes),
            "TMPDIR": temporary,
        }
        subprocess.run(command, cwd=folder, env=environment, check=False, timeout=LONGEST_S)
    found: dict[str, str] = json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.is_file() else {}
    return found


def _report(version: str, alone: dict[str, str], proxied: dict[str, str]) -> int:
    compared = {test: proxied.get(test, "failed") for test, outcome in alone.items() if outcome == "passed"}
    if not compared:
        print("No test passed on a single engine: see above.")
        return 2
    known = read((HERE / "entrypoints.toml").read_text(encoding="utf-8")).differences
    verdict = judge(compared, {test: known[test] for test in known if test in compared})
    for title, tests in (
        ("NEW: passes alone, fails through the proxy, and has no reason", verdict.new),
        ("mended: passes, though there is a reason why it fails; take it out", verdict.mended),
    ):
        for test in tests:
            print(f"{title}: {test}")
    print(
        f"vLLM {version}: {len(compared)} of {len(alone)} tests pass on a single engine; through the proxy "
        f"{verdict.passed} of these pass, {verdict.expected} fail with a reason, {len(verdict.new)} without one"
    )
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
