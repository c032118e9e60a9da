"""Time and memory of recording attention maps beside the plain forward.

    OMP_NUM_THREADS=1 python -m experiments.recording_cost vit_base_patch16_224 swin_tiny_patch4_window7_224

A row a network: seconds of a forward of one image, plain and recorded (medians), the tensors alive at once at most, and
what the maps take that are kept. Random weights, evaluation mode, float32.
"""
import argparse
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate

import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ea_vision
from ea_vision.benchmark import interleaved
from experiments.evidence import markdown

MODELS = ("vit_small_patch16_224", "deit_small_distilled_patch16_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0",
          "mobilevit_s", "ea_vit_tiny_patch16_224", "ea_aa_resnet34")


class Storages(TorchDispatchMode):
    """Notes the bytes of every storage that operations make as they come (+) and go (-), beside the `known` tensors."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.held = [tensor.untyped_storage() for tensor in known]  # so that nothing takes their ids
        self.seen, self.changes = set(map(id, self.held)), [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()  # one Python object as long as the memory lives
                if id(storage) not in self.seen:
                    self.seen.add(id(storage))
                    self.changes.append(storage.nbytes())
                    weakref.finalize(storage, self._ends, id(storage), storage.nbytes()).atexit = False
        return outputs

    def _ends(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.changes.append(-size)


def peak_of(run: Callable[[], object], known: Sequence[torch.Tensor]) -> int:
    """Return the most bytes of tensors that are alive at once, beside those that are there before."""
    with Storages(known) as storages:
        run()
    return max(accumulate(storages.changes))


def measure(name: str, repeats: int) -> list[str]:
    """Return the cells of a network's row."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    images = torch.rand(1, *timm.data.resolve_model_data_config(model)["input_size"])

    def recorded() -> dict:
        with ea_vision.record_attention(model) as maps:
            model(images)
        return maps

    runs = {"plain": lambda: model(images), "recorded": recorded}
    with torch.no_grad():
        plain, with_maps = interleaved(runs, repeats).values()
        kept = [part for layer in recorded().values() for part in layer._parts.values()]
        peaks = [peak_of(run, [*model.parameters(), *model.buffers(), images]) for run in runs.values()]
    return [name, str(images.shape[-1]), f"{plain:.3f}", f"{with_maps:.3f}", f"{with_maps / plain:.2f}",
            *(f"{size / 2**20:.1f}" for size in (*peaks, sum(part.nbytes for part in kept)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help="timm's names, ours among them")
    parser.add_argument("--repeats", type=int, default=5, help="forwards (default: %(default)s)")
    args = parser.parse_args()
    heads = ["network", "pixels", "plain, s", "recorded, s", "ratio", "peak, MiB", "recorded, MiB", "kept, MiB"]
    print(*markdown(heads, [measure(name, args.repeats) for name in args.models]), sep="\n")


if __name__ == "__main__":
    main()
