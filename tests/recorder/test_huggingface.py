"""Recorded maps of transformers' detection and segmentation models equal the attentions that the models return.

`python -m tests.recorder.test_huggingface` prints the table of docs/record.md.
"""

import re

import pytest
import torch
import transformers
from torch.testing import assert_close

from ea_vision import record_attention
from tests.models import test_huggingface as huggingface
from tests.process import ROOT
from tests.refused import refused

LAYERS = dict(encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
HEADS = dict(encoder_attention_heads=4, decoder_attention_heads=4)
BACKBONE = dict(
    embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic"
)
LEVELS = ["stage2", "stage3", "stage4"]
DETR = dict(LAYERS, **HEADS, d_model=32, num_queries=5)
RT_DETR = dict(
    DETR,
    encoder_layers=1,
    encoder_hidden_dim=32,
    encoder_in_channels=[16, 24, 32],
    feat_strides=[8, 16, 32],
    decoder_in_channels=[32, 32, 32],
)
SAM = dict(
    vision_config=dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        output_channels=16,
        window_size=4,
        global_attn_indexes=[1],
        mlp_dim=32,
        num_pos_feats=8,
    ),
    prompt_encoder_config=dict(hidden_size=16, image_size=64, patch_size=8),
    mask_decoder_config=dict(
        hidden_size=16, mlp_dim=32, num_hidden_layers=2, num_attention_heads=4
    ),
)
MASK2FORMER = dict(
    feature_size=32,
    mask_feature_size=32,
    hidden_dim=32,
    encoder_feedforward_dim=32,
    encoder_layers=1,
    decoder_layers=2,
    num_attention_heads=4,
    dim_feedforward=32,
    num_queries=5,
)
# class of the model without "Model", its configuration, its backbone's, its stages; and how many maps the model itself
# gives: not SAM's, nor deformable attention
NETWORKS = {
    "DETR": ("Detr", DETR, "ResNet", ["stage4"], 6),
    "Conditional DETR": ("ConditionalDetr", DETR, "ResNet", ["stage4"], 6),
    "Table Transformer": ("TableTransformer", DETR, "ResNet", ["stage4"], 6),
    "Deformable DETR": ("DeformableDetr", dict(DETR, num_feature_levels=3), "ResNet", LEVELS, 2),
    "RT-DETR": ("RTDetr", RT_DETR, "RTDetrResNet", LEVELS, 3),
    "SAM": ("Sam", SAM, None, None, 0),
    "Mask2Former": ("Mask2Former", MASK2FORMER, "Swin", None, 1),
    "CLIP, text": ("CLIPText", {}, None, None, 3),
}


def create(name):
    family, options, backbone, stages, _ = NETWORKS[name]
    options = dict(options)
    if backbone == "Swin":
        sizes = dict(image_size=64, embed_dim=16, depths=[1] * 4, num_heads=[2] * 4, window_size=4)
        stages = ["stage1", *LEVELS]
        options["backbone_config"] = transformers.SwinConfig(**sizes, out_features=stages)
    elif backbone is not None:
        config = getattr(transformers, f"{backbone}Config")(**BACKBONE, out_features=stages)
        options |= dict(backbone_config=config, backbone=None)
        options |= dict(use_timm_backbone=False, use_pretrained_backbone=False)
    return huggingface.create(family, **options)


def inputs_of(name):
    torch.manual_seed(1)
    if name == "CLIP, text":
        return {"input_ids": torch.randint(3, 50, (2, 7))}
    if name == "SAM":
        points = torch.tensor([[[[10.0, 20.0]]]])
        return {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": points}
    return {"pixel_values": torch.randn(2, 3, 64, 64 if name == "Mask2Former" else 96)}


def given_maps(output):
    """Return the maps (B, K, queries, keys) in a model's output."""
    maps = []
    for name in output:
        if name.endswith("attentions"):
            maps += output[name] or ()
    return [attn for attn in maps if attn is not None and attn.ndim == 4 and attn.shape[1] == 4]


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_maps_are_those_that_the_model_gives(name):
    model = create(name)
    inputs = inputs_of(name)
    expected = model(**inputs)[0]
    with record_attention(model) as maps:
        assert torch.equal(model(**inputs)[0], expected)
    recorded = [layer.attn for layer in maps.values()]
    for layer in maps.values():
        if layer.layout.windows is None:  # windows at the border look at padding, too
            sums = layer.attn.sum(-1)
            assert_close(sums, torch.ones_like(sums))
    model.set_attn_implementation("eager")
    expected_maps = given_maps(model(**inputs, output_attentions=True))
    assert len(expected_maps) == NETWORKS[name][-1]
    for attn in expected_maps:
        alike = [other for other in recorded if other.shape == attn.shape]
        assert any(torch.allclose(other, attn, atol=1e-5) for other in alike)


@torch.no_grad()
def test_object_queries_look_at_places_of_the_image():
    model = create("DETR")
    with record_attention(model) as maps:
        model(**inputs_of("DETR"))
    encoder = maps["encoder.layers.0.self_attn"]
    across = maps["decoder.layers.0.encoder_attn"]
    assert encoder.feat_size == (2, 3)
    assert across.attn.shape == (2, 4, 5, 6)
    assert across.layout.key_size == (2, 3)
    assert across.layout.query_names == ("query1", "query2", "query3", "query4", "query5")
    assert_close(across.attn.sum(-1), torch.ones(2, 4, 5))
    with record_attention(model, "decoder.layers.0.encoder_attn", heads=3) as chosen:
        model(**inputs_of("DETR"))
    assert torch.equal(chosen["decoder.layers.0.encoder_attn"].attn[:, 0], across.attn[:, 3])
    with (
        refused(r"heads of layer .* are 0 to 3; got \[4\]", ValueError),
        record_attention(model, heads=4),
    ):
        model(**inputs_of("DETR"))
    for query in ("query3", "token3"):
        assert torch.equal(across.of_query(query)[1], across.attn[:, :, 2].unflatten(-1, (2, 3)))


def table():
    """Return the lines of the table in docs/record.md: the recorded layers of each model."""
    lines = ["| transformers' model | recorded layers |", "| --- | --- |"]
    for name in NETWORKS:
        model = create(name)
        with torch.no_grad(), record_attention(model) as maps:
            model(**inputs_of(name))
        names = [re.sub(r"\.\d+(?=\.)", "", maps[number].name) for number in maps]
        kinds = "`, `".join(dict.fromkeys(names))
        lines.append(f"| {name} | `{kinds}` |")
    return lines


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page


if __name__ == "__main__":
    print(*table(), sep="\n")
