"""What others do with a timm model: compile, export, save and load, detect objects."""
import copy
import functools

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn
from torch._dynamo.testing import CompileCounter

from ea_vision.models import get_network
from tests.models.zoo import FAMILIES, lively, shrunk, side
from tests.slow import slow_but

KINDS = list(dict.fromkeys([*FAMILIES, "pa_aa_resnet50"]))


@pytest.mark.parametrize("name", slow_but({"ea_conv_transformer_cifar"}, KINDS))
def test_compiles_in_one_graph_once(name):
    counter = CompileCounter()
    model = lively(name, num_classes=5).eval()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3, side(name), side(name))
            torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1
    torch._dynamo.reset()


@functools.cache
def exported(name: str) -> tuple:
    """A network, its program, and a batch of another size than the one it was exported with."""
    model = lively(name, num_classes=5).eval()
    x = torch.randn(2, 3, side(name), side(name))
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    return model, program, torch.randn(5, *x.shape[1:])


@pytest.mark.parametrize("name", slow_but({"ea_conv_transformer_cifar"}, FAMILIES))
def test_exports_with_any_batch_size(name):
    model, program, other = exported(name)
    torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.slow  # tests/deployment has a shorter one
@pytest.mark.parametrize("name", FAMILIES)
def test_onnx_agrees_with_any_batch_size(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    model, program, other = exported(name)
    path = tmp_path / "model.onnx"
    torch.onnx.export(program, (), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (result,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), model(other), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_saved_for_the_hub_loads_from_a_folder(name, tmp_path):
    options = dict(alpha=0.25) if get_network(name).kwargs.get("evolution") else {}
    model = lively(name, num_classes=5, **options).eval()
    save_for_hf(model, tmp_path, model_config=dict(num_classes=5), model_args={**options, **shrunk(name),
                                                                              "num_classes": 5})
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(1, 3, side(name), side(name))
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inference(name, dtype):
    model = lively(name, num_classes=5).eval()
    x = torch.randn(2, 3, side(name), side(name))
    with torch.no_grad():
        expected = model(x)
        got = model.to(dtype)(x.to(dtype))
    assert got.dtype == dtype and (got.float() - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", KINDS)
def test_linear_layers_in_int8(name):
    model = lively(name, num_classes=5).eval()
    x = torch.randn(2, 3, side(name), side(name))
    small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected, got = model(x), small(x)
    assert not isinstance(small.get_classifier(), nn.Linear)
    assert (got - expected).norm() < 0.05 * expected.norm()
