"""Small detectors, and a run folder of one with attention, for tests that need them."""

import torch
from torch import nn

from ea_vision.detection.model import create_detector
from ea_vision.engine import run_folder

SIDE = 64
CLASSES = ["cat", "dog", "owl"]
IDS = [3, 7, 11]
SMALL = {"num_classes": 3, "img_size": SIDE, "fpn_channels": 8, "head_convs": 1}
ATTENTION = {**SMALL, "layers": [1, 1, 1, 1]}


def small_detector(backbone="aa_resnet34", **kwargs):
    small = ATTENTION if backbone.endswith("aa_resnet34") else SMALL
    return create_detector(backbone, **{**small, **kwargs})


def tiny_run(folder):
    """Write the files of a detection run that `load_model` reads. Its random weights give objects with different
    scores."""
    torch.manual_seed(0)
    detector = small_detector("ea_aa_resnet34")
    head = detector.head.classification_head.cls_logits
    nn.init.normal_(head.weight, std=2.0)
    nn.init.zeros_(head.bias)
    folder.mkdir(parents=True)
    run_folder.write_config(
        folder,
        {"model": "ea_aa_resnet34"},
        {"task": "detection", "model_kwargs": ATTENTION, "classes": CLASSES, "category_ids": IDS},
    )
    run_folder.write_weights(folder, detector.state_dict())
