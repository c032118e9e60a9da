"""Which parameters of the EA network Muon takes, and which its AdamW.

    python experiments/muon_parameters.py experiments/results/muon-parameters.csv

A row by part of the network: how many tensors and numbers of each, after an update, have AdamW's state, and how many
have Muon's (timm's takes what has two and more dimensions).
"""
import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import timm
import torch

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import exit_code
from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.engine.config import resolve
from ea_vision.engine.optimizer import build_optimizer
from ea_vision.engine.train_cifar import CifarConfig

PARTS = {  # by a pattern of the parameter's name, the first that fits
    "position tables": r"(height|width)_rel$", "classifier": r"head\.", "convolutions of the maps": r"\.evolution\.",
    "queries, keys, values and projection": r"\.(qkv|proj)\.(weight|bias)$", "norms": r"\.bn\.",
    "other convolutions": r"",
}


def rows() -> list[dict]:
    """Return the table."""
    model = timm.create_model("ea_conv_transformer_cifar")
    config, _ = resolve(CifarConfig, {"recipe": "fast", "model": "ea_conv_transformer_cifar"})
    optimizer = build_optimizer(config, model, config.batch_size)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    muon = {id(parameter) for parameter, state in optimizer.state.items() if "exp_avg" not in state}
    tensors, numbers = Counter(), Counter()
    for name, parameter in model.named_parameters():
        part = next(part for part, pattern in PARTS.items() if re.search(pattern, name))
        key = (part, id(parameter) in muon)
        tensors[key] += 1
        numbers[key] += parameter.numel()
    return [{"part": part, "muon_tensors": tensors[part, True], "muon_numbers": numbers[part, True],
             "adamw_tensors": tensors[part, False], "adamw_numbers": numbers[part, False]} for part in PARTS]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="CSV to write")
    file = parser.parse_args(argv).file
    create(file.parent)
    text = csv_text(rows())
    atomic_write(file, text.encode())
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
