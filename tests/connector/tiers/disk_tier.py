"""A small disk tier that works: one file a stored prefix, holding its attention blocks and its state at the boundary.

Files are written while a step ends and read between steps. A file that is gone by the time it is read, or that holds
something else, fails its load. A prefix is stored where a step of its prompt ends at a boundary of all groups' blocks.
On a CPU give the node `--block-size` with the size that the groups have: once vLLM 0.32 is up it falls back to 128
tokens there, and ends its steps elsewhere.
"""

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

Ids = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Copy:
    """One prefix between its file and blocks; `skip`: how many of each group's stored blocks are not wanted."""

    request_id: str
    path: str
    blocks: Ids
    skip: tuple[int, ...] = ()


@dataclass
class DiskMetadata(KVConnectorMetadata):
    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)


class Shelf:
    """Where the file of a prefix lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, tokens: Sequence[int]) -> Path:
        return self.folder / hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:32]

    def longest(self, tokens: Sequence[int], unit: int) -> int:
        """Tokens of the longest stored prefix that leaves one token to compute."""
        for length in range((len(tokens) - 1) // unit * unit, 0, -unit):
            if self.path(tokens[:length]).exists():
                return length
        return 0


class DiskTier(KVConnectorBase_V1, SupportsHMA):
    """Both sides; `kv_connector_extra_config.folder` is where it stores."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.shelf = Shelf(Path(self._kv_transfer_config.kv_connector_extra_config["folder"]))
        self.groups = kv_cache_config.kv_cache_groups
        self.unit = vllm_config.cache_config.block_size
        self.asked: list[tuple[str, int]] = []
        self.calls: list[str] = []
        self._found: dict[str, int] = {}
        self._meta = DiskMetadata()
        self._layers: dict[str, list[torch.Tensor]] = {}
        self._results = KVConnectorTransferResults()

    # ---- the scheduler's process

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        end = self._found[request.request_id] = self.shelf.longest(request.all_token_ids, self.unit)
        return (end - num_computed_tokens, True) if end > num_computed_tokens else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.calls.append(f"{request.request_id} loads {num_external_tokens}")
        end = self._found.pop(request.request_id, 0)
        if num_external_tokens:
            start = end - num_external_tokens
            ids = tuple(tuple(block.block_id for block in group) for group in blocks.blocks)
            path = str(self.shelf.path(request.all_token_ids[:end]))
            skip = tuple(0 if self._is_state(group) else start // self.unit for group in range(len(self.groups)))
            self._meta.loads.append(Copy(request.request_id, path, self._stored(ids, end), skip))

    def build_connector_meta(self, scheduler_output: Any) -> DiskMetadata:
        for request_id, tokens, end in self._ends(scheduler_output):
            ids = self._kv_cache_manager.get_block_ids(request_id)
            stored = self._stored(tuple(map(tuple, ids)), end)
            if all(block for group in stored for block in group):
                self._meta.saves.append(Copy(request_id, str(self.shelf.path(tokens[:end])), stored))
        meta, self._meta = self._meta, DiskMetadata()
        return meta

    def _ends(self, plan: Any) -> Iterator[tuple[str, Sequence[int], int]]:
        """Requests of which this step ends a chunk of the prompt at a block's boundary."""
        for new in plan.scheduled_new_reqs:
            end = new.num_computed_tokens + plan.num_scheduled_tokens[new.req_id]
            if new.prompt_token_ids and end % self.unit == 0 and end < len(new.prompt_token_ids):
                yield new.req_id, new.prompt_token_ids, end

    def _stored(self, ids: Ids, end: int) -> Ids:
        """The blocks of a request that a file of `end` tokens holds."""
        last = end // self.unit
        return tuple(
            group[last - 1 : last] if self._is_state(number) else group[:last] for number, group in enumerate(ids)
        )

    def _is_state(self, group: int) -> bool:
        return isinstance(self.groups[group].kv_cache_spec, MambaSpec)

    def update_connector_output(self, connector_output: Any) -> None:
        self.calls += [f"{name} received" for name in sorted(connector_output.finished_recving or ())]
        self.calls += [f"{name} failed" for name in sorted(connector_output.failed_recving)]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(f"{request.request_id} finished")
        self._found.pop(request.request_id, None)
        return False, None

    # ---- a worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = {
            name: list(cache) if isinstance(cache, list | tuple) else [cache] for name, cache in kv_caches.items()
        }

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._bound().loads:
            self._results.finished_recving.add(load.request_id)
            try:
                stored = torch.load(load.path)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
                self._results.failed_recving.add(load.request_id)
                continue
            for group, (ids, skip) in enumerate(zip(load.blocks, load.skip, strict=True)):
                for rows, kept in zip(self._rows(group, ids), stored[group], strict=True):
                    for row, one in list(zip(rows, kept, strict=True))[skip:]:
                        row.copy_(one)

    def wait_for_save(self) -> None:
        for save in self._bound().saves:
            groups = [
                [[row.clone() for row in rows] for rows in self._rows(group, ids)]
                for group, ids in enumerate(save.blocks)
            ]
            partial = Path(f"{save.path}.partial")
            torch.save(groups, partial)
            partial.rename(save.path)

    def _rows(self, group: int, ids: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """A group's blocks in each of its layers' tensors, as views."""
        blocks = self._kv_cache_config.num_blocks
        for name in self.groups[group].layer_names:
            for tensor in self._layers[name]:
                axis = next(axis for axis, size in enumerate(tensor.shape) if size and size % blocks == 0)
                share = tensor.shape[axis] // blocks
                yield [tensor.narrow(axis, block * share, share) for block in ids]

    def _bound(self) -> DiskMetadata:
        meta = self._connector_metadata
        return meta if isinstance(meta, DiskMetadata) else DiskMetadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.calls.append(f"preempted, with {type(kv_connector_metadata).__name__}")

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass


class HangingTier(DiskTier):
    """Loads for as long as there is a file called `hangs` in its folder, and ends them afterwards."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._running: list[Copy] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._running += self._bound().loads
        if not (self.shelf.folder / "hangs").exists():
            self._bound().loads[:], self._running = self._running, []
            super().start_load_kv(forward_context)


class OldTier(DiskTier):
    """Told of preemptions in the signature of old."""

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        self.calls.append(f"preempted {sorted(preempted_req_ids)}")


class SlowTier(DiskTier):
    """Undecided as long as there is a file called `looking` in its folder."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (None, False) if (self.shelf.folder / "looking").exists() else answer


class RashTier(DiskTier):
    """Answers nonsense: the number in the file `says`."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return int((self.shelf.folder / "says").read_text()), True


class NaiveTier(DiskTier):
    """Subtracts, and does not look: less than nothing where more is cached locally than it has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        return self._found[request.request_id] - num_computed_tokens, True


class InstantTier(DiskTier):
    """Loads within a step."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], False


class BlockwiseTier(DiskTier):
    """Tells what it could not load block by block."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.bad: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context)
        for load in self._bound().loads:
            if load.request_id in self._results.failed_recving:
                self._results.failed_recving.discard(load.request_id)
                self.bad |= {load.blocks[0][-1]}

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad = self.bad, set()
        return bad


class DenseTier(KVConnectorBase_V1):
    """Without support for several cache groups."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> DiskMetadata:
        return DiskMetadata()
