"""What all tests share: paths of the trial data where it is present, and threads that leave room for pytest-xdist."""
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference cases and trial data beside the checkout; skips the test where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the trial data in {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
