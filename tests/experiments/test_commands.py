"""Commands on the pages and in the docstrings of experiments/ name options, networks and keywords that exist."""

import argparse
import ast
import re
import runpy
import shlex
import sys

import pytest

from ea_vision.engine import run, train_cifar, train_imagenet
from ea_vision.engine.config import make_parser, parse, resolve
from experiments import sweep
from tests.process import ROOT
from tests.test_docs import blocks

FOLDER = ROOT / "experiments"
TRAINERS = {
    "train_cifar.py": train_cifar.SmallImages,
    "train_imagenet.py": train_imagenet.ClassFolders,
}
pytestmark = pytest.mark.slow


def lines_of_pages():
    lines = []
    for page in sorted(FOLDER.rglob("*.md")):
        for block in blocks(page, "sh"):
            lines += block.replace("\\\n", " ").splitlines()
    for script in sorted(FOLDER.rglob("*.py")):
        module = ast.parse(script.read_text(encoding="utf-8"))
        lines += (ast.get_docstring(module) or "").splitlines()
    return lines


def commands():
    """Return the words after python of each command, without repetitions; options in brackets are included, and common
    ones, which a page names once, are left out (...)."""
    commands_by_script = {}
    for line in lines_of_pages():
        words = re.match(r" *(?:\w+=\S+ )*python (?!-c)(.*)", line.replace("$seed", "0"))
        if words:
            options = re.sub(r"\[(--.*?)(?: \.\.\.)?\]", r"\1", words[1])
            commands_by_script[options.rstrip("\\ .")] = None
    return list(commands_by_script)


class Parsed(BaseException):
    """Raised with the parsed arguments in place of running the command."""


def parsed_by_its_own_parser(words, monkeypatch):
    """Return the arguments as parsed by the script's own parser, None if it has no parser."""
    parse_known = argparse.ArgumentParser.parse_known_args

    def stop(self, args=None, namespace=None):
        raise Parsed(*parse_known(self, args, namespace))

    is_module = words[0] == "-m"
    name = words[1] if is_module else words[0]
    script = ROOT / (f"{name.replace('.', '/')}.py" if is_module else name)
    if "Parser(" not in script.read_text(encoding="utf-8"):
        return None
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", words[is_module:])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(str(script), run_name="__main__")
    arguments, unknown = parsed.value.args
    assert unknown == []
    return arguments


def check_trainer(module, words):
    if "--evaluate" in words:
        place = words.index("--evaluate")
        words = words[:place] + words[place + 2 :]
    config = resolve(module.options, parse(make_parser(module.options, "", ""), words))
    run.check_names(module, config)


@pytest.mark.parametrize("line", commands())
def test_what_a_command_names_is_there(line, monkeypatch):
    words = shlex.split(line, comments=True)
    if words[0] in TRAINERS:
        check_trainer(TRAINERS[words[0]], words[1:])
        return
    arguments = parsed_by_its_own_parser(words, monkeypatch)
    monkeypatch.undo()
    if words[:2] == ["-m", "experiments.sweep"]:
        variants = sweep.with_settings(sweep.parse_variants(arguments.variants), arguments.keywords)
        for own in variants.values():
            check_trainer(train_cifar.SmallImages, [*arguments.arguments, *own])
