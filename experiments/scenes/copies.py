"""Find test photos that are copies of training photos, and what the shipped networks reach with and without them.

    python -m experiments.scenes.copies OUT                   # OUT: as split.py writes it

A copy: the grey values of two photos at 64 x 64 pixels correlate above 0.985 (looked at: of the pairs between 0.98 and
0.985 none is one, smooth skies alone are alike). Written into experiments/results/scenes:
copies.csv, a row a copy with the most similar training photo, and copies-top1.csv, top-1 in percent on all test photos
and on those that are no copies.
"""
import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import ea_vision  # noqa: F401  (registers the models)

RESULTS = Path(__file__).resolve().parents[1] / "results" / "scenes"
NETWORKS = ("aa_resnet34_050.scenes", "ea_aa_resnet34_050.scenes")
SIDE, LEAST = 64, 0.985


def grey(paths: list[Path]) -> np.ndarray:
    """Return the grey values of photos, (photos, SIDE * SIDE), each of mean 0 and length 1."""
    values = np.stack([np.asarray(Image.open(path).convert("L").resize((SIDE, SIDE)), np.float32).ravel()
                       for path in paths])
    values -= values.mean(1, keepdims=True)
    return values / np.linalg.norm(values, axis=1, keepdims=True).clip(1e-6)


def copies(test: list[Path], train: list[Path]) -> pd.DataFrame:
    """Return a row for each copy: test, train (class/name) and their correlation."""
    known, rows = grey(train).T, []
    for start in range(0, len(test), 256):
        some = test[start:start + 256]
        found = grey(some) @ known
        for path, index, correlation in zip(some, found.argmax(1), found.max(1), strict=True):
            if correlation > LEAST:
                rows.append({"test": f"{path.parent.name}/{path.name}", "correlation": round(float(correlation), 4),
                             "train": f"{train[index].parent.name}/{train[index].name}"})
    return pd.DataFrame(rows, columns=["test", "train", "correlation"])


@torch.no_grad()
def is_right(name: str, test: list[Path]) -> np.ndarray:
    """Return for each photo whether a network names its class."""
    model = timm.create_model(name, pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    classes = sorted({path.parent.name for path in test})
    right = []
    for start in range(0, len(test), 64):
        some = test[start:start + 64]
        images = torch.stack([transform(Image.open(path).convert("RGB")) for path in some])
        right += [classes[index] == path.parent.name
                  for index, path in zip(model(images).argmax(1).tolist(), some, strict=True)]
    return np.array(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    test, train = (sorted((out / split).rglob("*.jpg")) for split in ("test", "train"))
    found = copies(test, train)
    found.to_csv(RESULTS / "copies.csv", index=False)
    new = ~pd.Series([f"{path.parent.name}/{path.name}" for path in test]).isin(found["test"]).to_numpy()
    rows = []
    for name in NETWORKS:
        right = is_right(name, test)
        rows.append({"model": name, "images": len(test), "top1": round(100 * right.mean(), 2), "new_images": new.sum(),
                     "new_top1": round(100 * right[new].mean(), 2), "copies_top1": round(100 * right[~new].mean(), 2)})
    pd.DataFrame(rows).to_csv(RESULTS / "copies-top1.csv", index=False)
    print(found.to_string(), pd.DataFrame(rows).to_string(), sep="\n")


if __name__ == "__main__":
    main()
