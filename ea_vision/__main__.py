"""All commands of ea_vision: `ea-vision COMMAND`, which is `python -m ea_vision COMMAND`."""

from __future__ import annotations

import importlib
import sys

from ea_vision.base.errors import UsageError, exit_code, near_matches

GROUPS = {  # command: (module whose main(argv) runs it, what it does)
    "train": {
        "train-cifar": ("ea_vision.engine.train_cifar", "train on small images: digits, CIFAR, your own folders"),
        "train-imagenet": ("ea_vision.engine.train_imagenet", "train on ImageNet or any images in class folders"),
        "train-detection": ("ea_vision.detection.train", "train a RetinaNet on COCO or your own images with boxes"),
        "options": ("ea_vision.options", "all options of the trainers, as a table"),
        "sweep": ("ea_vision.studies.sweep", "train once per setting and draw accuracy over the settings"),
        "evidence": ("ea_vision.studies.evidence", "whether variants of a sweep differ: paired tests over seeds"),
        "timm": ("ea_vision.timm_scripts", "run one of timm's own scripts with our models registered"),
    },
    "look": {
        "heatmap": ("ea_vision.visualize.heatmap", "attention of query points by head, of several models or images"),
        "strip": ("ea_vision.visualize.strip", "a map from layer to layer, part by part, or as a film (.gif, .mp4)"),
        "match": ("ea_vision.visualize.match", "a pixel of one image, and the pixels of another one that match it"),
        "matrix": ("ea_vision.visualize.matrix", "whole maps, queries by keys"),
        "rollout": ("ea_vision.visualize.rollout", "attention over several layers together"),
        "statistics": ("ea_vision.visualize.statistics", "entropy, distance, ... by layer and head"),
        "explore": ("ea_vision.visualize.explore", "one HTML page: click a pixel, see every head of every layer"),
    },
    "measure": {
        "predict": ("ea_vision.analysis.predict", "the likeliest classes of images, as text or JSON"),
        "detect": ("ea_vision.visualize.detections", "find objects: COCO's results, pictures, what they attend to"),
        "probe": ("ea_vision.analysis.probe", "classify images from their attention maps (EA paper, table 7)"),
        "models": ("ea_vision.measure.models", "the names of our networks, their weights and what they are"),
        "faithfulness": ("ea_vision.visualize.faithfulness_report",
                         "what the class loses without the patches that maps rank first"),
        "reproduce": ("ea_vision.measure.reproduce", "the papers' image tables, published beside ours"),
        "summary": ("ea_vision.measure.summary", "parameters and GFLOPs beside the published ones"),
        "ablation": ("ea_vision.measure.ablation", "shares of attention, positions: sizes beside the published ones"),
        "benchmark": ("ea_vision.measure.speed", "training and inference speed and memory of networks side by side"),
        "memory": ("ea_vision.measure.memory", "what a training step needs, by layer"),
        "gpu-check": ("ea_vision.measure.gpu_check", "on a GPU: every path against the reference, speed, memory"),
        "kernel-figures": ("ea_vision.measure.kernel_figures", "what the compiler makes of the kernels, without a GPU"),
    },
    "data": {
        "write-ffcv": ("ea_vision.data.write_ffcv", "write images into an FFCV file"),
        "loaders": ("ea_vision.measure.loaders", "images per second of the loaders"),
        "make-boxes": ("ea_vision.detection.generate", "objects pasted on photos, with exact boxes, as COCO JSON"),
        "convert-boxes": ("ea_vision.detection.convert", "Tiny-ImageNet's boxes as COCO JSON"),
    },
    "weights": {
        "export": ("ea_vision.engine.export", "export a complete run to a weights file with its card"),
        "export-detector": ("ea_vision.analysis.export_detector", "export a detector to ONNX or torch.export"),
    },
}
ALIASES = {  # commands that are not listed
    "animation": ("ea_vision.visualize.films", "strip with a film's suffix"),
    "grid": ("ea_vision.visualize.image_grid", "heatmap of several images"),
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()} | ALIASES


def run(command: str, argv: list[str] | None = None) -> int:
    """Run a command with these arguments (default: the process's own); return its exit code.

    What the user can mend becomes one line on stderr and exit code 2.
    """
    def main() -> int:
        if command not in COMMANDS:
            raise UsageError(f"unknown command {command!r}; {near_matches(command, COMMANDS, 'commands')}")
        return importlib.import_module(COMMANDS[command][0]).main(argv)

    return exit_code(main)


def overview() -> str:
    """A line a command, by group."""
    width = max(map(len, COMMANDS))
    lines = ["usage: ea-vision COMMAND ...    (ea-vision COMMAND --help says more)"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:{width}}  {about}" for name, (_, about) in commands.items())]
    return "\n".join([*lines, "", "In a checkout train_cifar.py, train_imagenet.py and visualize/*.py are the same "
                                  "commands."])


def main(argv: list[str] | None = None) -> int:
    """`ea-vision COMMAND ARGUMENTS`; without a command, or with --help, the list of commands."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0 if argv else 2
    sys.argv = [f"ea-vision {argv[0]}", *argv[1:]]  # what usage lines and run folders name
    return run(argv[0])


if __name__ == "__main__":
    sys.exit(main())
