"""What a probe sees: the attention maps of one query pixel for many images, kept in files, and controls of them.

Shape letters: M images, B a batch of them, K heads, H x W the map.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ea_vision.base.errors import RunError
from ea_vision.base.files import atomic_write
from ea_vision.recorder.loading import LoadedModel, load_model
from ea_vision.recorder.recording import record_attention


@dataclass(frozen=True)
class MapSource:
    """What maps to take: those of one query of `layers`: y,x in pixels of the input (None: the middle), or a token
    before a transformer's patches by name, such as "cls"."""

    layers: tuple[int, ...]
    query: tuple[int, int] | str | None = None


def extract_maps(model: LoadedModel, images: Tensor, source: MapSource, folder: Path,
                 batch_size: int = 64) -> list[np.ndarray]:
    """The maps of `source` for all images, kept in `folder` as layerN.npy, float16 (M, K, H, W).

    An interrupted extraction goes on where it was; a finished one is read.

    Args:
        images: uint8 (M, 3, H, W) of the model's input size.
        batch_size: images at a time.

    Returns:
        the maps by layer.

    Raises:
        RunError: the cache cannot be written.
    """
    key = _cache_key(model, images, source)
    state_file = folder / "state.json"
    files = [folder / f"layer{number}.npy" for number in source.layers]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done, stores = _kept(state_file, files, key, len(images))
        batches = range(done, len(images), batch_size)
        for first in tqdm(batches, desc=f"maps of {model.label}", unit="batch", disable=not batches or None):
            maps = query_maps(model, images[first:first + batch_size], source)
            if stores is None:
                stores = [np.lib.format.open_memmap(file, "w+", np.float16, (len(images), *layer_maps.shape[1:]))
                          for file, layer_maps in zip(files, maps, strict=True)]
            for store, layer_maps in zip(stores, maps, strict=True):
                store[first:first + len(layer_maps)] = layer_maps
                store.flush()
            atomic_write(state_file, json.dumps({"key": key, "done": first + len(maps[0])}).encode())
    except OSError as error:
        raise RunError(f"cannot keep maps in {folder}: {error.strerror or error}") from error
    return stores


def _kept(state_file: Path, files: Sequence[Path], key: str, images: int) -> tuple[int, list[np.ndarray] | None]:
    """Return how many images' maps are in the files, and the files' arrays; 0 and None where they are not those of
    `key`, or damaged: then they are made again."""
    try:
        state = json.loads(state_file.read_text())
        if not isinstance(state, dict) or state.get("key") != key:
            return 0, None
        for file in files:
            np.lib.format.open_memmap(file, mode="r")  # r+ would fill a file that is cut off with zeros
        stores = [np.lib.format.open_memmap(file, mode="r+") for file in files]
    except (FileNotFoundError, ValueError, RecursionError):
        return 0, None
    done = state.get("done")
    whole = type(done) is int and 0 < done <= images and all(
        store.dtype == np.float16 and store.ndim == 4 and len(store) == images for store in stores)
    return (done, stores) if whole else (0, None)


def query_maps(model: LoadedModel, images: Tensor, source: MapSource) -> list[np.ndarray]:
    """float16 (B, K, H, W) for each layer of `source`; images uint8 (B, 3, H, W) of the model's input size."""
    device = next(model.model.parameters()).device
    with torch.inference_mode(), record_attention(model.model, source.layers) as recorded:
        model.model(model.normalize(images.to(device) / 255))
    H, W = images.shape[-2:]
    maps = []
    for number in source.layers:
        layer, query = recorded[number], source.query or (H // 2, W // 2)
        if not isinstance(query, str):
            query = query[0] * layer.feat_size[0] // H, query[1] * layer.feat_size[1] // W
        maps.append(layer.of_query(query)[1].half().cpu().numpy())
    return maps


def _cache_key(model: LoadedModel, images: Tensor, source: MapSource) -> str:
    """SHA-256 of the weights, the images, the input's statistics and the source."""
    about = [asdict(source), list(model.config["mean"]), list(model.config["std"])]
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, value in model.model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    digest.update(images.contiguous().numpy())
    return digest.hexdigest()


def shuffled_in_space(maps: np.ndarray, seed: int, together: bool = False) -> np.ndarray:
    """(M, K, H, W) with the pixels of every map in a random order of its own; `together`: one order for all K heads."""
    generator = np.random.default_rng(seed)
    M, K, H, W = maps.shape
    order = np.argsort(generator.random((M, 1 if together else K, H * W)), axis=-1)
    return np.take_along_axis(maps.reshape(M, K, H * W), order, axis=-1).reshape(maps.shape)


def untrained_network(target: str, model: LoadedModel, images: Tensor, seed: int) -> LoadedModel:
    """The network of `target` as it begins training, for images of the size that `model` takes; see
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
