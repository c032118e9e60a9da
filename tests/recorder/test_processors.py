"""Images are prepared like a model's image processor does it."""

import timm
import torch
import transformers
from PIL import Image

import ea_vision
from ea_vision.zoo.inputs import as_image
from ea_vision.zoo.loaded import as_loaded
from tests.recorder.networks import photo, torchvision_vit, transformers_model
from tests.refused import refused

SQUASHED = transformers.ViTImageProcessor(size={"height": 32, "width": 32})


def saved(tmp_path, processor):
    """Save a model and its processor in a folder; return the model loaded from there."""
    transformers_model("ViT").save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    return transformers.ViTModel.from_pretrained(tmp_path).eval()


def test_images_are_those_of_the_processor(tmp_path):
    image = photo()
    expected = SQUASHED(image, return_tensors="pt")["pixel_values"][0]
    beside_the_weights = as_loaded(saved(tmp_path, SQUASHED), "ViT")
    from_instance = as_loaded(transformers_model("ViT"), "ViT", processor=SQUASHED)
    from_path = as_loaded(transformers_model("ViT"), "ViT", processor=str(tmp_path))
    for loaded in (beside_the_weights, from_instance, from_path):
        assert torch.equal(loaded.input_of(as_image(image)), expected)
        assert torch.equal(ea_vision.preprocess(loaded, image)[0], expected)


def test_a_processors_tensor_stays_as_it_is(tmp_path):
    loaded = as_loaded(saved(tmp_path, SQUASHED), "ViT")
    features = SQUASHED(photo(), return_tensors="pt")
    expected = features["pixel_values"]
    for image in (features, expected, expected[0], SQUASHED(photo())):
        assert torch.equal(loaded.input_of(as_image(image)), expected[0])
    white = SQUASHED(Image.new("RGB", (40, 40), "white"), return_tensors="pt")
    assert (loaded.shown(loaded.input_of(white)) == 1).all()
    with refused("pixel_values are required, got input_ids"):
        loaded.input_of({"input_ids": expected})
    with refused("normalised by the model's mean and std, got torch.float32"):
        loaded.input_of({"pixel_values": 3 * expected})


def test_mean_and_std_by_hand():
    loaded = as_loaded(torchvision_vit(), "vit", mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2))
    black = loaded.preparation.normalize(torch.zeros(3, 32, 32))[:, 0, 0]
    torch.testing.assert_close(black, torch.tensor([-0.2, -0.2, -0.15]))
    alike = as_loaded(torchvision_vit(), "vit", mean=[0.5], std=[0.25])  # as timm takes them
    assert alike.preparation.mean == (0.5, 0.5, 0.5)
    assert alike.preparation.std == (0.25, 0.25, 0.25)
    three = "must be three numbers, one per channel"
    for wrong, message in (
        ({"mean": (0.1, 0.2)}, three),
        ({"mean": 0.5}, three),
        ({"mean": "mean"}, three),
        ({"mean": "5"}, three),
        ({"std": (0.0, 1.0, 1.0)}, three),
        ({"processor": 3}, "image processor of transformers, its path or its name, got int"),
        ({"processor": "nowhere/at/all"}, "no image processor at 'nowhere/at/all'"),
    ):
        with refused(message):
            as_loaded(torchvision_vit(), "vit", **wrong)


def test_a_guessed_mean_is_said_once(tmp_path, caplog):
    guessed = "vit does not say how its images are normalised: ImageNet's mean and std are used"
    loaded = as_loaded(torchvision_vit(), "vit")
    assert caplog.text.count(guessed) == 1
    assert "at {}x{} pixels".format(*loaded.img_size) in caplog.text
    caplog.clear()
    as_loaded(torchvision_vit(), "vit", mean=(0.5,) * 3, std=(0.5,) * 3)
    as_loaded(timm.create_model("test_vit"), "vit")
    as_loaded(saved(tmp_path, SQUASHED), "vit")
    assert not caplog.text
