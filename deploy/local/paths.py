"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
VENV = ROOT / ".venv"
MODEL = ROOT / "deploy" / "local" / "model" / "tiny-hybrid"
RUNS = ROOT / ".run"
"""Logs and other leavings of runs; ignored by git."""
