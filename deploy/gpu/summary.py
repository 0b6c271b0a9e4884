"""A run in Markdown: what holds, what does not and what to do, and the figures side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.gpu.options import Machine, Options
from deploy.gpu.results import Step, StepResult

Rows = Sequence[Sequence[object]]
Results = Mapping[Step, StepResult]

DRY_RUN = (
    "**A dry run on CPUs with a tiny model: that the steps work is all it shows. The figures say nothing about GPUs, "
    "and little about this machine.**"
)
LIMITS = (
    "Closed load from one Python process on the nodes' own machine; few requests a cell, so that p99 is nearly the "
    "slowest. `alone` is one engine on one GPU, `P/D` has a GPU for the prefill node and one or more for decode nodes: "
    "compare throughput for each GPU. Gaps are between pieces of a stream."
)
FIGURES = (
    ("first_p50", "first token p50 ms"),
    ("first_p90", "p90"),
    ("first_p99", "p99"),
    ("gap_p50", "gap p50 ms"),
    ("gap_p99", "p99"),
    ("output_rate", "tokens/s"),
    ("request_rate", "requests/s"),
)
HAND_OVERS = (
    ("prompts", "prompt tokens"),
    ("concurrency", "at once"),
    ("verified", "reads"),
    ("other_ends", "came to nothing"),
    ("attention_megabytes", "MB attention"),
    ("state_megabytes", "MB states"),
    ("rate", "GB/s"),
)


def write(options: Options, versions: Mapping[str, str], results: Results) -> str:
    """The page."""
    parts = [f"# pdproxy on {options.machine}: {options.served_name}"]
    if options.machine is Machine.CPU:
        parts.append(DRY_RUN)
    parts.append(table(("what", "is"), [*facts(options), *versions.items()]))
    bad = [result for result in results.values() if not result.good]
    parts.append(f"**{'Every check holds.' if not bad else f'{len(bad)} of {len(results)} steps failed.'}**")
    if missing := [step for step in Step if step not in results and step is not Step.COLLECT]:
        parts.append(f"Not run: {', '.join(missing)}.")
    parts += [*(section(result) for result in results.values()), *measured(results)]
    return "\n\n".join(parts) + "\n"


def facts(options: Options) -> Iterator[tuple[str, str]]:
    """What the run was told."""
    yield "model", f"{options.model} {options.revision}".strip()
    if options.machine is Machine.GPU:
        yield "GPUs", f"prefill {options.prefill_gpu}, decode {', '.join(options.decode_gpus)}"
    yield "decode nodes", str(len(options.decode_gpus))
    yield "longest prompt and answer", f"{options.max_model_len:,} tokens"


def section(result: StepResult) -> str:
    """A step's checks; where it did not hold, what to do."""
    lines = [f"## {result.step}: {'holds' if result.good else 'FAILED'} ({result.seconds:.0f} s, {result.at})"]
    if result.broken:
        lines.append(f"Not finished: {result.broken}")
    rows = [
        (each.name, "yes" if each.holds else "**no**", each.detail, "" if each.holds else each.advice)
        for each in result.checks
    ]
    return "\n\n".join([*lines, *([table(("check", "holds", "seen", "what to do"), rows)] if rows else [])])


def measured(results: Results) -> Iterator[str]:
    """The figures of both systems side by side, and the hand-overs."""
    figures = [row for step in (Step.ALONE, Step.MEASURE) if step in results for row in _of(results[step], "figures")]
    if not figures:
        return
    yield f"## Figures\n\n{LIMITS}"
    columns = ("prompt tokens", "at once", "system", "requests", "failed", *(title for _, title in FIGURES))
    loads = [row["prompts"] for row in figures]
    order = sorted(figures, key=lambda row: (loads.index(row["prompts"]), row["concurrency"]))
    yield table(
        columns,
        [
            (
                f"{row['prompts']} ({row['prompt_tokens']:,.0f})",
                row["concurrency"],
                row["system"],
                row["requests"],
                row["failed"],
                *(row[name] for name, _ in FIGURES),
            )
            for row in order
        ],
    )
    yield from ratios(figures)
    handed = _of(results[Step.MEASURE], "hand_overs") if Step.MEASURE in results else []
    if handed:
        yield "## Hand-overs"
        names = list(handed[0]["milliseconds"])
        yield table(
            (*(title for _, title in HAND_OVERS), *(f"{name} ms" for name in names)),
            [
                (*(row[name] for name, _ in HAND_OVERS), *(row["milliseconds"][name] for name in names))
                for row in handed
            ],
        )


def ratios(figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of each load that both systems had: P/D over one engine."""
    alone = {(row["prompts"], row["concurrency"]): row for row in figures if row["system"] == "alone"}
    pairs = [
        (row, alone[key])
        for row in figures
        if row["system"] != "alone"
        if (key := (row["prompts"], row["concurrency"])) in alone
    ]
    if pairs:
        yield "P/D as a multiple of one engine:"
        rows = [
            (ours["prompts"], ours["concurrency"], *(_ratio(ours[name], one[name]) for name, _ in FIGURES))
            for ours, one in pairs
        ]
        yield table(("prompt tokens", "at once", *(title.removesuffix(" ms") for _, title in FIGURES)), rows)


def table(titles: Sequence[str], rows: Rows) -> str:
    """A Markdown table; what would break it is replaced."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _ratio(ours: float, one: float) -> str:
    return f"{ours / one:.2f}" if one else "-"


def _of(result: StepResult, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result.figures.get(name, [])
    return found
