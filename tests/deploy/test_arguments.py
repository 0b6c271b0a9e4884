"""vLLM's own parser takes the command lines of nodes that compose.yaml, the chart and docs/install.md have."""

import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator

import pytest

from deploy.local.paths import ROOT
from tests.deploy.compose import resolved
from tests.helm.engine import Engine, Manifest, Manifests, engine, only_container, read_values, value_files

Parse = Callable[[list[str]], Namespace]
NODES = [("prefill", "prefill"), ("decode", "decode"), ("cpu", "cpu-prefill"), ("cpu", "cpu-decode")]
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@pytest.fixture(scope="module")
def parse() -> Parse:
    """What `vllm serve` makes of its arguments; it ends the process, SystemExit, over any that it does not know."""
    launchers = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    parser = launchers.make_arg_parser(pytest.importorskip("vllm.utils.argparse_utils").FlexibleArgumentParser())
    return lambda words: Namespace(**vars(parser.parse_args(words)))


def assert_reuses(said: Namespace) -> None:
    """The mamba cache's mode is left to vLLM, which makes it `align` where there are mamba layers; told so without any,
    a node dies of its first request."""
    assert (said.enable_prefix_caching, said.enable_prompt_tokens_details) == (True, True)
    assert said.mamba_cache_mode == "none"


@pytest.mark.parametrize(("profile", "name"), NODES)
def test_a_composed_nodes_command(parse: Parse, profile: str, name: str) -> None:
    service = resolved(profile)[name]
    said = parse(service["command"])
    assert str(said.port) == service["environment"].get("NODE_PORT", "8000")
    assert said.kv_transfer_config.kv_role == ROLES[name.removeprefix("cpu-")]
    assert said.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert_reuses(said)
    grace = re.fullmatch(r"(\d+)(s|m)", service["stop_grace_period"])
    assert grace is not None
    assert 0 < said.shutdown_timeout < int(grace[1]) * (60 if grace[2] == "m" else 1)


@pytest.fixture(scope="module")
def helm() -> Iterator[Engine]:
    """Helm's engine."""
    with engine() as running:
        yield running


def node_pods(manifests: Manifests) -> Iterator[tuple[str, Manifest]]:
    """Every pod of a node with its role, the workers of groups among them."""
    for role in ("prefill", "decode"):
        yield role, manifests.node(role)
    for group in manifests.of("LeaderWorkerSet"):
        yield group["metadata"]["name"].rpartition("-")[2], group["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def as_started(container: Manifest) -> list[str]:
    """A container's arguments as Kubernetes hands them over; whatever a variable holds, here it is 1."""
    return [re.sub(r"\$\(\w+\)", "1", word) for word in container["args"]]


@pytest.mark.parametrize("values", value_files())
def test_the_charts_command(parse: Parse, helm: Engine, values: str) -> None:
    for role, pod in node_pods(helm.manifests(read_values(value_files()[values]))):
        container = only_container(pod)
        said = parse(as_started(container))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert said.port == ports.get("http", said.port)
        assert said.kv_transfer_config.kv_role == ROLES[role]
        assert said.shutdown_timeout < pod["spec"]["terminationGracePeriodSeconds"]
        assert said.headless is ("http" not in ports)
        assert_reuses(said)


def test_the_documented_command(parse: Parse) -> None:
    [command] = re.findall(r"vllm serve (.*?\}')", (ROOT / "docs" / "install.md").read_text(), re.DOTALL)
    said = parse(shlex.split(command.replace("\\\n", " ")))
    assert said.kv_transfer_config.kv_role == "kv_producer"
    assert_reuses(said)
