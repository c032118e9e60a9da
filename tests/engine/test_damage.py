"""Files of a run folder with random bytes flipped, cut or swapped: refused in one known way, or nothing has changed."""
from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.networks import encode_weights, load_weights
from ea_vision.engine import checkpoint, run_folder, train_cifar
from ea_vision.engine.config import load_recipe, resolve
from ea_vision.engine.run import is_complete
from ea_vision.engine.step_log import COLUMNS, StepLog
from tests.engine.runner import assert_equal

OLD_RUN = Path(__file__).parent / "old_runs" / "cifar"
RESULTS = b'{\n  "model": "test_resnet",\n  "epochs": 2,\n  "eval_split": "test",\n  "test_images": 355\n}\n'
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
    checkpoint.check_complete(intact, path)
    path.write_bytes(content)
    try:
        state = checkpoint.read_checkpoint(path)
    except checkpoint.DamagedCheckpoint as error:
        assert str(path) in str(error)
        assert checkpoint.newest_checkpoint(tmp_path) is None
    else:
        assert_equal(state, intact, "what is accepted is what was written")


WEIGHTS = safetensors.torch.load_file(OLD_RUN / run_folder.WEIGHTS)


class Holder(torch.nn.Module):
    """A model whose state are the weights of the old run, and which keeps what is loaded."""

    def state_dict(self):
        return WEIGHTS

    def load_state_dict(self, state):
        self.loaded = state


@fast
@given(content=damage(encode_weights(WEIGHTS)))
def test_weights(tmp_path, content):
    path, model = tmp_path / run_folder.WEIGHTS, Holder()
    path.write_bytes(content)
    try:
        load_weights(model, path)
    except UsageError as error:
        assert str(path) in str(error)
    else:
        assert_equal(model.loaded, WEIGHTS, "what is accepted is what was written")


@fast
@given(content=damage((OLD_RUN / run_folder.WEIGHTS).read_bytes()))
def test_weights_without_a_checksum(tmp_path, content):
    """Of older runs and of other people: a flipped bit of a number is not seen, but names, shapes and NaN are."""
    path, model = tmp_path / run_folder.WEIGHTS, Holder()
    path.write_bytes(content)
    try:
        load_weights(model, path)
    except UsageError as error:
        assert str(path) in str(error)
    else:
        assert {name: value.shape for name, value in model.loaded.items()} == \
            {name: value.shape for name, value in WEIGHTS.items()}
        assert all(value.isfinite().all() for value in model.loaded.values() if value.is_floating_point())


@fast
@given(content=damage((OLD_RUN / run_folder.METRICS).read_bytes()))
def test_metrics(tmp_path, content):
    (tmp_path / run_folder.METRICS).write_bytes(content)
    try:
        columns = run_folder.read_metrics(tmp_path)
    except UsageError as error:
        assert str(tmp_path / run_folder.METRICS) in str(error)
    else:
        assert list(columns) == list(run_folder.COLUMNS)
        assert all(isinstance(value, float) for values in columns.values() for value in values)
        assert len({len(values) for values in columns.values()}) == 1
        assert all(0 <= value <= 100 for name in ("top1", "top5") for value in columns[name] if value == value)


GATES = "epoch,step,a.alpha,a.beta\n1,5,0.1,0.2\n2,10,0.2,0.3\n"


@fast
@given(content=damage(GATES.encode()))
def test_gates(tmp_path, content):
    (tmp_path / run_folder.GATES).write_bytes(content)
    try:
        columns = run_folder.read_gates(tmp_path)
    except UsageError as error:
        assert str(tmp_path / run_folder.GATES) in str(error)
    else:
        assert list(columns)[:2] == ["epoch", "step"] and all(
            isinstance(value, float) and math.isfinite(value) for values in columns.values() for value in values)
        assert len({len(values) for values in columns.values()}) == 1
        assert all(a < b for name in ("epoch", "step") for a, b in pairwise([0.0, *columns[name]]))


@fast
@given(content=damage((OLD_RUN / run_folder.CONFIG).read_bytes()))
def test_config(tmp_path, content):
    path = tmp_path / run_folder.CONFIG
    path.write_bytes(content)
    try:
        config, run = run_folder.read_config(tmp_path, "classes")
    except UsageError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(config["model"], str) and isinstance(run["classes"], list)
    try:
        config, _ = resolve(train_cifar.CifarConfig, {"recipe": str(path)})
    except UsageError as error:
        assert str(error)
    else:
        assert isinstance(config.epochs, int) and isinstance(config.lr, float) and isinstance(config.model_kwargs, dict)
        yaml.safe_dump(config.as_dict())


@fast
@given(content=damage(RESULTS))
def test_results(tmp_path, content):
    (tmp_path / run_folder.RESULTS).write_bytes(content)
    try:
        results = run_folder.read_results(tmp_path)
    except (UsageError, RunError) as error:
        assert str(tmp_path / run_folder.RESULTS) in str(error)
    else:
        assert isinstance(results["epochs"], int) and isinstance(results["eval_split"], str)


SPEED = "\n".join([",".join(COLUMNS), *(f"{step},{step / 5},0.1,2.5,300,1.5,600" for step in range(1, 9))]) + "\n"


@fast
@given(content=damage(SPEED.encode()), updates=st.integers(0, 9))
def test_speed(tmp_path, content, updates):
    """What is damaged of this log is left out, what lies beyond the checkpoint too, and the run goes on."""
    path = tmp_path / "speed.csv"
    path.write_bytes(content)
    StepLog(tmp_path).begin(updates)
    header, *rows = path.read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert all(len(row.split(",")) == len(COLUMNS) and int(row.split(",")[0]) <= updates for row in rows)
    path.write_text(SPEED)
    StepLog(tmp_path).begin(updates)
    assert path.read_text().splitlines() == SPEED.splitlines()[:min(updates, 8) + 1]


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


def test_the_intact_ones_load(tmp_path):
    config, run = run_folder.read_config(OLD_RUN)
    assert config["model"] == "ea_conv_transformer_cifar" and len(run["classes"]) == 10
    assert run_folder.read_metrics(OLD_RUN)["top1"] == [9.85915]
    (tmp_path / run_folder.RESULTS).write_bytes(RESULTS)
    assert run_folder.read_results(tmp_path)["epochs"] == 2
    checkpoint.check_complete(checkpoint.read_checkpoint(OLD_RUN / checkpoint.LAST), OLD_RUN)
    run_folder.load_run(OLD_RUN)
    assert not is_complete(OLD_RUN, resolve(train_cifar.CifarConfig, {"recipe": str(OLD_RUN / "config.yaml")})[0])
    with pytest.raises(UsageError, match="did you mean"):
        load_recipe("fasst")
