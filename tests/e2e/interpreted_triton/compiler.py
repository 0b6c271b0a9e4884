"""The backend's compiler, which Triton finds by the module's name."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class InterpretedBackend(BaseBackend):
    """Compiles nothing: kernels are interpreted."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return False

    def hash(self) -> str:
        raise NotImplementedError

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object, language: Language) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, ModuleType]:
        raise NotImplementedError
