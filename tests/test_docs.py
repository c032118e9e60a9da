"""README and docs: their links exist, their commands have the options they name."""

import ast
import contextlib
import functools
import importlib
import io
import re
import runpy
import shlex
import types

import pytest

import ea_vision
from ea_vision.__main__ import COMMANDS, main
from tests.process import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").glob("[a-z]*.md")),
]
OTHERS = [
    *(ROOT / "experiments").glob("*/**/README.md"),
    *(ROOT / "weights").glob("*.md"),
    ROOT / "CONTRIBUTING.md",
]
TRAINERS = ("train-cifar", "train-imagenet", "train-detection")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """Return the page's code blocks of a language, without their indentation."""
    matches = []
    for indentation, of_language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if of_language == language:
            lines = [line.removeprefix(indentation) for line in block.splitlines()]
            matches.append("\n".join(lines))
    return matches


def commands(page):
    """Return the words of each of our commands in the page's shell blocks, beginning with its name."""
    matches = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            ours = re.search(r"(?:ea-vision|-m ea_vision) +([a-z][\w-]*.*)", line)
            if ours and not line.startswith("#"):
                words = shlex.split(ours[1], comments=True)
                if words[-1] == "&":  # SLURM's script runs it in the background
                    words.pop()
                matches.append(words)
    return matches


@functools.cache
def help_of(command):
    text = io.StringIO()
    words = command.split()
    flag = "--help-all" if words[0] in TRAINERS else "--help"
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*words, flag])
    return text.getvalue()


def anchors(page):
    """Return the names by which links find a page's headings."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=str)
def test_links_inside_the_repository_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=str)
def test_commands_have_the_options_that_are_named(page):
    for command, *words in commands(page):
        assert command in COMMANDS, command
        if command == "timm":  # the options are those of timm's script
            continue
        if "--" in words:
            words = words[: words.index("--")]
        if words[:1] == ["--sizes"]:
            command = f"{command} --sizes"
            words = words[1:]
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        for flag in flags - {"--help"}:
            assert re.search(rf"{flag}\b", help_of(command)), f"{command} {flag}"


@pytest.mark.parametrize("name, words", [("README.md", 800), ("CHANGELOG.md", 900)])
def test_they_are_short(name, words):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(text.split()) <= words


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {ea_vision.__version__}\n" in citation


REFERENCES = runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))


def thing_at(name):
    """Return the module of a dotted name, or the object in the longest module of it; AttributeError without one."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            thing = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, words[count:], thing)
    raise AttributeError(name)


def names_of(page):
    """Return the names of this package that a page's Python and `code` use."""
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w/.])ea_vision(?:\.[A-Za-z_]\w*)+", text))
    for module, imported in re.findall(r"from (ea_vision[\w.]*) import ([\w, ]+)", text):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    return names


def test_each_name_on_the_pages_has_an_entry_in_the_reference():
    documented = {}
    for names in REFERENCES["entries"]().values():
        documented |= names
    assert len(set(documented.values())) == len(documented), "a function has one entry"
    objects = [thing_at(place) for place in documented.values()]
    for name, place in documented.items():
        assert thing_at(name) is thing_at(place), name
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for name in sorted(names_of(page)):
            thing = thing_at(name)
            is_module = isinstance(thing, types.ModuleType)
            if not is_module and not any(thing is other for other in objects):
                missing.append((page.name, name))
    assert missing == []


def test_names_in_docstrings_exist():
    for path in (ROOT / "ea_vision").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for name in re.findall(r"`(ea_vision(?:\.\w+)+)`", ast.get_docstring(node) or ""):
                    assert thing_at(name), path
