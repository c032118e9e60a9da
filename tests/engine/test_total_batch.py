"""A recipe means the same update on any number of processes, and a run may go on with another number of them."""
import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from ea_vision.base.errors import UsageError
from ea_vision.engine import run_folder
from ea_vision.engine.preflight import describe_update
from ea_vision.engine.train import Trainer
from tests.engine.recipes import resolved
from tests.engine.runner import GN_MODEL, SignalAfterUpdate, arguments, around, saved, train


def test_who_can_share_is_named():
    config = resolved("imagenet")
    with pytest.raises(UsageError, match="256 cannot be shared by 3 processes: 255 or 258 can"):
        config.for_processes(3)
    with pytest.raises(UsageError, match="by 300 processes: 300 can"):
        config.for_processes(300)


def test_mixed_batches_are_even_and_small_ones_are_warned_of(caplog):
    """An odd batch would lose an image to mixup, which takes pairs."""
    mixed = resolved("none", total_batch=1026, batch_size=128, mixup=0.2)
    with pytest.raises(UsageError, match="by 2 processes in pairs, .*: 1024 or 1028 can"):
        mixed.for_processes(2)
    assert all(mixed.for_processes(processes).batch_size % 2 == 0 for processes in (1, 3))
    resolved("rsb_a3").for_processes(8)
    assert not caplog.messages
    odd = resolved("none", total_batch=514, batch_size=128).for_processes(2)
    assert (odd.batch_size, odd.grad_accum_steps) == (1, 257)
    assert caplog.messages[-1] == ("total_batch 514 on 2 processes is made of batches of 1, far below batch_size 128: "
                                   "512 or 768 is made of full ones")


def test_a_batch_size_that_is_given_stays_a_process_and_the_run_says_what_the_recipe_means():
    config = resolved("imagenet", batch_size=64).for_processes(2)
    assert (config.batch_size, config.grad_accum_steps, config.total_batch) == (64, 1, 0)
    assert describe_update(config, 2, has_norms=True) == (
        "128 images = 64 x 2 processes, peak learning rate 0.064; recipe imagenet means 256 images, rate 0.128; "
        "BatchNorm sees 64 images a process, the recipe's has 32")
    both = resolved("imagenet", batch_size=64, total_batch=256).for_processes(1)
    assert (both.batch_size, both.grad_accum_steps) == (64, 4) and "recipe" not in describe_update(both, 1)


@pytest.mark.parametrize("opt, power", [("lamb", 0.5), ("adamw", 0.5), ("adafactor", 0.5), ("momentum", 1),
                                        ("rmsproptf", 1)])
def test_rates_scale_as_timms_do(opt, power):
    """timm's train.py: square root for what has ada or lamb in its name, else linear."""
    config = resolved("none", opt=opt, lr=0.01, lr_base_size=256, batch_size=1024)
    assert config.peak_lr(1024) == pytest.approx(0.01 * 4**power)


def log_ids(folder: Path, stop_after: int = 0) -> None:
    """Write the ids of every update to a file of its process; perhaps end in the middle."""
    folder.mkdir(exist_ok=True)

    def watched(update, trainer, batches):
        with open(folder / f"{trainer.world.rank}-of-{trainer.world.size}", "a") as file:
            file.write(json.dumps([trainer.progress.epoch, torch.cat([batch[2] for batch in batches]).tolist()]) + "\n")
        return update(trainer, batches)

    around(Trainer, "_update", watched)
    if stop_after:
        SignalAfterUpdate(signal.SIGTERM, stop_after)()


SHARED = [*GN_MODEL, "--total-batch 8 --batch-size 2 --lr 0.002 --clip-grad 1"]  # small steps
STOPPED = 128 + signal.SIGTERM


def test_stopped_on_two_continued_on_one_and_back_inside_an_epoch(data, tmp_path):
    """Five updates an epoch: two on two processes, two on one, the rest on two; each image once in an epoch, and the
    weights of one process alone, four batches an update. Without BatchNorm, whose statistics are of a batch of two
    either way, but of other pairs."""
    alone, folder, ids = tmp_path / "alone", tmp_path / "run", tmp_path / "ids"
    assert "8 images = 2 x 1 processes x 4 batches" in train(arguments(data, alone, *SHARED))
    argv = arguments(data, folder, *SHARED, "--checkpoint-steps 1")
    assert "8 images = 2 x 2 processes x 2 batches" in train(argv, partial(log_ids, ids, 2), size=2, code=STOPPED)
    assert run_folder.read_config(folder)[1]["processes"] == 2
    train(argv, partial(log_ids, ids, 2), code=STOPPED)
    assert saved(folder)["progress"]["step"] not in (0, 5)
    train(argv, partial(log_ids, ids), size=2)
    assert {path.name for path in ids.iterdir()} == {"0-of-1", "0-of-2", "1-of-2"}
    made = [json.loads(line) for path in ids.iterdir() for line in path.read_text().splitlines()]
    for epoch in (0, 1):
        images = [i for of, images in made for i in images if of == epoch]
        assert sorted(images) == list(range(40)), "each image once"
    first, second = (saved(path)["model"] for path in (alone, folder))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    refused = train(arguments(data, alone, *SHARED, "--total-batch 4"), code=2)
    assert "the images of an update (batch_size x grad_accum_steps x processes) were 8, got 4" in refused
