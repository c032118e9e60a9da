#!/usr/bin/env python3
"""Write docs/quickstart.ipynb and run it: `python docs/quickstart.py` (needs nbformat, nbclient, ipykernel).

The photo, cat.jpg, is Stefan van der Walt's "Chelsea", in the public domain (CC0), from scikit-image.
"""

import os
from pathlib import Path

import nbclient
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FILE = Path(__file__).with_suffix(".ipynb")
CELLS = (  # what begins with "# " is text
    """\
# Quick start

A network whose attention maps evolve from layer to layer, a photo, and pictures of where its heads look.
Take a photo of your own in place of `cat.jpg` (Stefan van der Walt's Chelsea, CC0).
`python docs/quickstart.py` writes and runs this notebook.""",
    """\
import timm
import torch
from PIL import Image

import ea_vision
from ea_vision.visualize import plot_heatmap, plot_strip, show_page

model = timm.create_model("ea_conv_transformer_cifar", pretrained=True).eval()  # 10 classes of CIFAR-10, 32x32 pixels
photo = Image.open("cat.jpg").convert("RGB")
photo""",
    """\
# ## What is it?

The weights come with the package: 60 epochs on CIFAR-10, one run. They know ten classes at 32x32 pixels,
and no more.""",
    """\
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.inference_mode():
    top = model(transform(photo)[None]).softmax(-1)[0].topk(5)
for index, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True):
    print(f"{model.pretrained_cfg['label_names'][index]:12} {probability:.3f}")""",
    """\
# ## Where do its heads look?

A query point is (y, x) in pixels of the 32x32 input; layers are counted from 1, heads from 0.
Each tile shows what the point attends to.""",
    """\
plot_heatmap(model, photo, layers=[2], heads=[0, 1, "mean"], queries=[(12, 10), (26, 26)], width=4)""",
    """\
# ## How does a map evolve?

The figure follows one query through the three layers of a chain. Layer 1 has no predecessor. Each later layer mixes the
previous map into its own and convolves the result: a row shows these steps and, last, the attention that the
layer's own logits alone would give, at the same scale. The previous map changes the attention of
head 0 and this query most: `python -m experiments.evolution_at_work docs/cat.jpg` finds them.""",
    """\
plot_strip(model, photo, layers=[1, 2, 3], head=0, query=(22, 14), width=4)""",
    """\
# ## Click a pixel

The page of `ea-vision explore`, inside the notebook.""",
    """\
show_page(model, photo, layers=[1, 2, 3])""",
    """\
# ## The numbers

Recording leaves the output bit-identical.""",
    """\
with torch.inference_mode(), ea_vision.record_attention(model, layers=[1, 2, 3], parts=("attn", "conv_logits")) as maps:
    model(transform(photo)[None])
maps""",
    """\
attn = maps[2].attn  # (B, heads, N, N), rows are queries
print(tuple(attn.shape), "every row sums to 1:", torch.allclose(attn.sum(-1), torch.ones(()), atol=1e-5))
print({name: array.shape for name, array in maps.arrays().items() if name.endswith(("attn", "conv_logits"))})
for layer in maps.values():  # nats; log(64) = 4.16 where a query looks at all alike
    entropy = torch.special.entr(layer.attn).sum(-1).mean(-1)[0]
    print(f"layer {layer.number}: entropy by head", [round(value, 2) for value in entropy.tolist()])""",
    """\
# ## A vision transformer, evolving

`ea_vision.evolve` adds an evolution to any of timm's plain ViTs. The outputs start unchanged: the new gates begin at 0
and learn from there. (Random weights avoid a download here; `pretrained=True` works the same way.)""",
    """\
vit = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
evolving = ea_vision.evolve(vit, kind="ea", learnable=True).eval()
images = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
with torch.inference_mode():
    difference = (vit(images) - evolving(images)).abs().max().item()
print("largest difference of the logits below 1e-5:", difference < 1e-5)
added = set(evolving.state_dict()) - set(vit.state_dict())
print(len(added), "new parameters, such as", ", ".join(sorted(added)[:4]))""",
    """\
# ## Go on

- `ea-vision explore --model ea_conv_transformer_cifar -o page.html cat.jpg`:
  click a pixel, see every head of every layer
- `ea-vision heatmap`, `strip`, `matrix`, `rollout`, `statistics`: [figures](look.md)
- [Record any transformer](record.md)
- [Train on small images](train.md), [vision transformers and sequences](transformers.md), [results](results.md)""",
)


def notebook() -> NotebookNode:
    """The cells, not run."""
    cells = []
    for index, text in enumerate(CELLS):
        if text.startswith("# "):
            text = text.removeprefix("# ") if text.startswith("# ##") else text
            cells.append(new_markdown_cell(text, id=f"cell-{index}"))
        else:
            cells.append(new_code_cell(text, id=f"cell-{index}"))
    return new_notebook(
        cells=cells,
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        },
    )


def run(book: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells, in a folder that has cat.jpg; the first that fails is a CellExecutionError."""
    quiet = {
        **os.environ,
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }  # tqdm's, where there is no ipywidgets
    nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute(env=quiet)
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
        for output in cell.get("outputs", []):
            if "image/jpeg" in output.get("data", {}):  # of a photo, ten times as large as PNG
                output.data.pop("image/png", None)
    return book


if __name__ == "__main__":
    nbformat.write(run(notebook(), FILE.parent), FILE)
    print(f"written: {FILE} ({FILE.stat().st_size / 1e6:.2f} MB)")
