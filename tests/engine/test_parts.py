"""Parts of a network that are not trained, and what its images were normalised with."""
import pytest
import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.networks import image_statistics
from ea_vision.engine import run_folder, train_cifar
from ea_vision.engine.command import freeze
from tests.engine.runner import arguments, weights_of

ONCE = "--recipe none --epochs 1"


@pytest.mark.parametrize("more, trained", [
    ("--linear-probe", {"fc.weight", "fc.bias"}),
    ("--freeze conv1,bn1,layer1", {"layer4.0.conv1.weight", "layer4.0.bn1.running_mean"}),
])
def test_frozen_parts_stay_as_they_began_statistics_included(data, tmp_path, more, trained):
    first = tmp_path / "first"
    assert train_cifar.main(arguments(data, first, ONCE, "--mean 0.1 0.2 0.3 --std 0.4 0.5 0.6")) == 0
    begun, second = weights_of(first), tmp_path / "second"
    argv = arguments(data, second, ONCE, f"--pretrained-path {first}", more)
    assert train_cifar.main(argv) == 0
    changed = {name for name, value in weights_of(second).items() if not torch.equal(value, begun[name])}
    assert trained <= changed
    assert not [name for name in changed if name.startswith(("conv1.", "bn1.", "layer1."))]
    assert len(changed) == len(trained) or "freeze" in more
    _, about = run_folder.read_config(second)
    assert about["mean"] == [0.1, 0.2, 0.3] and about["std"] == [0.4, 0.5, 0.6], "of the first run"
    assert image_statistics(run_folder.load_run(second)[0]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert train_cifar.main(argv) == 0, "the same command finds it complete"


def test_names_that_no_part_has():
    with pytest.raises(UsageError, match="freeze: the model has no 'layer9'; did you mean layer"):
        freeze(timm.create_model("test_resnet"), ["layer9"], False)
