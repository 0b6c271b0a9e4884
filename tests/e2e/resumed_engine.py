"""Run one engine in this process, with a decode node's settings, and continue its own answers from every cut.

`python -m tests.e2e.resumed_engine FILE CASE…` writes JSON: for each answer and cut, the rest of the uncut answer, and
the engine's output when it got only the part before the cut.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.llm_engine import LLMEngine

from connector.resume_order import KEY, node_secret, sign
from deploy.local.model.quiz import quiz
from deploy.local.node import NodeSpec, Role, command

LENGTH = 40
CUTS = (1, 12, 25, 39)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "logit bias": {"temperature": 0, "logit_bias": {1: -100.0, 40: 3.0}},
    "bad words": {"temperature": 0, "bad_words": [" 1", " 2 ="]},
    "minimum": {"temperature": 0, "min_tokens": 30, "ignore_eos": False},
    "seed": {"temperature": 2.0, "seed": 5},
    "seed, cut tail": {"temperature": 1.5, "seed": 7, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
    "seed, penalties": {"temperature": 2.0, "seed": 9, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "regex": {"temperature": 0, "structured_outputs": {"regex": "([a-f]{3}-[0-9]{2} ){30}"}},
    "regex, seed": {"temperature": 1.5, "seed": 3, "structured_outputs": {"regex": "([a-f]{3}-[0-9]{2} ){30}"}},
    "schema, seed": {"temperature": 1.5, "seed": 4, "structured_outputs": {"json": SCHEMA}},
}


@dataclass
class Engine:
    """vLLM's engine without its API server; requests are numbered."""

    engine: LLMEngine
    number: int = 0

    def answer(self, prompt: str, params: dict[str, Any], old: list[int] | None = None) -> list[EngineCoreOutput]:
        """The outputs of a request. `old`: tokens that it continues."""
        self.number += 1
        request = self._request(f"r-{self.number}", prompt, params)
        if old is not None:
            order = sign(node_secret(os.environ), request.request_id, old)
            request.sampling_params.extra_args = {"kv_transfer_params": {KEY: order}}
        self.engine.engine_core.add_request(request)
        return list(self._outputs(request.request_id))

    def _request(self, name: str, prompt: str, params: dict[str, Any]) -> Any:
        given = {"max_tokens": LENGTH, "ignore_eos": True, **params}
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        processor = self.engine.input_processor
        request = processor.process_inputs(name, prompt, SamplingParams(**given), ("generate",))
        processor.assign_request_id(request)
        return request

    def _outputs(self, name: str) -> Iterator[EngineCoreOutput]:
        while True:
            for output in self.engine.engine_core.get_output().outputs:
                if output.request_id == name:
                    yield output
                    if output.finish_reason is not None:
                        return

    def forget(self) -> None:
        """Empty the prefix cache, so that the next request computes everything."""
        assert self.engine.reset_prefix_cache()


def ids(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def log_probabilities(outputs: list[EngineCoreOutput]) -> list[list[int]]:
    """The tokens ranked at each position, without values: their last digits differ between a step and a prefill."""
    return [list(map(int, row)) for each in outputs if each.new_logprobs for row in each.new_logprobs.logprob_token_ids]


def make_engine(side_channel_port: int) -> Engine:
    """An engine with the command line of a decode node."""
    line = command(NodeSpec("decode", Role.DECODE, 1, side_channel_port))
    arguments, _ = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(line[3:])
    return Engine(LLMEngine.from_engine_args(EngineArgs.from_cli_args(arguments)))


def seen(outputs: list[EngineCoreOutput], old: int = 0) -> dict[str, Any]:
    """The visible part of outputs after the first `old` tokens."""
    ranked = log_probabilities(outputs)[old:]
    return {"ids": ids(outputs)[old:], "ranked": ranked, "end": str(outputs[-1].finish_reason)}


def cut_everywhere(engine: Engine, name: str) -> Iterator[dict[str, Any]]:
    """Cut one case at each of `CUTS`. At odd cuts the prefix cache is empty."""
    prompt = quiz(seed=4711, tokens=600).prompt()
    whole = engine.answer(prompt, CASES[name])
    for cut in (cut for cut in CUTS if cut < len(ids(whole))):
        if cut % 2:
            engine.forget()
        rest = engine.answer(prompt, CASES[name], ids(whole)[:cut])
        yield {"case": name, "cut": cut, "uncut": seen(whole, cut), "resumed": seen(rest)}


def main(to: str, *cases: str) -> None:
    engine = make_engine(int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]))
    found = [each for name in cases for each in cut_everywhere(engine, name)]
    Path(to).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
