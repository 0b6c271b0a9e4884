"""The names that tickets give to this engine's requests, in the scheduler's process and in every worker. Pure.

A ticket goes to clients and to other nodes, so it must not name the engine's own request id: who knows the id of a
living request can send a second one under it. An alias is random, made when the prefill leg arrives, and means nothing
to vLLM. Notices, heartbeats, leases and questions after a read name aliases; only this table turns one into a request.

The table is as large as the number of prefill legs that run or hold blocks.
"""


class Aliases:
    """Both ways, one alias a request."""

    def __init__(self) -> None:
        self._request_ids: dict[str, str] = {}
        self._aliases: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._aliases)

    def bind(self, alias: str, request_id: str) -> None:
        """From now on `alias` names this request; an earlier alias of it is forgotten."""
        self.forget(request_id)
        self._request_ids[alias] = request_id
        self._aliases[request_id] = alias

    def request_id(self, alias: str) -> str | None:
        """The request that `alias` names; None for what nobody knows."""
        return self._request_ids.get(alias)

    def alias(self, request_id: str) -> str | None:
        """What tickets call this request; None for a request that has no alias."""
        return self._aliases.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request holds nothing any more."""
        alias = self._aliases.pop(request_id, None)
        if alias is not None:
            del self._request_ids[alias]
