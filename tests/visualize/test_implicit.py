"""The figure of the input Jacobian."""

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import transformers

from ea_vision.predict import predict
from ea_vision.visualize import input_jacobian, plot_heads, plot_jacobian, plot_statistics
from ea_vision.zoo.loaded import as_model
from tests.recorder.networks import lively, transformers_model
from tests.refused import refused

from .conftest import PHOTO, maps_of, small, texts_of


class NoGradients(torch.nn.Module):
    """Like a network in an ONNX file."""

    def forward(self, images):
        return images.detach().flatten(1)


def test_the_jacobian_of_transformers_models():
    backbone = transformers_model("ViT")
    classifier = transformers.ViTForImageClassification(backbone.config)
    assert "how much each pixel moves its logit" in texts_of(plot_jacobian(classifier, PHOTO))
    with refused("classif.*ViTModel"):
        plot_jacobian(backbone, PHOTO)


def test_the_jacobian_is_the_differences_quotient():
    model = small("conv_transformer_cifar").double()
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    jacobian, chosen = input_jacobian(model, x)
    assert chosen == model(x).argmax()
    assert jacobian.shape == (32, 32)
    row, column = divmod(int(jacobian.argmax()), 32)
    # a step of each channel, at the strongest pixel
    steps = torch.zeros(3, 3, 32, 32, dtype=torch.float64)
    steps[range(3), range(3), row, column] = 1e-6
    slopes = (model(x + steps) - model(x - steps))[:, chosen] / 2e-6
    steepest = slopes.abs().max().item()
    assert steepest == pytest.approx(jacobian.max().item(), rel=1e-4)
    with torch.inference_mode():  # of a caller
        again, _ = input_jacobian(model, x)
    torch.testing.assert_close(again, jacobian)
    with refused("with gradients is required, got NoGradients"):
        input_jacobian(NoGradients(), x)
    with refused("between 0 and 2, got .3"):
        input_jacobian(model, x, 3)


def convit():
    """Its first layer forms several maps, none of which is the layer's attention, and caches the patches' distances."""
    options = {"embed_dim": 12, "depth": 2, "local_up_to_layer": 1}
    return timm.create_model("convit_tiny", num_classes=3, **options)


def test_the_jacobian_needs_no_maps(caplog):
    model = convit()
    figure = plot_jacobian(model, torch.rand(3, 224, 224))
    assert "how much each pixel moves its logit" in texts_of(figure)
    assert "attention that every pixel gets" not in texts_of(figure)
    assert "without attention maps: convit_tiny" in caplog.text
    with refused("forms several"):
        plot_jacobian(model, torch.rand(3, 224, 224), layers=1)


@pytest.mark.parametrize(
    "look",
    [
        lambda model, image: plot_heads(model, image, 2),
        plot_jacobian,
        lambda model, image: plot_statistics(model, [image], 2),
        lambda model, image: list(predict(as_model(model), [image])),
    ],
    ids=["heads", "jacobian", "statistics", "predictions"],
)
def test_a_network_that_was_looked_at_trains_on(look):
    model = convit()
    image = torch.rand(3, 224, 224)
    look(model, image)
    model(image[None]).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_jacobian_lies_on_what_the_patches_cover():
    """Patches of 8 pixels do not cover all of 30x39 pixels; the network still takes the whole image."""
    config = transformers_model("Dinov2").config
    model = as_model(lively(transformers.Dinov2ForImageClassification(config)))
    model.preparation = replace(model.preparation, size=(30, 39))
    batch = model.batch_of([model.input_of(PHOTO)])
    jacobian, _ = input_jacobian(model.model, batch)
    figure = plot_jacobian(model, PHOTO)
    drawn = [values for values in maps_of(figure) if values.shape == (24, 32)]
    np.testing.assert_allclose(drawn[0], jacobian[:24, :32], rtol=1e-5)
    assert not jacobian[24:].any()


@pytest.mark.parametrize("name, panels", [("csan_conv_transformer_cifar", 8), ("cnn_cifar", 2)])
def test_the_jacobian_stands_beside_the_maps(name, panels):
    """For a chosen class, on the image that the network sees, in evaluation mode."""
    model = timm.create_model(name, widths=(8, 8, 16, 16), num_classes=4)
    image = torch.rand(3, 32, 32)
    figure = plot_jacobian(model, image, target=2)
    shown = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert len(shown) == panels
    assert shown[1].get_title() == "|d class 2 / d input|"
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    x = as_model(model).preparation.normalize(image[None])
    expected, _ = input_jacobian(model.eval(), x, 2)
    np.testing.assert_allclose(shown[1].images[-1].get_array(), expected, rtol=1e-5, atol=1e-7)
