"""The scheduler side but for requests: what the node is, where its hand-overs end, its side channel and its answers."""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from .config import NODE_ID, ConnectorConfig
from .counters import Counters
from .fingerprint import Fingerprint
from .kv_groups import attention_block_size, group_shapes, node_capacity, require_movable_states
from .leases import LeaseTable
from .liveness import LivenessSocket
from .messages import Verdict
from .node_fingerprint import all_parts, node_fingerprint, rank_parts
from .resume_boundary import LocalHits, drops_unit, resume_boundary
from .side_channel import Listener
from .tcp_server import ServerLimits
from .ticket import GroupKind
from .ticket_keys import KeyFile

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


log = logging.getLogger("vllm.pdproxy.scheduler")


@dataclass(frozen=True, slots=True)
class PrefixHashing:
    """How this engine's prefix cache names the tokens of a prompt, so that a proxy can compute the same names.

    `algorithm`: of `--prefix-caching-hash-algo`. `unit`: tokens for each hash. `block_size`: tokens in a block of the
    attention groups, the largest where they differ; 0 where there are none. `drops_unit`: lookups give up the last unit
    of a hit (EAGLE and MTP). `states`: there are state groups, without whose states nothing can be resumed.
    """

    algorithm: str
    unit: int
    block_size: int
    drops_unit: bool
    states: bool

    @classmethod
    def of(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> "PrefixHashing":
        """The engine's."""
        _, unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        block_size = attention_block_size(vllm_config, kv_cache_config)
        algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        states = any(shape.kind is GroupKind.STATE for shape in group_shapes(kv_cache_config))
        return cls(algorithm, unit, block_size, drops_unit(vllm_config), states)

    def labels(self, root: bytes) -> tuple[str, ...]:
        """For the metric. `root`: the parent of a prompt's first hash."""
        flags = (str(flag).lower() for flag in (self.drops_unit, self.states))
        return self.algorithm, str(self.unit), str(self.block_size), *flags, root.hex()


class SchedulerBase(NixlPullConnectorScheduler):
    """One per engine. Everything but `verify` runs on the engine's thread. Raises ConfigError."""

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig", config: ConnectorConfig
    ) -> None:
        require_movable_states(kv_cache_config)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        self._engine_id = engine_id
        parallel = vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        # Data-parallel engines of a mixture of experts step together (those of other models are told that they are
        # one): whoever waits delays the others' tokens.
        self._keeps_step = parallel.data_parallel_size > 1
        self.counters = Counters()
        self.counters.capacity(node_capacity(vllm_config, kv_cache_config))
        self._leases = LeaseTable(ranks=self._ranks)
        self._boundary = resume_boundary(vllm_config, kv_cache_config)
        self._backoff: int | None = None
        self._untold_hashing: PrefixHashing | None = PrefixHashing.of(vllm_config, kv_cache_config)
        self.local_hits = LocalHits(kv_cache_config)
        self._fingerprint = node_fingerprint(vllm_config, kv_cache_config, self._boundary, config.weights_label)
        self._listener: Listener | None = None
        self._liveness = LivenessSocket(os.environ.get(NODE_ID, ""))
        if isinstance(config.keys, KeyFile):
            config.keys.report_to(self.counters.key_file_changed)
        if not config.keys:
            log.warning(
                "Tickets are neither signed nor checked for a signature: give prefill and decode nodes a common key "
                "(pdproxy_key_file or PDPROXY_TICKET_KEYS) wherever others can reach them."
            )

    @property
    def prefills(self) -> bool:
        """Whether this node computes prompts for others."""
        return self._config.role.prefills

    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Issue tickets with this fingerprint, and accept only those that have the same."""
        self._fingerprint = fingerprint

    def _ticket_tokens(self, request: "Request") -> int:
        """How many of the prompt's tokens a ticket covers: those that a later request can resume after, or, where no
        state is kept, all but those that vLLM has the decode node compute."""
        return self._boundary.tokens(request, super()._prefill_backoff())

    def _prefill_backoff(self) -> int:
        return super()._prefill_backoff() if self._backoff is None else self._backoff

    def on_new_request(self, request: "Request") -> None:
        """vLLM's, which shortens the prompt of a prefill leg to the tokens that its ticket covers."""
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._backoff = request.num_prompt_tokens - self._ticket_tokens(request)
        super().on_new_request(request)
        self._backoff = None

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        """vLLM's. With the first step the metrics say how prompts are hashed: `NONE_HASH`, the parent of a prompt's
        first hash, exists only once the engine is complete."""
        hashing, self._untold_hashing = self._untold_hashing, None
        if hashing is not None:
            self.counters.hashing(hashing.labels(kv_cache_utils.NONE_HASH))
        return super().build_connector_meta(scheduler_output)

    def verify(self, engine_id: str, alias: str, nonce: str) -> Verdict:
        """The side channel's answer to a decode node's question after a read. Called in the listener's thread."""
        return self._leases.verify(alias, nonce) if engine_id == self._engine_id else Verdict.UNKNOWN

    def take_back(self, engine_id: str, alias: str, nonce: str) -> Verdict:
        """The side channel's answer to a ticket that is given back. Called in the listener's thread."""
        raise NotImplementedError

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Complete the fingerprint, and start our side channel in the place of vLLM's.

        Raises SideChannelError when the port is in use.
        """
        if self._listener is not None:
            return
        for payload in metadata.values():
            if not isinstance(payload, NixlHandshakePayload):
                raise TypeError(f"expected NixlHandshakePayload, got {type(payload).__name__}")
        self.set_fingerprint(self._fingerprint.extended(rank_parts(metadata.values())))
        self.counters.fingerprint(all_parts(self._fingerprint))
        log.info("Fingerprint %s: %s", self._fingerprint.digest, dict(self._fingerprint.parts))
        encoded = {ranks: msgspec.msgpack.encode(payload) for ranks, payload in metadata.items()}
        connections = self._config.side_channel_connections
        self._listener = Listener(
            self.side_channel_host,
            self.side_channel_port,
            encoded,
            self.verify,
            self.counters,
            engine_id=self._engine_id,
            keys=self._config.keys,
            take_back=self.take_back,
            limits=ServerLimits(connections, connections // 2),
        )
        self._listener.start()
        self._liveness.open()

    def shutdown(self) -> None:
        """Stop the side channel, both ends."""
        self._liveness.close()
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        super().shutdown()
