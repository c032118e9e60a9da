"""The quick start: the notebook equals what its script writes, and its cells run."""

import base64
import io
import runpy
import shutil
from pathlib import Path

import nbformat
import pytest
from PIL import Image

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "quickstart.py"))


def outputs(book):
    """Return the cells' printed texts (one per cell), pictures and HTML pages."""
    texts = []
    pictures = []
    pages = []
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        texts.append("")
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "stream":
                texts[-1] += output.text
            if "image/png" in data:
                picture = io.BytesIO(base64.b64decode(data["image/png"]))
                pictures.append(Image.open(picture))
            if "text/html" in data:
                pages.append(data["text/html"])
    return texts, pictures, pages


def cells_of(book):
    return [(cell.cell_type, cell.source) for cell in book.cells]


def test_the_stored_notebook_is_the_scripts(script):
    path = DOCS / "quickstart.ipynb"
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    assert cells_of(stored) == cells_of(script["notebook"]()), "run docs/quickstart.py"
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    _, pictures, _ = outputs(stored)
    assert len(pictures) == 2
    assert path.stat().st_size < 1_000_000
    assert str(Path.home()) not in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_its_cells_run(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shutil.copy(DOCS / "cat.jpg", tmp_path)
    book = script["run"](script["notebook"](), tmp_path)
    texts, pictures, [page] = outputs(book)
    _, top, _, _, _, _, numbers, vit = texts
    name, share = top.split()[:2]
    assert name == "cat"
    assert float(share) > 0.5
    assert numbers.count("entropy by head") == 3
    assert "difference of the logits below 1e-5: True" in vit
    stored, _, _ = outputs(nbformat.read(DOCS / "quickstart.ipynb", as_version=4))
    for text, kept in zip(texts, stored, strict=True):
        assert text.count("\n") == kept.count("\n")
    assert page.startswith("<iframe srcdoc=")
    assert "Where the heads look" in page
    assert len(pictures) == 2
    for picture in pictures:
        colours = picture.convert("RGB").getcolors(picture.width * picture.height)
        assert picture.width > 400
        assert len(colours) > 1000
