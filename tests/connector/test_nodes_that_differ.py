"""Two nodes whose cache bytes differ in meaning, on vLLM's real scheduler: refused, logged, computed locally."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheSpec

from deploy.local.ports import free_ports
from tests.connector.harness import Node, attention, make_node, prompt, state, take_ticket
from tests.connector.test_node_fingerprint import payload
from tests.connector.weights import layers, write_safetensors

QUANTIZED = replace(attention(), dtype=torch.uint8)
OTHER_STATE = replace(state("align"), dtypes=(torch.float16,))
CASES: tuple[tuple[tuple[KVCacheSpec, ...], str], ...] = (
    ((attention(), OTHER_STATE), "state_dtypes is float16 here, bfloat16 on the prefill node"),
    ((QUANTIZED, state("align")), "kv_dtype is uint8 here, bfloat16 on the prefill node"),
    ((attention(),), "cache_groups is FullAttention here, FullAttention,Mamba on the prefill node"),
)


@pytest.fixture
def node() -> Node:
    return make_node("kv_consumer", engine_id="engine-d")


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A prefill node whose workers have published what they chose."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(1)[0]))
    made = make_node("kv_producer", engine_id="engine-r")
    made.side.set_xfer_handshake_metadata({(0, 0): payload()})
    yield made
    made.side.shutdown()


def is_computed_here(node: Node, request_id: str) -> bool:
    """Nothing was dialled for the request, and all its tokens were computed."""
    node.run_out(request_id)
    dialled = any(meta.heartbeat_by_engine or meta.reqs_to_recv for meta in node.metas)
    return not dialled and node.counts("prompt_tokens") == {"computed": 100}


@pytest.mark.parametrize(("groups", "logged"), CASES, ids=[logged.split()[0] for _, logged in CASES])
def test_a_ticket_of_a_node_that_differs_is_refused(
    prefill: Node, groups: tuple[KVCacheSpec, ...], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node("kv_consumer", groups, engine_id="engine-d")
    with caplog.at_level(logging.WARNING):
        node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    assert is_computed_here(node, "d")
    assert node.counts("refused") == {"fingerprint": 1}
    assert logged in caplog.text
    assert "refused (fingerprint)" in caplog.text


def test_what_the_workers_chose_is_in_the_ticket_and_counts(registered: Node, node: Node) -> None:
    ticket = take_ticket(registered, prompt(100))
    assert ticket["pdproxy"]["fingerprint"]["kv_layout"] == "LBHNC"
    node.add("d", prompt(100), ticket)
    assert is_computed_here(node, "d")
    assert node.counts("refused") == {"fingerprint": 1}


def test_an_idle_engine_steps_once_to_tell_its_fingerprint(registered: Node) -> None:
    assert registered.side.has_pending_push_work()
    gauges = registered.side.counters.drain().gauges
    parts = {labels[0]: labels[1] for name, labels, value in gauges if (name, value) == ("fingerprint", 1)}
    ticket = take_ticket(registered, prompt(100))
    digest = parts.pop("all")
    assert parts == ticket["pdproxy"]["fingerprint"]
    assert len(digest) == 16


def write_adapter(folder: Path, seed: int) -> Path:
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", layers(4, 2000, seed))
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    return folder


def adapted(folder: Path, name: str = "adapter", number: int = 1) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, number, str(folder))}


def ticket_with(prefill: Node, **more: Any) -> dict[str, Any]:
    """A prefill leg with an adapter."""
    prefill.add("p", prompt(100), {"do_remote_decode": True}, max_tokens=1, **more)
    ticket = prefill.run_out("p")[-1].kv_transfer_params
    assert ticket is not None
    return dict(ticket)


def test_an_adapter_of_the_same_content_may_have_another_name_and_path(
    prefill: Node, node: Node, tmp_path: Path
) -> None:
    ticket = ticket_with(prefill, **adapted(write_adapter(tmp_path / "one", 1)))
    node.add("d", prompt(100), ticket, **adapted(write_adapter(tmp_path / "two", 1), "another", 7))
    node.step()
    assert node.metas[-1].reads["d"].pull_tokens == 99


def test_other_content_under_the_same_name_is_refused(prefill: Node, node: Node, tmp_path: Path) -> None:
    ticket = ticket_with(prefill, **adapted(write_adapter(tmp_path / "one", 1)))
    node.add("d", prompt(100), ticket, **adapted(write_adapter(tmp_path / "two", 2)))
    assert is_computed_here(node, "d")
    assert node.counts("refused") == {"digest": 1}


def test_an_adapter_s_ticket_is_for_no_request_without_one(prefill: Node, node: Node, tmp_path: Path) -> None:
    node.add("d", prompt(100), ticket_with(prefill, **adapted(write_adapter(tmp_path / "one", 1))))
    assert is_computed_here(node, "d")
    assert node.counts("refused") == {"digest": 1}


def test_an_adapter_that_cannot_be_read_is_not_handed_over(prefill: Node, node: Node, tmp_path: Path) -> None:
    nowhere = adapted(tmp_path / "nowhere")
    prefill.add("p", prompt(100), {"do_remote_decode": True}, max_tokens=1, **nowhere)
    assert prefill.run_out("p")[-1].kv_transfer_params is None
    assert prefill.counts("refused") == {"unsuitable_request": 1}
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)), **nowhere)
    assert is_computed_here(node, "d")
    assert node.counts("refused") == {"unsuitable_request": 1}


def test_an_adapter_that_changes_while_its_prompt_runs_gives_no_ticket(prefill: Node, tmp_path: Path) -> None:
    free = prefill.free_blocks
    folder = write_adapter(tmp_path / "one", 1)
    prefill.add("p", prompt(100), {"do_remote_decode": True}, max_tokens=1, **adapted(folder))
    write_safetensors(folder / "adapter_model.safetensors", layers(4, 2000, 2))
    assert prefill.run_out("p")[-1].kv_transfer_params is None
    assert prefill.free_blocks == free
