"""Run vLLM's own tests of its NIXL connector with our classes: `make test-upstream`. Five minutes.

python -m tests.upstream             against `ledger.toml`; 1 when a test fails that is not in it
python -m tests.upstream --stock     vLLM's own classes: what fails then is not ours to explain
python -m tests.upstream -k WORDS    some of them, with tracebacks
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from connector.vllm_version import release_of, running_version
from tests.upstream.ledger import Ledger, Verdict, judge, read
from tests.upstream.sdist import NotFetchedError, tests_of
from tests.upstream.stand_ins import provide

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".run" / "upstream"
UNIT = "tests/v1/kv_connector/unit"
LONGEST = 3600.0
FILES = (
    "test_bidirectional_kv_transfer",
    "test_cache_pollution_prevention",
    "test_config",
    "test_error_propagation",
    "test_handshake_pp_aggregation",
    "test_hma_auto_config",
    "test_invalid_blocks_correctness",
    "test_kv_connector_lifecycle",
    "test_kv_load_failure_recovery",
    "test_multi_connector",
    "test_nixl_connector",
    "test_nixl_connector_hma",
    "test_nixl_desc_geometry",
    "test_nixl_heartbeat",
    "test_nixl_push_connector",
    "test_nixl_simple_cpu_offload",
    "test_output_aggregator",
    "test_remote_decode_lifecycle",
    "test_remote_prefill_lifecycle",
    "test_scheduler_kv_connector_override",
    "test_tp_mapping",
    "test_transfer_topology_sharded",
)
"""Tests of the version in front of us; the folder's other files are about other connectors."""


def main(arguments: Sequence[str]) -> int:
    """Fetch, run, compare with the ledger; 1 when something differs without a reason, 2 when nothing could run."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream")
    parser.add_argument("--stock", action="store_true", help="vLLM's own classes")
    parser.add_argument("-k", dest="words", help="only tests whose name fits, as pytest's -k")
    given = parser.parse_args(arguments)
    version = release_of(running_version())
    try:
        folder = tests_of(version, CACHE)
    except NotFetchedError as error:
        print(f"The source distribution of vLLM {version} could not be fetched. pip said:\n{error}")
        return 2
    provide(folder)
    ledger = read((HERE / "ledger.toml").read_text(encoding="utf-8"))
    began = time.monotonic()
    outcomes = _run(folder, "stock" if given.stock else "ours", ledger, given.words)
    if not outcomes:
        print("No test ran: see above.")
        return 2
    known = {} if given.stock else ledger.differences
    verdict = judge(outcomes, {test: known[test] for test in known if not given.words or test in outcomes})
    _report(version, verdict, ledger, time.monotonic() - began)
    return 0 if verdict.good else 1


def _run(folder: Path, classes: str, ledger: Ledger, words: str | None) -> dict[str, str]:
    """Test → outcome; empty when pytest did not come to its end."""
    outcomes = folder / "outcomes.json"
    outcomes.unlink(missing_ok=True)
    files = [f"{UNIT}/{name}.py" for name in FILES if (folder / UNIT / f"{name}.py").is_file()]
    # vLLM's settings for pytest, and ours, are both left out: so are the plugins that belong to them.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}", f"--confcutdir={UNIT}"]
    command += ["-p", "swap_plugin", "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "ignore", "--timeout=300"]
    command += ["-q", "--no-header", "--tb=native", *files]
    command += [f"--deselect={UNIT}/{test}" for test in ledger.left_out] if not words else ["-k", words]
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, **_environment(folder, classes, outcomes), "TMPDIR": temporary}
        subprocess.run(command, cwd=folder, env=environment, check=False, timeout=LONGEST)
    found: dict[str, str] = json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.is_file() else {}
    return found


def _environment(folder: Path, classes: str, outcomes: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, HERE))),
        "HF_HUB_OFFLINE": "1",
        "UPSTREAM_CLASSES": classes,
        "UPSTREAM_OUTCOMES": str(outcomes),
    }


def _report(version: str, verdict: Verdict, ledger: Ledger, seconds: float) -> None:
    for title, tests in (
        ("NEW: fails, and the ledger has no reason for it", verdict.new),
        ("mended: passes, though the ledger has a reason why it fails; take it out", verdict.mended),
        ("gone: in the ledger, and no longer among the tests; take it out", verdict.gone),
    ):
        for test in tests:
            print(f"{title}: {test}")
    print(
        f"vLLM {version}: {verdict.passed} passed, {verdict.expected} failed with a reason, {len(verdict.new)} without "
        f"one, {verdict.skipped} skipped, {len(ledger.left_out)} left out, in {seconds / 60:.0f} min"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
