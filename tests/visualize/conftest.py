"""Where the scripts are that a checkout runs."""
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "visualize"
