"""The backend's driver, which Triton finds by the module's name."""

from typing import Any

from triton.backends.driver import Benchmarker, DriverBase


class InterpretedDriver(DriverBase):
    """Starts nothing: kernels are interpreted."""

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Benchmarker:
        raise NotImplementedError
