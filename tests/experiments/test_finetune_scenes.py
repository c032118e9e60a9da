"""Fine-tuning on scenes: the script runs to its table, goes on where it stopped, and changes nothing in the weights."""
import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "finetune_scenes" / "run.py"
spec = importlib.util.spec_from_file_location("finetune_scenes", SCRIPT)
study = importlib.util.module_from_spec(spec)
spec.loader.exec_module(study)
SMALL = {**study.VIT, "embed_dim": 24, "depth": 2, "num_heads": 3}


@pytest.fixture
def scenes(tmp_path):
    random = np.random.default_rng(0)
    for part, count in (("train", 4), ("validation", 2), ("test", 2)):
        for of_class in ("forest", "sea"):
            folder = tmp_path / "scenes" / part / of_class
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 256, (150, 150, 3), dtype=np.uint8)).save(folder / f"{number}.jpg")
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **{**SMALL, "img_size": 56})
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    return tmp_path


def test_the_table_comes_and_a_second_start_trains_nothing(scenes, monkeypatch):
    monkeypatch.setattr(study, "VIT", SMALL)
    command = [str(scenes / "scenes"), str(scenes / "runs"), "--weights", str(scenes / "weights.safetensors"), "--ways",
               "plain,gates", "--seeds", "1", "--photos", "3", "--epochs", "1", "--batch-size", "3"]
    assert study.main(command) == 0
    assert len(list((scenes / "runs" / "data" / "train").rglob("*.jpg"))) == 6
    with open(scenes / "runs" / "evidence-runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"]) for row in rows] == [("plain", "0"), ("gates", "0")]
    assert all(float(row["test_top1"]) in (0, 25, 50, 75, 100) for row in rows)
    assert rows[0]["alpha"] == "" and " to " in rows[1]["alpha"]
    made = {path: path.stat().st_mtime_ns for path in (scenes / "runs").rglob("model.safetensors")}
    assert study.main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in made} == made and len(made) == 2


def test_position_tables_keep_the_class_token_and_a_table_of_the_same_size():
    weights = {"pos_embed": torch.randn(1, 17, 6), "other": torch.ones(2)}
    same, larger = study.resized(weights, 4), study.resized(weights, 8)
    torch.testing.assert_close(same["pos_embed"], weights["pos_embed"])
    assert larger["pos_embed"].shape == (1, 65, 6) and larger["other"] is weights["other"]
    assert torch.equal(larger["pos_embed"][:, 0], weights["pos_embed"][:, 0])
