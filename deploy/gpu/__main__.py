"""The run-book for two GPUs: `python -m deploy.gpu --model NAME --revision COMMIT`; `--cpu`: a dry run without GPUs.

docs/gpu.md says what each step shows, and what to do with a failure.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.gpu.launch import alone, pair, proxy_settings
from deploy.gpu.options import (
    Machine,
    Options,
    RunError,
    list_of_gpus,
    list_of_numbers,
    on_cpu,
    on_gpus,
    remember,
    with_changes,
)
from deploy.gpu.results import Step
from deploy.gpu.run import Run
from deploy.gpu.steps import WHAT, bound
from deploy.local.ports import PortTakenError
from deploy.local.stack import proxy_command
from deploy.local.supervise import Stopped, inherited, stop_signals

SHOWN_KEY = "a key of this run"


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every selected step holds, 1 if one does not, 2 for options that do not go together."""
    parser = make_parser()
    asked = parser.parse_args(arguments)
    try:
        options = options_of(asked)
        steps, again = asked.steps or list(Step), asked.again or []
        if asked.dry_run:
            print("\n".join(plan(options, steps)))
            return 0
        remember(options)
        with stop_signals():
            return 0 if Run(options, said_since(time.monotonic())).go(steps, again) else 1
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PortTakenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print("\nStopped; nothing is left running. The same command goes on where it was.", flush=True)
        return 128 + stopped.number


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.gpu",
        description="Start, verify and measure pdproxy on two GPUs, and collect everything into one archive.",
        epilog="A run that was ended goes on where it was, by the same command: steps that held are not run again.",
    )
    parser.add_argument("--cpu", action="store_true", help="the same steps on CPUs with a tiny model: a dry run")
    parser.add_argument("--dry-run", action="store_true", help="show the steps and the commands, and start nothing")
    parser.add_argument("--model", default="", help="a name on the hub, or a folder")
    parser.add_argument("--revision", default="", help="the commit of a model on the hub")
    parser.add_argument("--steps", type=list_of_steps, help=f"some of {','.join(Step)} (default: all)")
    parser.add_argument("--again", type=list_of_steps, help="steps to run again though they held")
    parser.add_argument("--folder", type=Path, help="where results and logs go (default: .run/gpu-MODEL)")
    parser.add_argument("--prefill-gpu", metavar="GPU", help="the prefill node's (default: 0)")
    parser.add_argument(
        "--decode-gpus",
        type=list_of_gpus,
        metavar="GPU,…",
        help="one for each decode node; nodes may share one (default: 1; 1,1 for two small ones)",
    )
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="(default: 32768)")
    parser.add_argument("--gpu-memory", type=float, metavar="SHARE", help="of each GPU's memory (default: 0.9)")
    parser.add_argument("--streams", type=int, metavar="N", help="under each kill (default: 16)")
    parser.add_argument(
        "--lengths", type=list_of_numbers, metavar="N,…", help="of prompts, in tokens (default: 1000,8000)"
    )
    parser.add_argument("--concurrencies", type=list_of_numbers, metavar="N,…", help="(default: 1,8,32)")
    parser.add_argument("--output-tokens", type=int, metavar="N", help="of each stream that is measured (default: 128)")
    parser.add_argument("--ready-seconds", type=int, metavar="S", help="for a node to load the model (default: 1800)")
    return parser


def options_of(asked: argparse.Namespace) -> Options:
    """What was asked for. Raises RunError for what does not go together."""
    folder = asked.folder.absolute() if asked.folder is not None else None
    if asked.cpu and asked.model:
        raise RunError("--cpu has a model of its own: leave --model out")
    if not asked.cpu and not asked.model:
        raise RunError("name a model (--model NAME --revision COMMIT), or try the dry run: --cpu")
    options = on_cpu(folder) if asked.cpu else on_gpus(folder, asked.model, asked.revision)
    names = (
        "prefill_gpu",
        "decode_gpus",
        "max_model_len",
        "gpu_memory",
        "streams",
        "lengths",
        "concurrencies",
        "output_tokens",
        "ready_seconds",
    )
    options = with_changes(options, {name: getattr(asked, name) for name in names})
    # In the tiny model's tokens; others take up to twice as many for the same names and numbers.
    longest = max(options.lengths) * (2 if options.machine is Machine.GPU else 1) + options.output_tokens
    if longest > options.max_model_len:
        raise RunError(
            f"prompts of {max(options.lengths)} tokens (up to twice as many for another model than the tiny one) and "
            f"{options.output_tokens} more do not fit --max-model-len {options.max_model_len}"
        )
    return options


def plan(options: Options, steps: Sequence[Step]) -> list[str]:
    """What would be done, with every command that would start something. Raises RunError."""
    lines = [f"Results, logs and metrics go to {options.folder}.", ""]
    for step in steps:
        lines.append(f"{step}: {WHAT[step]} (at most {bound(step, options) / 60:.0f} min)")
        if step is Step.ALONE:
            lines.append(f"  {alone(options).shown(SHOWN_KEY)}")
        if step is Step.START:
            launches = pair(options, SHOWN_KEY)
            lines += [f"  {launch.shown(SHOWN_KEY)}" for launch in launches]
            settings = " ".join(f"{name}={value}" for name, value in proxy_settings(inherited(), options).items())
            lines.append(f"  {settings} {' '.join(proxy_command(8080, 8081, [each.spec for each in launches], []))}")
    if options.machine is Machine.GPU:
        lines += ["", "Nothing was started, and no GPU was looked for: the step preflight does that."]
    return lines


def list_of_steps(text: str) -> list[Step]:
    """Names of steps with commas between them, in the order of steps; ValueError for one that there is not."""
    named = {each.strip() for each in text.split(",")}
    unknown = named - set(Step)
    if unknown:
        raise argparse.ArgumentTypeError(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(Step)}")
    return [step for step in Step if step in named]


def said_since(began: float) -> Callable[[str], None]:
    """Print lines with the time since then in front of each."""

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"{minutes:3d}:{seconds:02d}  {line}", flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
