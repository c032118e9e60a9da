"""What all tests share: which are slow, a seed, and the trial data where it is present."""

import gc
import logging
import os
import signal
from pathlib import Path

import pytest
import torch

from ea_vision import ops
from ea_vision.recorder import maps

# another seed shows which tests hold for one seed alone
SEED = int(os.environ.get("EA_VISION_TEST_SEED", "0"))
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked as slow, unless EA_VISION_TEST_ALL is 1 or `-m` asks for it."""
    if os.environ.get("EA_VISION_TEST_ALL") == "1" or "slow" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: make test-slow"))


def pytest_collection_finish():
    """Keep the garbage collector from scanning the objects of imported modules again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Escape names that are not UTF-8 in a test's log with backslashes, because xdist sends only UTF-8."""
    report = yield
    sections = []
    for title, text in report.sections:
        sections.append((title, text.encode("utf-8", "backslashreplace").decode("utf-8")))
    report.sections = sections
    return report


@pytest.fixture(scope="session")
def shared():
    """The folder of reference cases and trial data beside the checkout; skips the test where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the trial data in {SHARED}")
    return SHARED


@pytest.fixture
def caplog(caplog):
    """The log. Lines that a process logs once are logged anew, so their private stores are emptied here."""
    ops._logged.clear()
    maps._say_last_run.cache_clear()
    return caplog


@pytest.fixture
def log(caplog):
    """The log of this package, of level INFO too."""
    caplog.set_level(logging.INFO, "ea_vision")
    return caplog


@pytest.fixture
def group():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """Seed torch before fixtures that several tests share, which otherwise depend on the tests before them."""
    if fixturedef.scope != "function":
        torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _seed():
    """Seed torch, and restore the SIGTERM handler after the test, since trainers replace it."""
    torch.manual_seed(SEED)
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)
