"""The composition root: builds everything from the settings, owns start and stop."""

from pdproxy.app.check import check
from pdproxy.app.run import serve

__all__ = ["check", "serve"]
