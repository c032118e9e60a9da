"""A tiny detector with attention, and a run folder of it, for the tests of what uses one."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ea_vision.detection.model import Detector, create_detector
from ea_vision.engine import run_folder

SIDE = 64
CLASSES, IDS = ["cat", "dog", "owl"], [3, 7, 11]
KEYWORDS = {"num_classes": 3, "img_size": SIDE, "fpn_channels": 8, "head_convs": 1, "layers": [1, 1, 1, 1]}


def tiny_detector(backbone: str = "ea_aa_resnet34", **kwargs) -> Detector:
    """With random weights that find objects of differing scores: none is sure, where many would be equally so."""
    torch.manual_seed(0)
    detector = create_detector(backbone, **{**KEYWORDS, **kwargs}).eval()
    head = detector.head.classification_head.cls_logits
    nn.init.normal_(head.weight, std=2.0 if detector.head.classification_head.conv.convs else 0.3)
    nn.init.zeros_(head.bias)
    return detector


def tiny_run(folder: Path, backbone: str = "ea_aa_resnet34", **kwargs) -> Detector:
    """Write what `load_model` reads of a detection run."""
    detector = tiny_detector(backbone, **kwargs)
    folder.mkdir(parents=True)
    run_folder.write_config(folder, {"model": backbone}, {
        "task": "detection", "model_kwargs": {**KEYWORDS, **kwargs}, "classes": CLASSES, "category_ids": IDS})
    run_folder.write_weights(folder, detector.state_dict())
    return detector
