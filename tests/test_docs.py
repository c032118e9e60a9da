"""README and docs: their links exist, their commands have the options they name, their Python runs."""

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
import transformers
from PIL import Image

import ea_vision
from ea_vision.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
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


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks of a language, without their indentation."""
    found = [match for match in BLOCK.finditer(page.read_text()) if match[2] == language]
    return [
        "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines()) for match in found
    ]


def commands(page: Path) -> list[list[str]]:
    """The words of every command of ours in the page's shell blocks: its name first."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            ours = re.search(r"(?:ea-vision|-m ea_vision) +([a-z][\w-]*.*)", line)
            if ours and not line.startswith("#"):
                words = shlex.split(ours[1], comments=True)
                found.append(
                    words[:-1] if words[-1] == "&" else words
                )  # SLURM's script runs it in the background
    return found


@functools.cache
def help_of(command: str) -> str:
    text = io.StringIO()
    words = command.split()
    flag = "--help-all" if words[0] in TRAINERS else "--help"
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*words, flag])
    return text.getvalue()


def anchors(page: Path) -> list[str]:
    """Return the names by which links find a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=str)
def test_links_inside_the_repository_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert "://" in link or target.exists(), link
        assert "://" in link or not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=str)
def test_commands_have_the_options_that_are_named(page):
    for command, *words in commands(page):
        assert command in COMMANDS, command
        ours = words[: words.index("--")] if "--" in words else words
        if command == "timm":  # the options are those of timm's script
            continue
        if words[:1] == ["--sizes"]:
            command, ours = f"{command} --sizes", ours[1:]
        for flag in {word.partition("=")[0] for word in ours if word.startswith("--")} - {"--help"}:
            assert re.search(rf"{flag}\b", help_of(command)), f"{command} {flag}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 800
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 900


def test_readme_records_and_draws(tmp_path, monkeypatch):
    """The first block of README; transformers' weights, which are not at hand, are random."""
    small = transformers.ViTConfig(hidden_size=24, num_attention_heads=6, intermediate_size=32)
    monkeypatch.setattr(
        transformers.ViTModel, "from_pretrained", lambda name: transformers.ViTModel(small)
    )
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (60, 40), (90, 140, 220)).save("photo.jpg")
    space = {"images": torch.randn(2, 3, 224, 224)}
    exec(compile(blocks(ROOT / "README.md", "python")[0], "README.md", "exec"), space)
    assert space["maps"][12].attn.shape == (2, 6, 197, 197)
    assert Path("maps.pdf").read_bytes().startswith(b"%PDF")


def test_readme_creates(monkeypatch):
    """The second block of README; timm's weights, which are not at hand, are random."""
    create = timm.create_model

    def create_offline(name, pretrained=False, **keywords):
        shipped = name == "ea_conv_transformer_cifar"
        return create(name, pretrained=pretrained and shipped, **keywords)

    monkeypatch.setattr(timm, "create_model", create_offline)
    space = {}
    exec(compile(blocks(ROOT / "README.md", "python")[1], "README.md", "exec"), space)
    assert space["model"].eval()(torch.randn(1, 3, 224, 224)).shape == (1, 1000)
    assert len(space["backbone"](torch.randn(1, 3, 64, 64))) == 5


def test_the_citation_is_of_this_version():
    assert f"\nversion: {ea_vision.__version__}\n" in (ROOT / "CITATION.cff").read_text()
