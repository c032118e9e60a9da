"""The two tasks without images of experiments/across: right labels, no later character is read, a table goes on."""

import pytest
import torch

from experiments.across import sequences


def test_what_is_asked_for_is_the_value_beside_the_key():
    symbols, wanted = sequences.recall(50, torch.Generator().manual_seed(0))
    assert symbols.shape == (50, 17)
    for row, value in zip(symbols.tolist(), wanted.tolist(), strict=True):
        keys, values, asked = row[:16:2], row[1:16:2], row[16]
        assert len(set(keys)) == 8 and max(keys) < 16 <= min(values)
        assert values[keys.index(asked)] == value


def test_topics_that_are_held_out_are_not_trained_on():
    text, held_out, characters = sequences.load_text()
    assert (
        len(held_out) > 10 and 60 < characters < 200 and 0 < text.min() and text.max() < characters
    )
    whole = bytes(text.tolist())
    assert not any(bytes(one.tolist()) in whole for one in held_out)


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
        torch.testing.assert_close(model(other)[:, : t + 1], whole[:, : t + 1])
        assert not torch.equal(model(other)[:, t + 1 :], whole[:, t + 1 :])


def test_a_table_goes_on(tmp_path):
    table = tmp_path / "recall.csv"
    command = ["recall", str(table), "--kinds", "ea", "--updates", "4", "--seeds", "0"]
    sequences.main(command)
    kept = table.read_text()
    sequences.main([*command, "1"])
    assert table.read_text().startswith(kept) and len(table.read_text().splitlines()) == 1 + 2
