"""Files of a run folder with random bytes flipped, cut or swapped: refused in one known way, or nothing has changed."""
from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ea_vision.base.errors import UsageError
from ea_vision.engine import checkpoint
from ea_vision.engine.config import load_recipe
from tests.engine.runner import assert_equal

fast = settings(max_examples=100, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damage(draw, data: bytes) -> bytes:
    """`data` with a few bytes flipped, a piece cut out, two pieces swapped, or its end cut off."""
    damaged = bytearray(data)
    place = st.integers(0, len(data) - 1)
    kind = draw(st.sampled_from(["flip", "cut", "swap", "end", "repeat"]))
    first, second = sorted((draw(place), draw(place)))
    if kind == "flip":
        for _ in range(draw(st.integers(1, 4))):
            damaged[draw(place)] ^= draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[first:second + 1]
    elif kind == "end":
        del damaged[first:]
    elif kind == "repeat":
        damaged[first:first] = data[first:second]
    else:
        length = draw(st.integers(1, 40))
        damaged[first:first + length], damaged[second:second + length] = \
            data[second:second + length], data[first:first + length]
    return bytes(damaged)


def small_checkpoint() -> bytes:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.BatchNorm2d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    return checkpoint.encode({
        "config": {"seed": 0}, "data_fingerprint": "0" * 64, "world_size": 1, "progress": {"updates": 3, "rows": []},
        "model": model.state_dict(), "ema": None, "optimizer": optimizer.state_dict(), "scheduler": {}, "scaler": {},
        "random": [checkpoint.random_state(torch.device("cpu"))]})


CHECKPOINT = small_checkpoint()


@fast
@given(content=damage(CHECKPOINT))
def test_checkpoints(tmp_path, content):
    path = tmp_path / checkpoint.LAST
    path.write_bytes(CHECKPOINT)
    intact = checkpoint.read_checkpoint(path)
    path.write_bytes(content)
    try:
        state = checkpoint.read_checkpoint(path)
    except checkpoint.DamagedCheckpoint as error:
        assert str(path) in str(error)
        assert checkpoint.newest_checkpoint(tmp_path) is None
    else:
        assert_equal(state, intact, "what is accepted is what was written")


@fast
@given(text=st.text(max_size=200))
def test_recipes_of_any_text(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        recipe = load_recipe(str(path))
    except UsageError as error:
        assert str(error)
    else:
        assert isinstance(recipe, dict)
