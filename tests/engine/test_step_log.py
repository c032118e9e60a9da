"""What a run logs to Weights & Biases, replaced by a fake here; it was tried once with the real one, offline."""

from ea_vision.engine.config import resolve
from ea_vision.engine.step_log import COLUMNS, StepLog
from ea_vision.engine.train_cifar import CifarConfig
from tests.refused import refused


def log(folder, project="p", step=3):
    folder.mkdir(parents=True, exist_ok=True)
    config = resolve(CifarConfig, {"recipe": "none", "wandb": project, "lr": 1})
    step_log = StepLog(folder, config, 0)
    step_log.add(dict.fromkeys(COLUMNS, 0.5) | {"step": step})
    step_log.close()


def test_a_run_that_continues_is_the_same_run_and_no_other_is(tmp_path, wandb_runs):
    log(tmp_path / "a" / "run")
    log(tmp_path / "a" / "run", step=4)
    log(tmp_path / "b" / "run")
    first, again, other = wandb_runs
    assert first["id"] == again["id"] != other["id"]
    assert first["name"] == other["name"] == "run"
    assert first["resume"] == "allow"
    assert first["config"]["lr"] == 1
    assert first["dir"] == str(tmp_path / "a" / "run")
    [(step, values)] = again["logged"]
    assert step == 4
    assert values == {f"train/{name}": 0.5 for name in COLUMNS if name != "step"}


def test_a_refusal_is_one_clear_error(folder, wandb_runs):
    with refused("--wandb .WANDB_MODE=offline.*: no login"):
        log(folder, project="refused")
