"""The quick start: the notebook is what its script writes, and its cells run."""

import base64
import io
import runpy
import shutil
from pathlib import Path

import pytest
from PIL import Image

DOCS = Path(__file__).resolve().parents[1] / "docs"
needs = "needs nbclient, nbformat and ipykernel (the extra dev)"
_, _, nbformat = (
    pytest.importorskip(name, reason=needs) for name in ("nbclient", "ipykernel", "nbformat")
)


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(DOCS / "quickstart.py"))


def outputs(book) -> tuple[list[str], list[Image.Image], list[str]]:
    """What the cells printed, one text a cell; their pictures; their pages."""
    cells = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    data = [output.data for of_cell in cells for output in of_cell if "data" in output]
    return (
        [
            "".join(output.text for output in of_cell if output.output_type == "stream")
            for of_cell in cells
        ],
        [
            Image.open(io.BytesIO(base64.b64decode(one["image/png"])))
            for one in data
            if "image/png" in one
        ],
        [one["text/html"] for one in data if "text/html" in one],
    )


def test_the_stored_notebook_is_the_scripts(script):
    stored = nbformat.read(DOCS / "quickstart.ipynb", as_version=4)
    nbformat.validate(stored)
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
        (cell.cell_type, cell.source) for cell in script["notebook"]().cells
    ], "run docs/quickstart.py"
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    assert len(outputs(stored)[1]) == 2 and (DOCS / "quickstart.ipynb").stat().st_size < 1_000_000
    assert str(Path.home()) not in (DOCS / "quickstart.ipynb").read_text()


@pytest.mark.slow
def test_its_cells_run(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shutil.copy(DOCS / "cat.jpg", tmp_path)
    book = script["run"](script["notebook"](), tmp_path)
    texts, pictures, [page] = outputs(book)
    _, top, _, _, _, _, numbers, vit = texts
    name, share = top.split()[:2]
    assert name == "cat" and float(share) > 0.5
    assert (
        numbers.count("entropy by head") == 3 and "difference of the logits below 1e-5: True" in vit
    )
    stored = outputs(nbformat.read(DOCS / "quickstart.ipynb", as_version=4))[0]
    assert [len(text.splitlines()) for text in texts] == [len(text.splitlines()) for text in stored]
    assert (
        len(pictures) == 2 and page.startswith("<iframe srcdoc=") and "Where the heads look" in page
    )
    for picture in pictures:
        assert (
            picture.width > 400
            and len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 1000
        )
