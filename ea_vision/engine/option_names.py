"""Names of options: what release 0.3 called ours, and what timm's and torchvision's trainers call theirs."""

from __future__ import annotations

from typing import Any

from ea_vision.base.errors import UsageError

RENAMED = {"schedule": "sched", "lr_min": "min_lr", "cycle_mul": "lr_cycle_mul", "decay_every": "decay_epochs",
           "lr_base_batch": "lr_base_size", "label_smoothing": "smoothing", "random_erasing": "reprob",
           "auto_augment": "aa", "ema": "model_ema_decay", "ema_warmup": "model_ema_warmup",
           "grad_accum": "grad_accum_steps", "warmup": "warmup_epochs"}  # accepted for one release
SCHEDULES = {"one_cycle": "linear", "step": "multistep", "exp": "step"}  # values of `schedule` as those of `sched`
GONE = {"whiten": False, "logit_scale": 1.0, "norm_bias_lr": 1.0}  # what had no effect

# Flags of timm's train.py and torchvision's references, and what to write instead.
THEIRS = {
    "-a": "--model", "--arch": "--model", "-b": "--batch-size", "-j": "--workers", "--num-workers": "--workers",
    "-vb": "--eval-batch-size", "--validation-batch-size": "--eval-batch-size", "--data-path": "--data-dir",
    "--root": "--data-dir", "--input-size": "--img-size", "--train-crop-size": "--img-size",
    "--val-crop-size": "--eval-img-size", "--val-resize-size": "--eval-resize",
    "--crop-pct": "--eval-resize (the short side in pixels)", "--crop-mode": "--eval-resize",
    "--learning-rate": "--lr", "--lr-base": "--lr, with --lr-base-size", "--wd": "--weight-decay",
    "--lr-scheduler": "--sched", "--lr-warmup-epochs": "--warmup-epochs", "--lr-step-size": "--decay-epochs",
    "--lr-gamma": "--decay-rate", "--warmup-lr": "--warmup-epochs (from 0)", "--clip-grad-norm": "--clip-grad",
    "--random-erase": "--reprob", "--mixup-alpha": "--mixup", "--cutmix-alpha": "--cutmix", "--scale": "--crop-scale",
    "--ra-sampler": "--aug-repeats 3", "--ra-reps": "--aug-repeats", "--train-interpolation": "--interpolation",
    "--drop": "--model-kwargs drop_rate=VALUE", "--drop-path": "--model-kwargs drop_path_rate=VALUE",
    "--model-ema": "--model-ema-decay 0.9998", "--torchcompile": "--compile", "--native-amp": "--amp",
    "--print-freq": "--log-steps", "--log-interval": "--log-steps", "--output-dir": "--output",
    "--experiment": "--output", "--initial-checkpoint": "--pretrained-path", "--dataset-download": "--download",
    "--start-epoch": "--resume", "--num-gpu": "torchrun --nproc-per-node N", "--log-wandb": "--wandb PROJECT",
    "--weights-backend": "--pretrained", "--val-metric": "--holdout", "--bce": "--bce-loss",
}

# Flags of train-imagenet that users look for in the other trainers, too.
OF_IMAGENET = frozenset({"--aa", "--aug-repeats", "--color-jitter", "--crop-scale", "--decoder", "--eval-img-size",
                         "--eval-resize", "--first-img-size", "--hflip", "--interpolation", "--train-split",
                         "--val-split"})


def modern(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return options under today's names, and a line for each older name among them.

    `warmup`, a share of all updates, becomes a percentage. `decay_epochs` as a list is `decay_milestones`.
    """
    result, lines = {}, []
    for key, value in values.items():
        name = RENAMED.get(key, key)
        if key == "decay_epochs" and isinstance(value, (list, tuple)):
            if len(value) == 1 and "schedule" not in values:
                value = value[0]
            else:
                name = "decay_milestones"
        elif key == "lr_base_batch" and any(part in str(values.get("opt")) for part in ("ada", "lamb")):
            result["lr_base_scale"] = "linear"  # for all optimisers then
        elif key == "schedule":
            value = SCHEDULES.get(value, value)
        elif key == "warmup":
            value = share_as_percentage(value)
        if name != key:
            lines.append(f"{key} is {name} {value}")
        result[name] = value
    return result, lines


def share_as_percentage(share: Any) -> Any:
    """Return the text that says a share of all updates in percent; what is no number as it is.

    Raises:
        UsageError: more than 1, which somebody means as epochs.
    """
    try:
        number = float(share)
    except (TypeError, ValueError):
        return share
    if number > 1:
        raise UsageError(f"warmup is a share of all updates, at most 1, got {number:g}; in epochs it is "
                         f"warmup_epochs {number:g}")
    return f"{100 * number:.10g}%"
