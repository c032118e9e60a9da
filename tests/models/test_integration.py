"""What users do with a timm model: compile, export, save and load, run in half precision."""

import pytest
import timm
import torch
from timm.models import save_for_hf

from ea_vision.models import get_network
from tests.models.zoo import FAMILIES, assert_compiles_and_exports, lively, sample, shrunk
from tests.slow import slow_but

KINDS = list(dict.fromkeys([*FAMILIES, "pa_aa_resnet50"]))


@pytest.mark.parametrize("name", slow_but({"ea_conv_transformer_cifar"}, KINDS))
def test_compiles_in_one_graph_once_and_exports_with_any_batch_size(name):
    assert_compiles_and_exports(lively(name, num_classes=5).eval(), sample(name))


@pytest.mark.parametrize("name", KINDS)
def test_saved_for_the_hub_loads_from_a_folder(name, tmp_path):
    options = dict(alpha=0.25) if get_network(name).kwargs.get("evolution") else {}
    model = lively(name, num_classes=5, **options).eval()
    arguments = {**options, **shrunk(name), "num_classes": 5}
    save_for_hf(model, tmp_path, model_config=dict(num_classes=5), model_args=arguments)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = sample(name)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inference(name, dtype):
    model = lively(name, num_classes=5).eval()
    x = sample(name)[:, :, ::2, ::2]  # small, since a CPU may convolve float16 number by number
    with torch.no_grad():
        expected = model(x)
        got = model.to(dtype)(x.to(dtype))
    assert got.dtype == dtype
    difference = got.float() - expected
    assert difference.norm() < 0.1 * expected.norm()
