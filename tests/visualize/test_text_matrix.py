"""Matrices of text: maps of transformers' text models with tokens along both sides, blank where a mask hides."""

import numpy as np
import pytest
import torch
from matplotlib.image import AxesImage

import ea_vision
from ea_vision.visualize import plot_matrix
from tests.models.test_huggingface import create
from tests.recorder.networks import recorded
from tests.refused import refused

from .conftest import small, texts_of
from .test_layout import problems

WORDS = "the cat sat on the warm old mat".split()
IDS = torch.tensor([[5, 6, 7, 8, 5, 9, 10, 11]])


def shown(figure):
    """Return the maps of a figure, masked where they are blank, with the tokens of their rows and columns."""
    maps = []
    for image in figure.findobj(AxesImage):
        tokens = []
        for labels in (image.axes.get_yticklabels(), image.axes.get_xticklabels()):
            tokens.append([label.get_text() for label in labels])
        maps.append((np.ma.asarray(image.get_array()), *tokens))
    return maps


@pytest.mark.parametrize("name", ["Bert", "Roberta", "GPT2"])
def test_maps_of_text_have_the_tokens_at_both_sides(name):
    """In units of uniform attention over the keys that a query sees; later keys of causal attention are blank."""
    network = create(name, add_cross_attention=False)
    figure = plot_matrix(network, IDS, 2, 1, tokens=WORDS)
    [(values, rows, columns)] = shown(figure)
    assert rows == columns == WORDS
    attn = recorded(network, IDS)[2].attn[0, 1].numpy()
    seen = np.tri(8) if name == "GPT2" else np.ones((8, 8))
    assert np.array_equal(np.ma.getmaskarray(values), seen == 0)
    np.testing.assert_allclose(values.filled(0), attn * seen.sum(1, keepdims=True), rtol=1e-4)
    assert not problems(figure)


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_padding_is_blank(name):
    network = create(name, add_cross_attention=False)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    [(values, *_)] = shown(plot_matrix(network, {"input_ids": IDS, "attention_mask": mask}, 1))
    hidden = np.ma.getmaskarray(values)
    assert hidden[5:].all()
    assert hidden[:, 5:].all()
    assert not hidden[4, :5].any()


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_decoder_and_cross_attention(name):
    network = create(name, decoder_start_token_id=0)
    target = ["<s>", "die", "Katze"]
    by_length = {8: WORDS, 3: target}
    decoded = {"decoder_input_ids": torch.tensor([[0, 3, 4]])}
    inputs = {"input_ids": IDS, **decoded}
    sides = set()
    for number, layer in recorded(network, IDS, **decoded).items():
        figure = plot_matrix(network, inputs, number, 0, tokens=(WORDS, target))
        [(values, rows, columns)] = shown(figure)
        sides.add((len(rows), len(columns)))
        assert rows == by_length[len(rows)]
        assert columns == by_length[len(columns)]
        attn = layer.attn[0, 0].numpy()
        counts = (~np.ma.getmaskarray(values)).sum(-1, keepdims=True)
        np.testing.assert_allclose(values.filled(0), attn * counts, rtol=1e-4)
        [(alone, *_)] = shown(plot_matrix(layer, heads=0, tokens=(WORDS, target)))
        np.testing.assert_array_equal(alone, values)
    assert sides == {(8, 8), (3, 3), (3, 8)}
    assert shown(plot_matrix(network, IDS))  # the decoder has its start token


def test_a_string_with_its_tokenizer_and_an_evolving_network():
    class Tokenizer:
        def __call__(self, text, return_tensors):
            ids = torch.tensor([[5 + WORDS.index(word) for word in text.split()]])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def convert_ids_to_tokens(self, ids):
            return [WORDS[number - 5] for number in ids]

    network = ea_vision.evolve(create("Bert", num_hidden_layers=2), "ea")
    figure = plot_matrix(network, " ".join(WORDS), processor=Tokenizer(), width=3.3)
    assert [rows for _, rows, _ in shown(figure)] == [WORDS] * 2
    assert not problems(figure)
    assert shown(plot_matrix(network, IDS, 2, part="logits"))
    with refused("a text needs its tokenizer"):
        plot_matrix(network, "the cat")


def test_long_texts_fit_a_page():
    network = create("Bert", max_position_embeddings=200, num_hidden_layers=2)
    figure = plot_matrix(network, torch.arange(200)[None] % 32, width=3.3)
    assert not problems(figure)
    width, height = figure.get_size_inches()
    assert width == pytest.approx(3.3)
    assert height <= 9
    assert len(shown(figure)) == 2 or "1 of 2 layers" in texts_of(figure)


@pytest.mark.parametrize(
    "image, options, message",
    [
        (IDS, {"tokens": WORDS[:3]}, "has 8 queries: as many tokens are required, got 3"),
        (IDS.repeat(2, 1), {}, "one text is required, got 2"),
        (IDS, {"layers": 9}, "no attention layer '9'"),
    ],
)
def test_refusals(image, options, message):
    with refused(message):
        plot_matrix(create("Bert"), image, **options)


def test_tokens_of_an_image_are_refused_and_a_layer_of_it_is_drawn():
    network = small()
    with refused("tokens belong to a text"):
        plot_matrix(network, torch.rand(3, 16, 16), tokens=WORDS)
    maps = recorded(network, torch.rand(1, 3, 16, 16))
    [(values, rows, _)] = shown(plot_matrix(maps[1], heads=2))
    np.testing.assert_allclose(values, 16 * maps[1].attn[0, 2], rtol=1e-4)
    assert rows[0] == "0"


def test_heads_of_a_recorded_layer_keep_their_numbers():
    network = create("Bert")
    everything = recorded(network, IDS)[1].attn[0]
    maps = recorded(network, IDS, layers=1, heads=[3, 1])
    figure = plot_matrix(maps[1])
    for (values, _, _), head in zip(shown(figure), (3, 1), strict=True):
        np.testing.assert_allclose(values, 8 * everything[head], rtol=1e-5)
    texts = texts_of(figure)
    assert "head 3" in texts
    assert "head 1" in texts
    with refused("heads .* 3, 1, .*got '2'"):
        plot_matrix(maps[1], heads=2)
