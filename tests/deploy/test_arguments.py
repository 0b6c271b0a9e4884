"""vLLM's own parser takes the command lines of nodes that compose.yaml, the chart, docs and the run-book have, and our
arithmetic says that each starts on the GPU that it is for."""

import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.gpu import nodes_of, options_of, started
from deploy.local.paths import MODEL, ROOT
from deploy.memory import Flags, fit, flags_of, gpu_gib, known, load, sentence, with_room
from tests.deploy.compose import resolved
from tests.helm.engine import Engine, Manifest, Manifests, engine, only_container, read_values, value_files

Parse = Callable[[list[str]], Namespace]
NODES = [("prefill", "prefill"), ("decode", "decode"), ("node", "node"), ("cpu", "cpu-prefill"), ("cpu", "cpu-decode")]
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "node": "kv_consumer"}


@pytest.fixture(scope="module")
def parse() -> Parse:
    """The arguments as `vllm serve` reads them; it ends the process, SystemExit, over any that it does not know."""
    launchers = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    parser = launchers.make_arg_parser(pytest.importorskip("vllm.utils.argparse_utils").FlexibleArgumentParser())
    return lambda words: Namespace(**vars(parser.parse_args(words)))


def assert_reuses(options: Namespace) -> None:
    """The mamba cache's mode is left to vLLM, which makes it `align` where there are mamba layers; with that mode and
    no such layers a node dies of its first request."""
    assert (options.enable_prefix_caching, options.enable_prompt_tokens_details) == (True, True)
    assert options.mamba_cache_mode == "none"


def assert_publishes(options: Namespace) -> None:
    """The node publishes its cache, by hashes that can be computed elsewhere."""
    events = options.kv_events_config
    assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
    assert events.endpoint.startswith("tcp://*:")
    assert events.replay_endpoint.startswith("tcp://*:")
    assert options.prefix_caching_hash_algo == "sha256_cbor"


GPU = 80
"""GB of the GPU that examples are for, where they do not say."""


def assert_starts(words: list[str], options: Namespace, gpu: int = GPU) -> str:
    """The node starts, with room, and its parsers are those of its model; what its example's comment must say."""
    flags = flags_of(words)
    assert flags == Flags(
        tp=options.tensor_parallel_size,
        dp=options.data_parallel_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens or Flags.max_num_batched_tokens,
        gpu_memory=options.gpu_memory_utilization,
        block_size=options.block_size or 0,
        text_only=bool(options.language_model_only),
    ), "vLLM's parser reads the same"
    name = options.model_tag
    assert with_room(load(name), gpu_gib(gpu), flags).refusals() == []
    listed = known()[name]
    assert (options.tool_call_parser, options.enable_auto_tool_choice) == (listed["tool_parser"], True)
    assert options.reasoning_parser == listed["reasoning_parser"]
    return f"On {gpu} GB: {sentence(fit(load(name), gpu_gib(gpu), flags))}."


def comment_of(text: str) -> str:
    """The line of an example that says what fits."""
    [line] = re.findall(r"^ *# (On \d+ GB: .*)$", text, re.MULTILINE)
    return str(line)


def test_vllm_has_the_parsers_that_are_named() -> None:
    tools = pytest.importorskip("vllm.tool_parsers").ToolParserManager
    reasoning = pytest.importorskip("vllm.reasoning").ReasoningParserManager
    for listed in known().values():
        assert tools.get_tool_parser(listed["tool_parser"])
        assert not listed["reasoning_parser"] or reasoning.get_reasoning_parser(listed["reasoning_parser"])


@pytest.mark.parametrize("role", ROLES)
def test_a_compose_node_starts_on_the_gpu_that_its_comment_names(parse: Parse, role: str) -> None:
    words = resolved(role)[role]["command"]
    assert comment_of((ROOT / "compose.yaml").read_text()) == assert_starts(words, parse(words))


def test_a_gpu_that_is_too_small_for_the_default_is_refused_by_the_flags_name(parse: Parse) -> None:
    words = resolved("prefill")["prefill"]["command"]
    with pytest.raises(AssertionError, match="--tensor-parallel-size 1: of 38"):
        assert_starts(words, parse(words), gpu=48)


@pytest.mark.parametrize(("profile", "name"), NODES)
def test_the_command_of_a_compose_node_is_parsed(parse: Parse, profile: str, name: str) -> None:
    service = resolved(profile)[name]
    options = parse(service["command"])
    assert str(options.port) == service["environment"].get("NODE_PORT", "8000")
    assert options.kv_transfer_config.kv_role == ROLES[name.removeprefix("cpu-")]
    assert options.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert_reuses(options)
    assert_publishes(options)
    grace = re.fullmatch(r"(\d+)(s|m)", service["stop_grace_period"])
    assert grace is not None
    assert 0 < options.shutdown_timeout < int(grace[1]) * (60 if grace[2] == "m" else 1)


@pytest.fixture(scope="module")
def helm() -> Iterator[Engine]:
    """Helm's engine."""
    with engine() as running:
        yield running


def node_pods(manifests: Manifests) -> Iterator[tuple[str, Manifest]]:
    """Every pod of a node with its role, the workers of groups among them."""
    for role in manifests.kinds():
        yield role, manifests.node(role)
    for group in manifests.of("LeaderWorkerSet"):
        yield group["metadata"]["name"].rpartition("-")[2], group["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def as_started(container: Manifest) -> list[str]:
    """A container's arguments as Kubernetes hands them over; whatever a variable holds, here it is 1."""
    return [re.sub(r"\$\(\w+\)", "1", word) for word in container["args"]]


@pytest.mark.parametrize("values", value_files())
def test_the_command_of_a_chart_node_is_parsed(parse: Parse, helm: Engine, values: str) -> None:
    for role, pod in node_pods(helm.manifests(read_values(value_files()[values]))):
        container = only_container(pod)
        options = parse(as_started(container))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert options.port == ports.get("http", options.port)
        assert options.kv_transfer_config.kv_role == ROLES[role]
        assert options.shutdown_timeout < pod["spec"]["terminationGracePeriodSeconds"]
        assert options.headless is ("http" not in ports)
        assert_reuses(options)
        assert_publishes(options)


EXAMPLES = sorted(
    name
    for name, path in value_files().items()
    if path and path.parent.name == "examples" and name != "no-gpu" and "model" in read_values(path)
)
"""Examples with a model and GPUs; the others are added to one of these."""


@pytest.mark.parametrize("values", EXAMPLES)
def test_a_chart_example_starts_on_the_gpu_that_its_comment_names(parse: Parse, helm: Engine, values: str) -> None:
    path = value_files()[values]
    assert path
    said = comment_of(path.read_text(encoding="utf-8"))
    found = set()
    for _, pod in node_pods(helm.manifests(read_values(value_files()[values]))):
        words = as_started(only_container(pod))
        found.add(assert_starts(words, parse(words)))
    assert said in found


def test_the_charts_own_values_start(parse: Parse, helm: Engine) -> None:
    for _, pod in node_pods(helm.manifests({})):
        words = as_started(only_container(pod))
        assert_starts(words, parse(words))


def as_on_host(container: Manifest, rank: int) -> list[str]:
    """The arguments on one host of an engine, for a model that is there and whose layers can be cut so often."""
    filled = [
        word.replace("$(NODE_RANK)", str(rank)).replace("$(LWS_LEADER_ADDRESS)", "leader") for word in container["args"]
    ]
    without = [word for word in filled[1:] if not word.startswith(("--kv-transfer-config", "--max-model-len"))]
    return [str(MODEL), *without, '--hf-overrides={"num_attention_heads": 64}', "--max-model-len=4096"]


@pytest.mark.parametrize("values", value_files())
def test_vllm_spreads_an_engine_over_gpus_and_hosts_as_the_chart_has_them(
    parse: Parse, helm: Engine, values: str
) -> None:
    """By vLLM's own code, and for a mixture of experts."""
    arguments = pytest.importorskip("vllm").AsyncEngineArgs
    manifests = helm.manifests(read_values(value_files()[values]))
    for workload in manifests.of("StatefulSet") + manifests.of("LeaderWorkerSet"):
        role, group = workload["metadata"]["name"].rpartition("-")[2], workload["spec"].get("leaderWorkerTemplate", {})
        hosts, (tensor, data, expert) = group.get("size", 1), told(read_values(value_files()[values]), role)
        for host in range(hosts):
            options = parse(as_on_host(only_container(group["workerTemplate"] if host else manifests.node(role)), host))
            options.model = options.model_tag
            made = arguments.from_cli_args(options).create_engine_config(headless=options.headless).parallel_config
            assert (made.tensor_parallel_size, made.data_parallel_size) == (tensor, data)
            assert (made.enable_expert_parallel, made.pipeline_parallel_size) == (expert, 1)
            assert (made.nnodes, made.node_rank) == (hosts, host)
            assert hosts == 1 or made.master_addr == "leader"
            local = data // hosts if data > 1 else 1
            first = host * local if data > 1 else 0
            assert (made.data_parallel_size_local, made.data_parallel_rank) == (local, first)
            assert made.local_engines_only is (local < data), "each host's server drives its own ranks"


def told(values: dict[str, Any], role: str) -> tuple[int, int, bool]:
    """GPUs for each layer, data-parallel ranks, and whether experts are spread."""
    parallel = values.get(role, {}).get("parallel", {})
    return parallel.get("tensor", 1), parallel.get("data", 1), parallel.get("expert", False)


DOCUMENTED = re.compile(r"(?<!`)vllm serve ((?:[^\n`]|\\\n|\n(?=  ))+)")
"""A command of a page, with the lines that go on; not one that a sentence mentions."""
PAGES = [ROOT / "README.md", ROOT / "helm" / "pdproxy" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented() -> dict[str, list[str]]:
    """The words of each command, by its page and number; what `…` stands for is left out."""
    found = {}
    for page in PAGES:
        for number, command in enumerate(DOCUMENTED.findall(page.read_text(encoding="utf-8"))):
            words = shlex.split(command.replace("\\\n", " ").partition("     #")[0])
            found[f"{page.name} {number}"] = [word for word in words if word != "…"]
    return found


@pytest.mark.parametrize("where", documented())
def test_the_documented_commands_are_parsed(parse: Parse, where: str) -> None:
    words = documented()[where]
    options = parse(words)
    if options.model_tag in known():
        assert_starts(words, options)
        assert options.kv_transfer_config.kv_role == "kv_producer"
        assert_reuses(options)
    else:
        assert options.model_tag in (None, "MODEL"), "a model that an example names is in deploy/models.json"


def test_one_documented_command_is_whole() -> None:
    assert [words[0] for words in documented().values() if words[0] in known()] == ["Qwen/Qwen3.6-35B-A3B-FP8"]


NOT_COMPOSES = {
    *("model_tag", "revision", "tokenizer_revision", "host", "port", "gpu_memory_utilization", "kv_transfer_config"),
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "enable_log_requests", "shutdown_timeout"),
}
"""Arguments in which the run-book's nodes may differ from compose.yaml's: where, what is not needed, and an id."""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_commands_of_the_run_book_are_those_of_compose(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.delenv("RESUME_ARGS", raising=False)
    options = options_of(["--model", "org/model", "--revision", "a" * 40, "--folder", str(tmp_path / "x")])
    [spec] = [each for each in nodes_of(options, "k" * 16) if each.role.value == role]
    line, _ = started(options, spec)
    ours, theirs = parse(line[line.index("serve") + 1 :]), parse(resolved(role)[role]["command"])
    differ = {name for name, value in vars(theirs).items() if repr(getattr(ours, name)) != repr(value)}
    assert differ <= NOT_COMPOSES
    for name in ("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"):
        assert getattr(ours.kv_transfer_config, name) == getattr(theirs.kv_transfer_config, name)
    assert ours.revision == ours.tokenizer_revision == "a" * 40
