"""`ea-vision models`: every name of ours once, those that fit a pattern, and every file of weights."""
import csv
import io

import pytest
import timm

from ea_vision.base.errors import UsageError
from ea_vision.measure.models import list_models, main
from ea_vision.models import list_networks


def test_every_network_once_with_what_it_is(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list_networks()
    assert all(line.split("|")[5].strip() for line in lines[2:])


def test_pattern_and_part_of_a_name():
    assert [row.model for row in list_models("ea_aa_resnet*")] == [
        f"ea_aa_resnet{size}" for size in ("34", "50", "101", "152", "34_050")]
    assert {row.model for row in list_models("resnet50")} == {"aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50",
                                                              "csan_resnet50"}
    with pytest.raises(UsageError, match="did you mean ea_aa_resnet50"):
        list_models("ea_aa_resnet5O")


def test_weights_are_names_that_timm_creates(capsys):
    assert main(["conv_transformer", "--weights", "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows and all(row["weights"] == "comes with ea_vision" for row in rows)
    for row in rows:
        timm.create_model(row["model"], pretrained=True)
    assert all(row.weights.startswith("hub: timm/") for row in list_models("ea_deit_", weights=True))
    with pytest.raises(UsageError, match="none of the 1 networks"):
        list_models("ea_aa_resnet50", weights=True)
