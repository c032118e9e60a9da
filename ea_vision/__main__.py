"""All commands of ea_vision: `ea-vision COMMAND`, which is `python -m ea_vision COMMAND`."""

from __future__ import annotations

import importlib
import sys

from ea_vision.base.errors import UsageError, exit_code, near_matches

COMMANDS = {  # name: (module whose main(argv) runs it, what it does)
    "train-cifar": ("ea_vision.engine.train_cifar", "train on small images: digits, CIFAR, your own folders"),
    "train-imagenet": ("ea_vision.engine.train_imagenet", "train on ImageNet or any images in class folders"),
    "sweep": ("ea_vision.engine.sweep", "train once per setting and draw accuracy over the settings"),
    "heatmap": ("ea_vision.visualize.attention_heatmap", "attention of query points by head"),
    "strip": ("ea_vision.visualize.evolution_strip", "a map from layer to layer, part by part"),
    "matrix": ("ea_vision.visualize.attention_matrix", "whole maps, queries by keys"),
    "rollout": ("ea_vision.visualize.attention_rollout", "attention over several layers together"),
    "statistics": ("ea_vision.visualize.attention_statistics", "entropy, distance, ... by layer and head"),
    "animation": ("ea_vision.visualize.attention_animation", "a map over layers, or over a training run"),
    "compare": ("ea_vision.visualize.compare_models", "the same layers of several models side by side"),
    "explore": ("ea_vision.visualize.explore", "one HTML page: click a pixel, see every head of every layer"),
    "probe": ("ea_vision.analysis.probe", "classify images from their attention maps (EA paper, table 7)"),
    "summary": ("ea_vision.measure.summary", "parameters and GFLOPs beside the published ones"),
    "benchmark": ("ea_vision.measure.speed", "training and inference speed and memory of networks side by side"),
    "memory": ("ea_vision.measure.memory", "what a training step needs, by layer"),
    "write-ffcv": ("ea_vision.data.write_ffcv", "write images into an FFCV file"),
    "loaders": ("ea_vision.measure.loaders", "images per second of the loaders"),
    "export": ("ea_vision.engine.export", "export a complete run to a weights file with its card"),
    "timm": ("ea_vision.timm_scripts", "run one of timm's own scripts with our models registered"),
}


def run(command: str, argv: list[str] | None = None) -> int:
    """Run a command with these arguments (default: the process's own); return its exit code.

    What the user can mend becomes one line on stderr and exit code 2.

    Raises:
        UsageError: no such command.
    """
    if command not in COMMANDS:
        raise UsageError(f"unknown command {command!r}; {near_matches(command, COMMANDS, 'commands')}")
    return exit_code(lambda: importlib.import_module(COMMANDS[command][0]).main(argv))


def main(argv: list[str] | None = None) -> int:
    """`ea-vision COMMAND ARGUMENTS`; without a command, or with --help, the list of commands."""
    own = argv is None
    argv = sys.argv[1:] if own else argv
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: ea-vision COMMAND ...    (ea-vision COMMAND --help says more)\n")
        print("\n".join(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items()))
        return 0 if argv else 2
    if own and argv[0] in COMMANDS:
        sys.argv = [f"ea-vision {argv[0]}", *argv[1:]]  # what usage lines and run folders name
    return exit_code(lambda: run(argv[0], None if own else argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
