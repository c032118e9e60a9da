"""The commands of ea_vision: `ea-vision COMMAND`, which is `python -m ea_vision COMMAND`."""

import importlib
import sys

from ea_vision import __version__
from ea_vision.base.errors import UsageError, exit_code, near_matches

COMMANDS = {  # name: (module whose main(argv) runs it, what it does); a new command needs a line here and a module
    "train-cifar": (
        "ea_vision.engine.train_cifar",
        "train on small images: digits, CIFAR, your own folders",
    ),
    "train-imagenet": (
        "ea_vision.engine.train_imagenet",
        "train on ImageNet or any images in class folders",
    ),
    "train-detection": (
        "ea_vision.detection.train",
        "train a RetinaNet on COCO or your own images with boxes",
    ),
    "timm": ("ea_vision.timm", "run one of timm's own scripts with our models registered"),
    "write-ffcv": (
        "ea_vision.data.write_ffcv",
        "write images into an FFCV file, which is read faster",
    ),
    "predict": ("ea_vision.predict", "the likeliest classes of images, as text or JSON"),
    "export": ("ea_vision.export", "write a network as ONNX or torch.export"),
    "models": ("ea_vision.sizes", "names, weights and (--sizes) parameters and GMACs of networks"),
    "probe": (
        "ea_vision.recorder.probe",
        "classify images from their attention maps (EA paper, table 7)",
    ),
    "heatmap": (
        "ea_vision.visualize.heatmap",
        "attention of query points by head, of several models or images",
    ),
    "strip": (
        "ea_vision.visualize.strip",
        "a map from layer to layer, part by part, or what evolution changed",
    ),
    "matrix": ("ea_vision.visualize.matrix", "whole maps of a layer's heads, queries by keys"),
    "rollout": (
        "ea_vision.visualize.rollout",
        "where pixels of the last map come from, through all layers",
    ),
    "statistics": ("ea_vision.visualize.statistics", "entropy, distance, ... by layer and head"),
    "explore": (
        "ea_vision.visualize.explore",
        "one HTML page: click a pixel, see every head of every layer",
    ),
}
OVERVIEW = """\
usage: ea-vision COMMAND ...    (ea-vision COMMAND --help says more; ea-vision --version)

start here:
  ea-vision predict ea_conv_transformer_cifar photo.jpg    what a photo shows, by shipped weights
  ea-vision explore -o page.html photo.jpg                 where attention looks: a page of its maps
  ea-vision train-cifar                                    train on digits, without a download

commands:"""


def run(command: str, argv: list[str] | None = None) -> int:
    """Run a command with these arguments (default: the process's own); return its exit code.

    Errors that the user can correct become one line on stderr and exit code 2.
    """

    def of_command() -> int:
        if command not in COMMANDS:
            raise UsageError(
                f"unknown command {command!r}; {near_matches(command, COMMANDS, 'commands')}"
            )
        return importlib.import_module(COMMANDS[command][0]).main(argv)

    return exit_code(of_command)


def main(argv: list[str] | None = None) -> int:
    """Run `ea-vision COMMAND ARGUMENTS`; without a command, or with --help, print the list of commands."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] not in ("-h", "--help", "--version"):
        sys.argv = [f"ea-vision {argv[0]}", *argv[1:]]  # what usage lines and run folders name
        return run(argv[0])
    lines = [OVERVIEW, *(f"  {name:17}{about}" for name, (_, about) in COMMANDS.items())]
    text = f"ea-vision {__version__}" if argv == ["--version"] else "\n".join(lines)
    return exit_code(lambda: print(text) or 0)


if __name__ == "__main__":
    sys.exit(main())
