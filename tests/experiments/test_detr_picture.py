"""The small DETR of docs/look.md: scenes, goals of the cells, accuracy, and the command."""

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from experiments import detr_picture as study


@pytest.fixture(scope="module")
def examples():
    return study.scenes("test", 20, np.random.default_rng(0))


def test_boxes_hold_the_objects_and_cells_know_what_they_show(examples):
    assert {len(boxes) for _, boxes, _ in examples} == {1, 2, 3}
    for image, boxes, classes in examples:
        outside = image.clone()
        kinds = torch.full((64, 64), 3)
        goals = torch.zeros(64, 64, 4)
        for (left, top, right, bottom), kind in zip(boxes.int().tolist(), classes, strict=True):
            assert image[:, top:bottom, left:right].max() == 1
            outside[:, top:bottom, left:right] = 0
            kinds[top:bottom, left:right] = kind
            twice = [left + right, top + bottom, 2 * (right - left), 2 * (bottom - top)]
            goals[top:bottom, left:right] = torch.tensor(twice) / 128
        assert outside.max() < 0.5
        middles = slice(4, None, 8)
        expected = (kinds[middles, middles].flatten(), goals[middles, middles].flatten(0, 1))
        torch.testing.assert_close(study.cells_of(boxes, classes), expected)


def test_accuracy(examples, monkeypatch):
    def measured(shift=0, wrong=0, score=0.9):
        def predict(_, example):
            _, boxes, classes = example
            false = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
            boxes = torch.cat([boxes + shift, false])
            classes = torch.cat([(classes + wrong) % 3, torch.tensor([0])])
            return boxes, classes, torch.full((len(boxes),), score)

        monkeypatch.setattr(study, "predictions", predict)
        row = study.accuracy(None, examples)
        return [row["found"], row["named"], row["false"]]

    objects = sum(len(boxes) for _, boxes, _ in examples)
    assert measured() == [1, 1, pytest.approx(20 / (objects + 20))]
    assert measured(wrong=1)[:2] == [1, 0]
    assert measured(shift=20) == [0, 0, 1]
    assert measured(score=0.4)[:2] == [0, 0]


def test_the_command_keeps_the_network_and_draws_it(tmp_path, monkeypatch):
    for name, value in {"WIDTH": 16, "BATCH": 2, "TEST": 12}.items():
        monkeypatch.setattr(study, name, value)
    command = [str(tmp_path / "run"), "--steps", "2", "--results", str(tmp_path / "a.csv")]
    assert study.main([*command, "-o", str(tmp_path / "first.png")]) == 0
    [row] = pd.read_csv(tmp_path / "a.csv").to_dict("records")
    assert row["steps"] == 2
    assert row["scenes"] == 12
    (tmp_path / "a.csv").unlink()
    assert study.main([*command, "-o", str(tmp_path / "second.png")]) == 0
    assert not (tmp_path / "a.csv").exists(), "the second call trains nothing"
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
