"""The load generator's own environment, made once: guidellm and what it needs, and torch's CPU build from our lock."""

from collections.abc import Callable, Sequence

from deploy.local.bootstrap import STAMP, TORCH_LOCK, Plan, make_empty, pip, run_first_that_works, torch_commands
from deploy.local.paths import REQUIREMENTS, ROOT, RUNS

PINS = REQUIREMENTS / "guidellm.txt"
GUIDELLM_VENV = RUNS / "guidellm-venv"


def make_guidellm() -> None:
    """Install guidellm where `GUIDELLM_VENV` is not yet what the locks say.

    The lock leaves torch's CUDA libraries and triton out, which are four gigabytes that nothing here uses.

    Raises:
        BootstrapError: it cannot be installed; the message has pip's output.
    """
    plan = Plan(ROOT, GUIDELLM_VENV)
    pins = PINS.read_text(encoding="utf-8") + plan.lock(TORCH_LOCK).read_text(encoding="utf-8")
    stamp = GUIDELLM_VENV / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return
    print(f"making {GUIDELLM_VENV} for the load generator (once; some minutes and 1.5 GB):", flush=True)
    steps: Sequence[tuple[str, Callable[[], None]]] = (
        ("an empty environment", lambda: make_empty(plan)),
        ("torch, CPU build", lambda: run_first_that_works(torch_commands(plan))),
        ("guidellm and what it needs", lambda: run_first_that_works([pip(plan, "--no-deps", "-r", str(PINS))])),
    )
    for number, (what, step) in enumerate(steps, 1):
        print(f"  [{number}/{len(steps)}] {what} …", flush=True)
        step()
    stamp.write_text(pins, encoding="utf-8")
