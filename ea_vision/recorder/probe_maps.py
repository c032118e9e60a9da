"""What a probe sees: the attention maps of one query for many images, and controls of them.

Shape letters: M images, B a batch of them, K heads, H x W the map.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ea_vision.recorder.loading import LoadedModel, load_model
from ea_vision.recorder.recording import record_attention


def extract_maps(model: LoadedModel, images: Tensor, layers: Sequence[int], query: tuple[int, int] | str | None = None,
                 batch_size: int = 64) -> list[np.ndarray]:
    """Return the maps of one query, float16 (M, K, H, W), for each layer.

    Args:
        images: uint8 (M, 3, H, W) of the model's input size.
        query: y,x in pixels of the input, or a token before a transformer's patches; None: the middle.
    """
    device, (height, width) = next(model.model.parameters()).device, images.shape[-2:]
    query = query or (height // 2, width // 2)
    found: list[list[np.ndarray]] = [[] for _ in layers]
    for batch in tqdm(images.split(batch_size), desc=f"maps of {model.label}", unit="batch", disable=None):
        with torch.inference_mode(), record_attention(model.model, layers) as maps:
            model.model(model.normalize(batch.to(device) / 255))
        for kept, number in zip(found, layers, strict=True):
            H, W = maps[number].feat_size
            cell = query if isinstance(query, str) else (query[0] * H // height, query[1] * W // width)
            kept.append(maps[number].of_query(cell)[1].half().cpu().numpy())
    return [np.concatenate(kept) for kept in found]


def shuffled_in_space(maps: np.ndarray, seed: int, together: bool = False) -> np.ndarray:
    """Return (M, K, H, W), the pixels of every map in a random order of its own; `together`: one order for all K
    heads."""
    M, K, H, W = maps.shape
    order = np.argsort(np.random.default_rng(seed).random((M, 1 if together else K, H * W)), axis=-1)
    return np.take_along_axis(maps.reshape(M, K, H * W), order, axis=-1).reshape(maps.shape)


def untrained_network(target: str, model: LoadedModel, images: Tensor, seed: int) -> LoadedModel:
    """Return the network of `target` as it begins training, for images of the size that `model` takes; see
    `set_batch_statistics`."""
    network = load_model(target, random=True, img_size=model.img_size, seed=seed,
                         device=next(model.model.parameters()).device)
    set_batch_statistics(network, images, seed=seed)
    return network


def set_batch_statistics(model: LoadedModel, images: Tensor, batches: int = 8, batch_size: int = 64,
                         seed: int = 0) -> None:
    """Set the batch statistics of a network that was never trained to those of some images of uint8 (M, 3, H, W).

    The images are drawn by `seed`: those of a folder lie in the order of their classes.
    """
    norms = [m for m in model.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    device = next(model.model.parameters()).device
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over the batches
        norm.train()
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:batches * batch_size]
    with torch.no_grad():
        for index in drawn.split(batch_size):
            model.model(model.normalize(images[index].to(device) / 255))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
