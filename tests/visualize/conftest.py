"""The scripts of visualize/ are imported as they import each other: from their folder."""
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "visualize"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))
