"""What the model families share when timm builds them."""
import zipfile
from pathlib import Path
from typing import Any

import safetensors.torch
from timm.models import build_model_with_cfg, list_models, resolve_pretrained_cfg
from torch import nn

from ea_vision.models._convert import checkpoint_filter_fn

try:  # not exported; in newer timm its own models call it, so that save_for_hf knows of a resize
    from timm.models._input import update_model_input_size
except ImportError:
    def update_model_input_size(model: nn.Module, img_size: tuple[int, int]) -> None:
        """Older timm keeps no record of sizes."""

FAMILIES = ("attn_resnet", "conv_transformer")


def shipped_weights(name: str) -> str:
    """Path of a weights file that travels with the project: in the installed package, or in a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "weights" / f"{name}.safetensors"
    return str(installed if installed.is_file() else package.parent / "weights" / f"{name}.safetensors")


def to_size(img_size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) in pixels of an img_size given as one number or two.

    Raises:
        ValueError: not one or two positive whole numbers.
    """
    size = tuple(img_size) if isinstance(img_size, (tuple, list)) else (img_size, img_size)
    if len(size) != 2 or any(not isinstance(side, int) or side < 1 for side in size):
        raise ValueError(f"img_size must be a positive whole number or a (height, width) of them, got {img_size!r}")
    return size


def take_indices_of(num_features: int, indices: int | list[int] | None) -> tuple[list[int], int]:
    """The features that `indices` asks for, timm's way: None all, n the last n, else those listed (negative from the
    end).

    Returns:
        their indices counted from 0, and the largest.

    Raises:
        ValueError: an index that does not exist.
    """
    if indices is None:
        indices = num_features
    wanted = list(range(num_features - indices, num_features)) if isinstance(indices, int) else list(indices)
    taken = [index + num_features if index < 0 else index for index in wanted]
    if not taken or min(taken) < 0 or max(taken) >= num_features:
        raise ValueError(f"feature indices must lie within the {num_features} features, got {indices}")
    return taken, max(taken)


def build_model(model_cls: type[nn.Module], variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """timm's build_model_with_cfg, features by forward_intermediates.

    The stages hand attention logits on, so features cannot come from timm's default of running the stages one by one.
    Where pretrained weights come from a file (timm's `pretrained_cfg_overlay={"file": ...}`), it may also be a run
    folder (its best weights) or one of its checkpoints.

    Raises:
        RuntimeError: pretrained weights wanted where there are none, or whose file is missing.
    """
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if not cfg.has_weights and not cfg.state_dict:
            having = [name for family in FAMILIES for name in list_models(module=family, pretrained=True)]
            raise RuntimeError(
                f"{variant} has no pretrained weights; create it with pretrained=False. "
                f"Models of ea_vision that have them: {', '.join(having) or 'none yet'}")
        path = Path(cfg.file or "")
        if cfg.file and not path.exists():
            raise RuntimeError(
                f"the weights of {variant} are missing: {path.name} belongs into the folder weights/ of a "
                f"checkout, or comes with the wheel; got neither")
        overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
        if path.is_dir() and cfg.source != "local-dir" and cfg.file:  # a run folder
            overlay["file"] = str(path / "model.safetensors")
        elif path.suffix == ".ckpt" and not zipfile.is_zipfile(path):  # our trainers', where torch's are archives
            overlay["state_dict"] = safetensors.torch.load_file(path)
        kwargs["pretrained_cfg_overlay"] = overlay
    net = build_model_with_cfg(
        model_cls, variant, pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", model_cls.feature_indices), feature_cls="getter"),
        **kwargs)
    net.pretrained_cfg.pop("state_dict", None)  # loaded, and timm would keep it
    if isinstance(getattr(net, "model", None), model_cls):  # a method that the feature getter lacks, the others have
        net.set_grad_checkpointing = net.model.set_grad_checkpointing
    return net
