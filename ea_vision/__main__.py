"""All commands of ea_vision: `ea-vision COMMAND`, which is `python -m ea_vision COMMAND`."""

from __future__ import annotations

import importlib
import sys

from ea_vision.base.errors import UsageError, exit_code, near_matches

GROUPS = {  # by folder; command: (module whose main(argv) runs it, what it does)
    "engine": {
        "train-cifar": ("ea_vision.engine.train_cifar", "train on small images: digits, CIFAR, your own folders"),
        "train-imagenet": ("ea_vision.engine.train_imagenet", "train on ImageNet or any images in class folders"),
        "timm": ("ea_vision.timm", "run one of timm's own scripts with our models registered"),
    },
    "detection": {
        "train-detection": ("ea_vision.detection.train", "train a RetinaNet on COCO or your own images with boxes"),
        "make-boxes": ("ea_vision.detection.generate", "write images with exact boxes as COCO JSON"),
    },
    "studies": {
        "sweep": ("ea_vision.studies.sweep", "train once per setting and draw accuracy over the settings"),
        "evidence": ("ea_vision.studies.evidence", "whether variants of a sweep differ: paired tests over seeds"),
    },
    "visualize": {
        "heatmap": ("ea_vision.visualize.heatmap", "attention of query points by head, of several models or images"),
        "strip": ("ea_vision.visualize.strip", "a map from layer to layer, part by part, or as a film (.gif, .mp4)"),
        "match": ("ea_vision.visualize.match", "a pixel of one image, and the pixels of another one that match it"),
        "matrix": ("ea_vision.visualize.matrix", "whole maps, queries by keys"),
        "rollout": ("ea_vision.visualize.rollout", "attention over several layers together"),
        "statistics": ("ea_vision.visualize.statistics", "entropy, distance, ... by layer and head"),
        "explore": ("ea_vision.visualize.explore", "one HTML page: click a pixel, see every head of every layer"),
        "detect": ("ea_vision.visualize.detections", "find objects: COCO's results, pictures, what they attend to"),
        "faithfulness": ("ea_vision.visualize.faithfulness_report",
                         "what the class loses without the patches that maps rank first"),
    },
    "recorder": {
        "predict": ("ea_vision.predict", "the likeliest classes of images, as text or JSON"),
        "probe": ("ea_vision.recorder.probe", "classify images from their attention maps (EA paper, table 7)"),
    },
    "measure": {
        "models": ("ea_vision.measure.models", "names, weights and (--sizes) parameters and GFLOPs of networks"),
        "benchmark": ("ea_vision.measure.speed", "speed and memory of networks, or (--loaders) of what reads images"),
        "memory": ("ea_vision.measure.memory", "predict the memory of a training step and the largest batch"),
        "gpu-check": ("ea_vision.measure.gpu_check", "on a GPU: every path against the reference, speed, memory"),
        "reproduce": ("ea_vision.measure.reproduce", "the papers' image tables, published beside ours"),
    },
    "data": {
        "write-ffcv": ("ea_vision.data.write_ffcv", "write images into an FFCV file"),
    },
    "deploy": {
        "export": ("ea_vision.export", "write a network as ONNX or torch.export, or a run as weights"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
PARTS = {  # what a command does instead when this is its first argument
    "models --sizes": "ea_vision.measure.summary",
    "benchmark --loaders": "ea_vision.measure.loaders",
    "gpu-check --kernels": "ea_vision.measure.kernel_figures",
    "make-boxes --tiny-imagenet": "ea_vision.detection.convert",
}
UNLISTED = {  # names that still answer
    "summary": "models --sizes", "loaders": "benchmark --loaders", "kernel-figures": "gpu-check --kernels",
    "convert-boxes": "make-boxes --tiny-imagenet", "ablation": "reproduce",
}
ASIDE = {  # other names that still answer, with their module
    "grid": "ea_vision.visualize.heatmap", "animation": "ea_vision.visualize.films",
    "export-detector": "ea_vision.export",
}


def find_command(words: list[str]) -> tuple[str, str, list[str]]:
    """Return the name of the command that `words` begin with (with the option that chooses a part of it), its module
    and its arguments.

    Raises:
        UsageError: no such command.
    """
    name, *rest = words
    if name in ASIDE:
        return name, ASIDE[name], rest
    first, *option = UNLISTED.get(name, name).split()
    rest = option + rest
    if rest and f"{first} {rest[0]}" in PARTS:
        return f"{first} {rest[0]}", PARTS[f"{first} {rest[0]}"], rest[1:]
    if first not in COMMANDS:
        raise UsageError(f"unknown command {name!r}; {near_matches(name, [*COMMANDS, *UNLISTED], 'commands')}")
    return first, COMMANDS[first][0], rest


def run(command: str, argv: list[str] | None = None) -> int:
    """Run a command with these arguments (default: the process's own); return its exit code.

    What the user can mend becomes one line on stderr and exit code 2.
    """
    return exit_code(lambda: importlib.import_module(find_command([command])[1]).main(argv))


def overview() -> str:
    """Return the list of commands, by folder of ea_vision."""
    width = max(map(len, COMMANDS))
    lines = ["usage: ea-vision COMMAND ...    (ea-vision COMMAND --help says more)"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:{width}}  {about}" for name, (_, about) in commands.items())]
    return "\n".join([*lines, "", "In a checkout train_cifar.py, train_imagenet.py and visualize/*.py are the same "
                                  "commands."])


def main(argv: list[str] | None = None) -> int:
    """Run `ea-vision COMMAND ARGUMENTS`; without a command, or with --help, print the list of commands."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0

    def of_command() -> int:
        name, module, rest = find_command(argv)
        sys.argv = [f"ea-vision {name}", *rest]  # what usage lines and run folders name
        return importlib.import_module(module).main()

    return exit_code(of_command)


if __name__ == "__main__":
    sys.exit(main())
