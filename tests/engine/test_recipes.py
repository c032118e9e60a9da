"""Recipes have the papers' values, and give the same update on any number of processes."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import timm

from ea_vision.engine.config import load_recipe, recipe_names
from ea_vision.engine.preflight import left_out, preflight
from tests.engine.recipes import resolved
from tests.engine.runner import make_trainer
from tests.refused import refused

# ResNet strikes back (https://arxiv.org/abs/2110.00476), table 2; interpolation, sizes and the crop are those of timm's
# weights. No file of timm's arguments was found: min_lr is mmpretrain's (imagenet_bs2048_rsb.py), bce_target_thresh has
# no source but others' commands for timm's train.py. FFCV's configuration files. The PA paper.
RSB = {
    "opt": "lamb",
    "lr": 5e-3,
    "sched": "cosine",
    "warmup_epochs": 5,
    "min_lr": 1e-6,
    "cutmix": 1.0,
    "bce_loss": True,
    "bce_target_thresh": 0.2,
    "reprob": 0.0,
    "hflip": 0.5,
    "crop_scale": 0.08,
    "smoothing": 0.0,
    "mixup": 0.1,
    "aug_repeats": 3,
    "weight_decay": 0.02,
    "model_ema_decay": 0.0,
    "clip_grad": 0.0,
    "img_size": 224,
    "side_to_evaluate": 224,
    "eval_resize": 235,
    "interpolation": "bicubic",
    "total_batch": 2048,
}
FFCV = {"lr": 1.7, "warmup_epochs": 2, "total_batch": 4096, "first_img_size": 160, "img_size": 192}
MNASNET = {"epochs": 350, "decay_epochs": 2.4, "sched": "step", "total_batch": 1024}
DROP = {"conv_drop_rate": 0.2, "attn_drop_rate": 0.2, "ff_drop_rate": 0.2}
PAPERS = {
    "rsb_a1": {**RSB, "epochs": 600, "weight_decay": 0.01, "smoothing": 0.1, "mixup": 0.2},
    "rsb_a2": {**RSB, "epochs": 300},
    "rsb_a3": {
        **RSB,
        "epochs": 100,
        "lr": 8e-3,
        "aug_repeats": 1,
        "img_size": 160,
        "aa": "rand-m6-mstd0.5-inc1",
        "model_kwargs": {},
    },
    "ffcv_16": {**FFCV, "epochs": 16, "grow_epochs": [11, 13]},
    "ffcv_88": {**FFCV, "epochs": 88, "grow_epochs": [65, 76]},
    "pa_cifar10": {
        "epochs": 630,
        "batch_size": 50,
        "total_batch": 50,
        "lr": 0.05,
        "min_lr": 1e-4,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "cutout": 8,
        "holdout": 5000,
        "opt": "momentum",
        "smoothing": 0,
        "model_kwargs": DROP,
    },
    "imagenet": {"weight_decay": 1e-4, "momentum": 0.9, "total_batch": 256},
    "imagenet_semnasnet_100": MNASNET,
    "imagenet_aa_mnasnet_100": MNASNET,
    "imagenet_ea_aa_resnet50": {"total_batch": 256},
    "torchvision_v2": {"total_batch": 1024},
    "aa_cifar100": {"total_batch": 256},
    "cifar100_wrn28_10": {"total_batch": 1024},
    "pa_cifar100": {"total_batch": 50},
    "coco_aa_retinanet": {"total_batch": 64},
    "coco_26_epochs": {"total_batch": 16},
    "scenes": {"total_batch": 64},
}


@pytest.mark.parametrize("name", PAPERS)
def test_values_are_the_papers(name):
    config = resolved(name)
    assert {key: getattr(config, key) for key in PAPERS[name]} == PAPERS[name]
    if name.startswith("ffcv"):
        assert [config.size_of(epoch) for epoch in (0, config.epochs - 1)] == [160, 192]


def test_sizes_are_those_of_timms_weights():
    config = resolved("rsb_a3")
    weights = timm.get_pretrained_cfg("resnet50.a3_in1k")
    assert weights.input_size[1] == config.img_size
    assert weights.test_input_size[1] == config.side_to_evaluate
    assert weights.interpolation == config.interpolation
    assert int(224 / weights.crop_pct) == config.eval_resize


def test_half_the_rate_of_aa_ends_where_the_plain_recipe_does():
    plain = resolved("imagenet_semnasnet_100")
    aa = resolved("imagenet_aa_mnasnet_100")
    steps = 350 / 2.4
    assert aa.lr == plain.lr / 2
    end = plain.lr * plain.decay_rate**steps
    assert aa.lr * aa.decay_rate**steps == pytest.approx(end, rel=2e-3)


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("imagenet_")])
def test_the_recipe_of_each_published_row_is_the_papers(name):
    if "resnet" in name:
        base = "imagenet"
    elif "_aa_" in name:
        base = "imagenet_aa_mnasnet_100"
    else:
        base = "imagenet_semnasnet_100"
    row = resolved(name)
    assert timm.is_model(row.model)
    assert name == f"imagenet_{row.model}"
    assert row.num_classes == 1000
    unset = {"model": "", "num_classes": 0, "recipe": ""}
    assert asdict(row) | unset == asdict(resolved(base)) | unset


@pytest.mark.parametrize("processes", [1, 4, 8, 64])
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_means_the_same_on_any_number_of_processes(name, processes):
    """Images per update, rate, warm-up and updates per epoch are equal; else one line says who can share the batch."""
    images = 1_281_167
    recipe = load_recipe(name)
    config = resolved(name)
    total = recipe["total_batch"]
    if total % processes:
        message = rf"total_batch {total} cannot be shared by {processes} processes: \d+"
        with refused(message):
            config.for_processes(processes)
        return
    divided = config.for_processes(processes)
    assert divided.images_of_update(processes) == total
    assert divided.batch_size <= config.batch_size
    updates = images // total
    assert images // (divided.batch_size * processes) // divided.grad_accum_steps == updates
    scale = total / recipe["lr_base_size"] if recipe.get("lr_base_size") else 1
    assert divided.peak_lr(total) == pytest.approx(recipe["lr"] * scale)
    assert divided.warmup_updates(updates) == config.warmup_updates(updates)


def test_numbers_of_processes_that_divide_the_batch_are_named():
    config = resolved("imagenet")
    with refused("256 cannot be shared by 3 processes: 255 or 258 can"):
        config.for_processes(3)
    with refused("by 300 processes: 300 can"):
        config.for_processes(300)


def test_cuda_graphs_take_one_batch_an_update_however_it_is_shared():
    """Each replay of a graph overwrites the gradients of the last one."""
    graphs = {"compile": True, "compile_mode": "reduce-overhead"}
    config = resolved("none", total_batch=512, batch_size=128, **graphs)
    assert config.for_processes(4).grad_accum_steps == 1
    with refused("needs updates of one batch per process, .* got 2"):
        config.for_processes(2)


def test_mixed_batches_are_even():
    """An odd batch would lose an image to mixup, which takes pairs."""
    mixed = resolved("none", total_batch=1026, batch_size=128, mixup=0.2)
    with refused("by 2 processes in pairs, .*: 1024 or 1028 can"):
        mixed.for_processes(2)
    for processes in (1, 3):
        assert mixed.for_processes(processes).batch_size % 2 == 0
    odd = resolved("none", total_batch=514, batch_size=128).for_processes(2)
    assert odd.batch_size == 1
    assert odd.grad_accum_steps == 257


def test_a_batch_size_that_is_given_stays_a_process():
    config = resolved("imagenet", batch_size=64).for_processes(2)
    assert (config.batch_size, config.grad_accum_steps, config.total_batch) == (64, 1, 0)
    assert config.peak_lr(config.images_of_update(2)) == pytest.approx(0.064)
    both = resolved("imagenet", batch_size=64, total_batch=256).for_processes(1)
    assert both.batch_size == 64
    assert both.grad_accum_steps == 4


@pytest.mark.parametrize(
    "name, amp, lines",
    [("test_vit", "bfloat16", 1), ("test_vit", "none", 0), ("test_resnet", "bfloat16", 0)],
)
def test_fused_attention_in_bfloat16_on_a_cpu_is_warned_of(
    name, amp, lines, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("ea_vision.engine.preflight.trial_step", lambda trainer: 0.1)
    model = timm.create_model(name, num_classes=3)
    trainer = make_trainer(tmp_path, model, amp=amp, batch_size=4)
    trainer.data.train = trainer.data.evaluated = range(8)
    preflight(trainer)
    warned = [line for line in caplog.messages if "torch's fused attention slower" in line]
    assert len(warned) == lines


@pytest.mark.parametrize("images, text", [(90, "out 26,"), (64, ""), (6401, "")])
def test_the_log_says_how_many_images_an_epoch_leaves_out(images, text):
    data = SimpleNamespace(train=range(images))
    trainer = SimpleNamespace(data=data, updates_per_epoch=images // 32, images_of_update=32)
    assert text in left_out(trainer)
    assert bool(left_out(trainer)) == bool(text)


@pytest.mark.parametrize(
    "opt, power",
    [("lamb", 0.5), ("adamw", 0.5), ("adafactor", 0.5), ("momentum", 1), ("rmsproptf", 1)],
)
def test_rates_scale_as_timms_do(opt, power):
    """timm's train.py: square root for what has ada or lamb in its name, else linear."""
    config = resolved("none", opt=opt, lr=0.01, lr_base_size=256, batch_size=1024)
    assert config.peak_lr(1024) == pytest.approx(0.01 * 4**power)
