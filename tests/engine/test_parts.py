"""Parts of a network that are not trained, and what its images were normalised with."""
import pytest
import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.networks import image_statistics
from ea_vision.engine import run_folder, train_cifar
from ea_vision.engine.command import freeze
from tests.engine.runner import weights_of, words


def arguments(data, output, *more):
    return words(f"--data-dir {data} --recipe none --model test_resnet --img-size 16 --epochs 1 --batch-size 8",
                 f"--device cpu --output {output}", *more)


@pytest.mark.parametrize("more, trained", [
    ("--linear-probe", {"fc.weight", "fc.bias"}),
    ("--freeze conv1,bn1,layer1", None),
])
def test_frozen_parts_stay_as_they_began_statistics_included(data, tmp_path, more, trained):
    first = tmp_path / "first"
    assert train_cifar.main(arguments(data, first, "--mean 0.1 0.2 0.3 --std 0.4 0.5 0.6")) == 0
    begun = weights_of(first)
    second = tmp_path / "second"
    argv = arguments(data, second, f"--pretrained-path {first}", more)
    assert train_cifar.main(argv) == 0
    ended = weights_of(second)
    changed = {name for name, value in ended.items() if not torch.equal(value, begun[name])}
    if trained is not None:
        assert changed == trained
    else:
        assert not [name for name in changed if name.startswith(("conv1.", "bn1.", "layer1."))]
        assert any("running_mean" in name for name in changed) and "layer4.0.conv1.weight" in changed
    _, about = run_folder.read_config(second)
    assert about["mean"] == [0.1, 0.2, 0.3] and about["std"] == [0.4, 0.5, 0.6], "of the first run"
    assert image_statistics(run_folder.load_run(second)[0]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert train_cifar.main(argv) == 0, "the same command finds it complete"


def test_names_that_no_part_has():
    with pytest.raises(UsageError, match="freeze: the model has no 'layer9'; did you mean layer"):
        freeze(timm.create_model("test_resnet"), ["layer9"], False)
