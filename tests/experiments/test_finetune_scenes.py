"""Fine-tuning on scenes: the script writes its table, continues where it stopped, and does not change the weights."""

import pandas as pd
import timm
import torch
from safetensors.torch import save_file

from experiments.added_attention import run as added_attention
from experiments.finetune_scenes import run as study
from tests.data.photos import make_photos
from tests.refused import refused

SMALL = {**study.VIT, "embed_dim": 24, "depth": 2, "num_heads": 3}


def test_the_table_comes_and_a_second_start_trains_nothing(tmp_path, monkeypatch):
    scenes = tmp_path / "scenes"
    runs = tmp_path / "runs"
    weights = tmp_path / "weights.safetensors"
    make_photos(scenes, train=8, val=0, validation=4, test=4, classes=2)
    keywords = {**SMALL, "img_size": 56}
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **keywords)
    save_file(model.state_dict(), weights)
    monkeypatch.setattr(study, "VIT", SMALL)
    options = "--ways plain,gates --seeds 1 --photos 3 --epochs 1 --batch-size 3".split()
    command = [str(scenes), str(runs), "--weights", str(weights), *options]
    assert study.main(command) == 0
    photos = list((runs / "data" / "train").rglob("*.jpg"))
    assert len(photos) == 6
    rows = pd.read_csv(runs / "evidence-runs.csv")
    assert rows[["variant", "seed"]].values.tolist() == [["plain", 0], ["gates", 0]]
    assert pd.isna(rows["alpha"][0])
    assert " to " in rows["alpha"][1]
    times = {path: path.stat().st_mtime_ns for path in runs.rglob("model.safetensors")}
    assert study.main(command) == 0
    assert len(times) == 2
    assert {path: path.stat().st_mtime_ns for path in times} == times
    table = (runs / "evidence-runs.csv").read_text()
    assert study.main([*command, "--ways", "gates"]) == 0
    assert (runs / "evidence-runs.csv").read_text() == table, "the other way's row stays"
    with torch.no_grad():
        model.cls_token += 1
    save_file(model.state_dict(), weights)
    with refused("began with other weights than .*weights.safetensors"):
        study.main(command)


def test_wrong_scenes_are_found_before_the_pretraining(tmp_path, monkeypatch):
    monkeypatch.setattr(added_attention, "train", None)
    folders = [str(tmp_path / name) for name in ("tiny", "scenes", "runs")]
    with refused("scenes/train must have one folder per class"):
        added_attention.main(folders)


def test_position_tables_keep_the_class_token_and_a_table_of_the_same_size():
    weights = {"pos_embed": torch.randn(1, 17, 6), "other": torch.ones(2)}
    same = study.resized(weights, 4)
    larger = study.resized(weights, 8)
    torch.testing.assert_close(same["pos_embed"], weights["pos_embed"])
    assert larger["pos_embed"].shape == (1, 65, 6)
    assert larger["other"] is weights["other"]
    assert torch.equal(larger["pos_embed"][:, 0], weights["pos_embed"][:, 0])
