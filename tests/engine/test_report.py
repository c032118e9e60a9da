"""Rows of timm's results files."""
import math

import timm.data
import torch

from ea_vision.engine.report import timm_crop_pct, timm_row


def test_timm_turns_the_share_back_into_the_same_size():
    """As it is written in the file, by timm's own arithmetic; in four digits almost always."""
    long = 0
    for resize in range(1, 513):
        for img_size in range(1, resize + 1):
            text = str(timm_crop_pct(img_size, resize))
            assert math.floor(img_size / float(text)) == resize, (img_size, resize, text)
            assert abs(float(text) - img_size / resize) <= 1e-4
            long += len(text) > 6
    assert long < 0.04 * 512 * 513 / 2
    assert (timm_crop_pct(224, 256), timm_crop_pct(32, 36)) == (0.875, 0.8888)


def test_a_row_leads_timm_to_our_preprocessing():
    row = timm_row("net", torch.nn.Linear(1, 1), 50.0, 90.0, 32, 36, "bilinear")
    transform = timm.data.create_transform((3, row["img_size"], row["img_size"]), crop_pct=float(row["crop_pct"]),
                                           interpolation=row["interpolation"])
    assert transform.transforms[0].size == 36
