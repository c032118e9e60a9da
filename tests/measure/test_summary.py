"""The summary's arithmetic against counts made by hand, and the published figures."""
import csv
import io

import pytest

from ea_vision.base.errors import exit_code
from ea_vision.measure.summary import main, summarise
from ea_vision.models import published_figures


def test_counts_of_an_augmented_resnet():
    plain, aa, ea = summarise("resnet34"), summarise("aa_resnet34"), summarise("ea_aa_resnet34")
    assert (plain.attention_layers, plain.maps) == (0, "")
    assert (aa.attention_layers, aa.maps) == (26, "20 x 8 x (14x14) + 6 x 8 x (7x7)")
    # an evolution convolution: 8 x 8 x 9 multiply-adds a pixel of the N x N map, 19 + 5 layers have one
    extra = 8 * 8 * 9 * (19 * 196**2 + 5 * 49**2)
    assert ea.gmacs - aa.gmacs == pytest.approx(extra / 1e9, rel=1e-6)


@pytest.mark.parametrize("name", [
    "resnet34", "aa_resnet34", "ea_aa_resnet34", "resnet50", "aa_resnet50", "ea_aa_resnet50"])
def test_arithmetic_is_the_papers_within_two_percent(name):
    row = summarise(name)
    assert row.gflops_paper == pytest.approx(published_figures(name).gflops, rel=0.02)
    assert row.params_m == pytest.approx(published_figures(name).params_m, abs=0.06)


def test_table_and_csv(tmp_path, capsys):
    path = tmp_path / "summary.csv"
    assert main(["cnn_cifar", "ea_conv_transformer_cifar", "--csv", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["model"] for row in rows] == ["cnn_cifar", "ea_conv_transformer_cifar"]
    assert float(rows[0]["params_m"]) == pytest.approx(5.36, abs=0.01) and rows[1]["published_params_m"] == ""


def test_unknown_model_is_one_line(capsys):
    assert exit_code(lambda: main(["ea_resnet50"])) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "ea_aa_resnet50" in err
