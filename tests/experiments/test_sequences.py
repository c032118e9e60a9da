"""The tasks without images in experiments/across and text: labels, causality, and tables that are continued."""

import pytest
import torch

from experiments.across import sequences
from experiments.text import run as sentences
from tests.refused import refused


def test_the_answer_is_the_value_beside_the_key():
    symbols, wanted = sequences.recall(50, torch.Generator().manual_seed(0))
    assert symbols.shape == (50, 17)
    for row, value in zip(symbols.tolist(), wanted.tolist(), strict=True):
        keys = row[:16:2]
        values = row[1:16:2]
        key = row[16]
        assert len(set(keys)) == 8
        assert max(keys) < 16 <= min(values)
        assert values[keys.index(key)] == value


def test_topics_that_are_held_out_are_not_trained_on():
    text, held_out, characters = sequences.load_text()
    assert len(held_out) > 10
    assert 60 < characters < 200
    assert 0 < text.min()
    assert text.max() < characters
    whole = bytes(text.tolist())
    for topic in held_out:
        assert bytes(topic.tolist()) not in whole


@pytest.mark.parametrize("kind", ["none", "residual+token_conv", "ea"])
def test_no_character_reads_a_later_one(kind):
    torch.manual_seed(0)
    model = sequences.Sequences(20, kind, "characters").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    text = torch.randint(20, (1, 12))
    whole = model(text)
    for t in range(11):
        other = text.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1) % 20
        changed = model(other)
        torch.testing.assert_close(changed[:, : t + 1], whole[:, : t + 1])
        assert not torch.equal(changed[:, t + 1 :], whole[:, t + 1 :])


def test_a_kind_that_reads_what_the_mask_hides_is_refused(tmp_path):
    command = ["characters", str(tmp_path / "characters.csv"), "--updates", "1", "--kinds"]
    with pytest.raises(SystemExit):
        sequences.main([*command, "none", "conv2d"])
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_continued(tmp_path):
    table = tmp_path / "recall.csv"
    command = ["recall", str(table), "--kinds", "ea", "--updates", "4", "--seeds", "0"]
    sequences.main(command)
    kept = table.read_text()
    sequences.main([*command, "1"])
    grown = table.read_text()
    assert grown.startswith(kept)
    assert grown.count("\n") == 1 + 2


def test_rows_of_other_sentences_are_not_continued(tmp_path):
    for split in ("train", "dev", "test"):
        (tmp_path / f"sst_{split}.txt").write_text("__label__1 a dull film\n")
    with refused("sst.csv has rows of other sentences than those in"):
        sentences.main([str(tmp_path)])
