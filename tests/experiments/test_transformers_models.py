"""The table of transformers' models that can evolve: the rows of a few are computed again."""

import csv

import pytest

from experiments.transformers_models import KINDS, RESULTS, rows_of
from tests.process import ROOT

MODELS = ["vit", "bert", "t5", "segformer", "diffllama"]
# a token of the pooling alone, outputs that must be contiguous, an image tower in a causal model, no Conv2d for patches
MODELS += ["aimv2_vision_model", "jetmoe", "git", "videomae"]


def rows_of_file():
    with RESULTS.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def results(rows):
    return [(row["kind"], row["result"]) for row in rows]


@pytest.mark.parametrize("model_type", MODELS)
def test_a_row_of_the_table(model_type):
    """A model that is accepted begins as the plain one and learns."""
    table = [row for row in rows_of_file() if row["model_type"] == model_type]
    assert len(table) == len(KINDS)
    assert results(table) == results(rows_of(model_type))


def test_the_page_counts_the_models_that_evolve_and_none_computes_something_else():
    rows = [row for row in rows_of_file() if row["kind"]]
    assert not [row for row in rows if row["result"] == "wrong"]
    tried = {row["model_type"] for row in rows}
    accepted = {row["model_type"] for row in rows if row["result"] == "accepted"}
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    assert f"[{len(accepted)} of {len(tried)} tried]" in page
