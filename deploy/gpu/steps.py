"""The steps of a run: what each is for, how long it may take, and what to do where it breaks off."""

from collections.abc import Mapping

from deploy.gpu import kills, measure
from deploy.gpu.options import Options
from deploy.gpu.results import Step

WHAT: Mapping[Step, str] = {
    Step.PREFLIGHT: "the machine, the packages and the model",
    Step.ALONE: "one plain engine: its answers, and what it can do",
    Step.START: "a prefill node, the decode nodes and the proxy; pdproxy check",
    Step.ANSWERS: "the same tokens through both nodes as from one engine",
    Step.ATTACKS: "forged, used and expired tickets, noise",
    Step.KILLS: "nodes that are killed and frozen under streams",
    Step.MEASURE: "first token, gaps, throughput, hand-overs",
    Step.COLLECT: "one archive, without secrets",
}
ADVICE: Mapping[Step, str] = {
    Step.PREFLIGHT: "run this on the machine with the GPUs, in the environment (or container) that has vLLM",
    Step.ALONE: "the node's log is in logs/. Out of memory: a smaller --max-model-len, or --gpu-memory. Slow to load: "
    "--ready-seconds. No mamba layers: RESUME_ARGS= in the environment",
    Step.START: "the nodes' logs are in logs/. If `alone` held, the hand-over is what differs: NIXL, UCX, two nodes on "
    "one GPU (--decode-gpus). Then run it again: what held is not repeated",
    Step.ANSWERS: "see which node's log in logs/ ends with an error; the same command runs this step again",
    Step.ATTACKS: "see which node's log in logs/ ends with an error, for no attack may end one; "
    "open an issue, with the archive",
    Step.KILLS: "see logs/: a node that does not come back is started by hand with the command that --dry-run shows",
    Step.MEASURE: "if requests took too long, fewer --concurrencies or shorter --lengths, in another --folder",
    Step.COLLECT: "make room on the disk, and run --steps collect",
}
"""What to do where a step breaks off, besides what the error says."""
OF_THE_PAIR = (Step.START, Step.ANSWERS, Step.ATTACKS, Step.KILLS, Step.MEASURE)
LEARNED = (Step.ANSWERS, Step.ATTACKS, Step.KILLS)
"""Steps that compare with what `alone` learned."""


def bound(step: Step, options: Options) -> float:
    """Seconds that a step may take, with room for a slow disk and for kernels that are compiled."""
    ready = options.ready_seconds
    cells = len(list(measure.cells(options))) * 600
    return {
        Step.PREFLIGHT: 600,
        Step.ALONE: ready + 1800 + cells,
        Step.START: (1 + len(options.decode_gpus)) * ready + 600,
        Step.ANSWERS: 1800,
        Step.ATTACKS: 1800 + options.lease_seconds,
        Step.KILLS: len(kills.cases(options)) * (ready + 1200),
        Step.MEASURE: 600 + cells,
        Step.COLLECT: 600,
    }[step]
