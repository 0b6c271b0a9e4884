"""Known answers: by way of both nodes each is the one engine's, and the counters show that caches were handed over."""

from collections import Counter
from collections.abc import Mapping, Sequence

from deploy.gpu.asking import Known, Verdict, complete, learn, long_prompt, streamed
from deploy.gpu.fleet import Fleet
from deploy.gpu.metrics import holds, read
from deploy.gpu.options import Options, RunError
from deploy.gpu.results import Check

LINES = 8
COUNT = 8
MOST_TOKENS = 96
TOLD_WITHIN_S = 60.0
READS = "pdproxy_connector_reads_total"
BLOCKS = "pdproxy_connector_blocks_total"
STATES = "pdproxy_connector_capacity_sequences"
WHY = "the decode node's log (logs/) says why; docs/metrics.md, 'Reads', explains each outcome"

Counts = Mapping[str, float]


def learn_answers(url: str, options: Options) -> list[Known]:
    """Of one engine: some questions of each length, those of whose answers it is most certain.

    Raises httpx.HTTPError, and RunError for a model that has nothing to say.
    """
    known = list[Known]()
    for length in options.lengths:
        prompts = [long_prompt(length + at, length, LINES) for at in range(2 * COUNT)]
        known += learn(url, options.served_name, prompts, COUNT, MOST_TOKENS)
    if not any(each.text.strip() for each in known):
        raise RunError("the model answers every question with nothing: take another one, or its instruct variant")
    return known


def check_answers(fleet: Fleet, known: Sequence[Known]) -> list[Check]:
    """Ask each question once, whole and streamed in turn, through the proxy. Raises httpx.HTTPError and ValueError."""
    before = counted(fleet)
    answers = [(each, _ask(fleet, each, streams=at % 2 == 1)) for at, each in enumerate(known)]
    reads = before["reads"] + len(known)
    holds(lambda: counted(fleet)["reads"] >= reads, TOLD_WITHIN_S)
    after = counted(fleet)
    states = read(fleet.decode.url).has(STATES, limit="state")
    return [
        compared("same tokens through both nodes as from one", answers),
        *moved({name: after[name] - before[name] for name in after}, len(known), states=states),
    ]


def counted(fleet: Fleet) -> dict[str, float]:
    """What decode nodes and proxy count of hand-overs. Raises httpx.HTTPError."""
    names = fleet.options.decode_names
    proxy = read(fleet.front.admin_url)
    return {
        "reads": fleet.total(names, READS),
        "verified": fleet.total(names, READS, outcome="verified"),
        "attention": fleet.total(names, BLOCKS, group="attention", kind="pulled"),
        "state": fleet.total(names, BLOCKS, group="state", kind="pulled"),
        "local": proxy.total("pdproxy_local_total"),
        "recomputed": proxy.total("pdproxy_recomputed_total"),
    }


def compared(name: str, answers: Sequence[tuple[Known, str]]) -> Check:
    """Whether no answer is wrong, and enough of them tell something."""
    counts = Counter(known.compare(text) for known, text in answers)
    detail = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    wrong = [(known, text) for known, text in answers if known.compare(text) is Verdict.WRONG]
    if wrong:
        known, text = wrong[0]
        detail += f"; one engine says {known.text[:80]!r}, here came {text[:80]!r}"
        return Check(name, False, detail, "do not serve with these nodes; open an issue, with the archive")
    advice = "too few answers tell anything, for the model is not certain of them: take another one"
    return Check(name, 2 * counts[Verdict.SAME] >= len(answers), detail, advice)


def moved(grown: Counts, asked: int, *, states: bool) -> list[Check]:
    """Whether everything that was asked was handed over: attention blocks, and mamba states where there are any."""
    alone = grown["local"] + grown["recomputed"]
    read_well = (
        f"{grown['verified']:g} of {asked} reads verified, {grown['reads'] - grown['verified']:g} came to nothing"
    )
    checks = [
        Check(
            "every prompt was handed over",
            grown["verified"] >= asked and grown["reads"] == grown["verified"],
            read_well,
            WHY,
        ),
        Check("no prompt was computed twice", alone == 0, f"{alone:g} of {asked} computed on the decode node", WHY),
        Check("attention blocks moved", grown["attention"] > 0, f"{grown['attention']:g} blocks pulled", WHY),
    ]
    if not states:
        return [*checks, Check("mamba states moved", True, "this model has none: attention layers alone")]
    return [*checks, Check("mamba states moved", grown["state"] > 0, f"{grown['state']:g} blocks pulled", WHY)]


def _ask(fleet: Fleet, known: Known, *, streams: bool) -> str:
    url, model = fleet.front.url, fleet.options.served_name
    if streams:
        return streamed(url, model, known.prompt, MOST_TOKENS)
    return complete(url, model, known.prompt, MOST_TOKENS).text
