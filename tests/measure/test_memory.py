"""The prediction of memory against counts of what autograd really keeps, by batch, precision, checkpointing and way."""
import pytest
import timm
import torch

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.detection.model import create_detector
from ea_vision.detection.train import DetectionTrainer
from ea_vision.engine.evaluate import autocast
from ea_vision.engine.preflight import loss_on_noise
from ea_vision.measure import memory
from ea_vision.measure.memory import DetectorPrediction, Prediction, to_bytes, watch_step
from ea_vision.ops import use_implementation

CPU = torch.device("cpu")
WIDTHS = {"widths": (16, 32, 64, 64)}  # a narrow network for 32 pixels: maps 3 x (8x8), 3 x (4x4), 4 heads


def small(name="ea_conv_transformer_cifar", **kwargs):
    return timm.create_model(name, **WIDTHS, **kwargs)


def counted(model, batch_size, amp="none", side=32, loss_of=loss_on_noise):
    """Bytes that saved_tensors_hooks sees, over unique storages, weights apart."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    images = torch.randn(batch_size, 3, side, side)
    own.add(images.untyped_storage().data_ptr())
    seen = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(amp, CPU):
        loss = loss_of(model.train(), images)
    total = sum(seen.values())
    del loss
    return total


@pytest.mark.parametrize("amp", ["none", "bfloat16"])
@pytest.mark.parametrize("name", ["ea_conv_transformer_cifar", "cnn_cifar"])
def test_activations_are_those_that_autograd_keeps(name, amp):
    model = small(name)
    prediction = Prediction(model, 32, amp)
    assert prediction.activations(7) == pytest.approx(counted(model, 7, amp), rel=0.02)


def test_peak_of_another_batch_is_that_of_a_watched_step():
    model = small()
    prediction, step = Prediction(model, 32), watch_step(model, 9, 32, "none", CPU, torch.contiguous_format)
    alive = [step.size[(step.birth <= moment) & (step.death > moment)].sum() for moment in range(step.birth.max() + 1)]
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    momentum = sum(p.nbytes for p in model.parameters())
    assert prediction.peak(9) == max(alive) + weights + momentum + step.images
    parts = prediction.parts(9)
    assert sum(parts.values()) == 2 * parts["peak"] + parts["maps"] and 0 < parts["maps"]
    assert step.size[step.is_grad].sum() == momentum, "a gradient for every weight"


@pytest.mark.parametrize("amp, bytes_a_number", [("none", 4), ("bfloat16", 2)])
def test_a_chained_layer_keeps_one_map(amp, bytes_a_number):
    model = small()
    maps = [bytes_a_number * 5 * 4 * side**4 for side in (8, 4)]  # of 5 images, 4 heads
    assert sorted(Prediction(model, 32, amp).map_sizes(5)) == 2 * [maps[1]] + 2 * [maps[0]]  # 3 + 3 layers, 2 chains
    with use_implementation("reference"):
        assert sum(Prediction(model, 32, amp).map_sizes(5)) > 2 * 2 * sum(maps)


@pytest.mark.parametrize("grad_checkpointing", [False, True])
def test_maps_of_32x32_pixels_are_kept_once_a_layer(grad_checkpointing):
    model = timm.create_model("ea_aa_wrn28_10_cifar", depth=16, width=1)  # chains of two layers at 32, 16 and 8 pixels
    model.set_grad_checkpointing(grad_checkpointing)
    prediction = Prediction(model, 32)
    assert sorted(prediction.map_sizes(3), reverse=True) == [4 * 3 * 8 * side**4 for side in (32, 16, 8)]
    assert prediction.activations(3) == pytest.approx(counted(model, 3), rel=0.02) or grad_checkpointing


def test_unchained_layers_keep_none():
    assert Prediction(small("conv_transformer_cifar"), 32).map_sizes(5) == []


@pytest.mark.parametrize("options", [dict(alpha=0.5, beta=1.0), dict()])
def test_an_evolving_transformer_keeps_one_map_a_block(options):
    """All blocks but the last hand theirs on, which keeps its own; and timm's plain one, unfused, two of each."""
    size = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3)
    model = timm.create_model("ea_vit_tiny_patch16_224", **options, **size)
    prediction = Prediction(model, 32)
    assert prediction.activations(7) == pytest.approx(counted(model, 7), rel=0.02)
    assert prediction.map_sizes(5) == 3 * [4 * 5 * 3 * 17**2]
    plain = timm.create_model("vit_tiny_patch16_224", **size)
    assert Prediction(plain, 32).map_sizes(5) == []
    for block in plain.blocks:
        block.attn.fused_attn = False
    assert set(Prediction(plain, 32).map_sizes(5)) == {4 * 5 * 3 * 17**2}


def test_checkpointing_lowers_the_peak_and_keeps_the_chain():
    model = small()
    plain = Prediction(model, 32)
    model.set_grad_checkpointing(True)
    lower = Prediction(model, 32)
    assert lower.peak(16) < 0.7 * plain.peak(16)
    assert len(lower.map_sizes(1)) == 4, "a block's input: the previous block's map"


def test_largest_batch_is_the_last_within_the_budget():
    prediction = Prediction(small(), 32)
    budget = 300 * 2**20
    largest = prediction.largest_batch(budget)
    assert prediction.peak(largest) <= budget < prediction.peak(largest + 1)
    assert prediction.largest_batch(2**20) == 0


def test_units():
    assert [to_bytes(text) for text in ("16GiB", "1.5 gb", "500MB")] == [16 * 2**30, 15 * 10**8, 5 * 10**8]
    for text in ("16", "GiB", "0GiB", "-1GiB"):
        with pytest.raises(UsageError, match="--budget must be a positive number with a unit"):
            to_bytes(text)


def test_command(capsys):
    assert memory.main(["ea_conv_transformer_cifar", "--img-size", "32", "--device", "cpu", "--budget", "1GiB"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("ea_conv_transformer_cifar, batch 32, 32 pixels, float32, sgd, on cpu")
    assert "4 attention maps, 0.1 MiB an image" in out[-2] and out[-1].startswith("largest batch within 1.00 GiB: ")


@pytest.mark.parametrize("argv, message", [
    (["ea_resnet50"], "unknown model 'ea_resnet50'"),
    (["cnn_cifar", "--batch-size", "0"], "--batch-size must be 1 or more, got 0"),
    (["cnn_cifar", "--budget", "many"], "got 'many'"),
    (["halonet26t", "--img-size", "32"], "halonet26t cannot run images of 32 pixels: AssertionError"),
    (["lambda_resnet26t", "--img-size", "64", "--grad-checkpointing", "--implementation", "triton"], ""),
])
def test_bad_input(argv, message, capsys):
    code = exit_code(lambda: memory.main([*argv, "--device", "cpu"]))
    assert code == (2 if message else 0)
    assert message in capsys.readouterr().err


def test_a_detectors_memory():
    detector = create_detector("aa_resnet34", num_classes=3, img_size=128, fpn_channels=32, head_convs=1,
                               layers=(1, 1, 1, 1))
    two = DetectorPrediction(detector, 128, 2)
    truth = counted(detector, 2, side=128, loss_of=DetectionTrainer.loss_on_noise)
    assert two.activations(2) == pytest.approx(truth, rel=0.05)
    three = DetectorPrediction(detector, 128, 3)
    assert two.peak(3) == pytest.approx(three.parts(3)["peak"], rel=1e-3)
    parts = two.parts(2)
    assert sum(parts.values()) == 2 * parts["peak"] + parts["maps"]
    assert two.largest_batch(three.peak(5) + 1) == 5 and two.largest_batch(two.peak(1) / 2) == 0
