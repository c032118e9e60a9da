"""README and docs: their links exist, their commands have the options they name, their Python runs."""
import ast
import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from ea_vision.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "experiments").glob("[a-z]*.md"))]
LEAVING = {  # commands that become scripts or go, and on the pages until these are rewritten
    "reproduce", "match", "matrix", "rollout"}
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks of a language, without their indentation."""
    found = [match for match in BLOCK.finditer(page.read_text()) if match[2] == language]
    return ["\n".join(line.removeprefix(match[1]) for line in match[3].splitlines()) for match in found]


def commands(page: Path) -> list[list[str]]:
    """The words of every command of ours in the page's shell blocks: its name first."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            ours = re.search(r"(?:ea-vision|-m ea_vision) +([a-z][\w-]*.*)", line)
            if ours and not line.startswith("#"):
                words = shlex.split(ours[1], comments=True)
                if words[0] not in LEAVING:
                    found.append(words[:-1] if words[-1] == "&" else words)  # SLURM's script runs it in the background
    return found


@functools.cache
def help_of(command: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return text.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_exist(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_are_named(page):
    for command, *words in commands(page):
        assert command in COMMANDS, command
        ours = words[:words.index("--")] if "--" in words else words
        if command == "timm":  # the options are those of timm's script
            continue
        if words[:1] == ["--sizes"]:
            command, ours = f"{command} --sizes", ours[1:]
        for flag in {word.partition("=")[0] for word in ours if word.startswith("--")} - {"--help"}:
            assert re.search(rf"{flag}\b", help_of(command)), f"{command} {flag}"


def test_the_pages_show_commands():
    assert len([command for page in PAGES for command in commands(page)]) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_python(page):
    for block in blocks(page, "python"):
        ast.parse(block)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1000


def test_readme_names_a_photo(tmp_path, monkeypatch, capsys):
    Image.new("RGB", (60, 40), (90, 140, 220)).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    first = blocks(ROOT / "README.md", "python")[0]
    exec(compile(first, "README.md", "exec"), {})
    printed = ast.literal_eval(capsys.readouterr().out)
    assert len(printed) == 5 and printed[0][1] >= printed[-1][1] > 0


def test_readme_creates_and_records():
    _, creates, records = blocks(ROOT / "README.md", "python")
    space = {"timm": timm, "images": torch.randn(2, 3, 32, 32)}
    exec(compile("import ea_vision\n" + creates, "README.md", "exec"), space)
    space["model"] = timm.create_model("ea_conv_transformer_cifar")
    exec(compile(records, "README.md", "exec"), space)
    assert space["maps"][2].attn.shape == (2, 4, 64, 64)
