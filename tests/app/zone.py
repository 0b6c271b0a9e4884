"""A name server for tests."""


class Zone:
    """Names that resolve to what a test says."""

    def __init__(self, addresses: dict[str, tuple[str, ...]], services: dict[str, tuple[tuple[str, int], ...]]) -> None:
        self._addresses = addresses
        self._services = services

    async def addresses(self, name: str) -> tuple[str, ...]:
        return self._addresses[name]

    async def services(self, name: str) -> tuple[tuple[str, int], ...]:
        return self._services[name]
