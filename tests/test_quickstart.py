"""The quick start: the notebook is what its script writes, and its cells run."""
import base64
import io
import runpy
import shutil
from pathlib import Path

import pytest
from PIL import Image

DOCS = Path(__file__).resolve().parents[1] / "docs"
pytest.importorskip("nbclient", reason="needs nbclient, nbformat and ipykernel (the extra dev)")
pytest.importorskip("ipykernel", reason="needs nbclient, nbformat and ipykernel (the extra dev)")
nbformat = pytest.importorskip("nbformat", reason="needs nbclient, nbformat and ipykernel (the extra dev)")


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(DOCS / "quickstart.py"))


def texts(book) -> list[str]:
    """What the cells printed."""
    return ["".join(output.text for output in cell.outputs if output.output_type == "stream")
            for cell in book.cells if cell.cell_type == "code"]


def pictures(book) -> list[Image.Image]:
    """The PNG outputs."""
    return [Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))) for cell in book.cells
            for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]


def test_the_stored_notebook_is_the_scripts(script):
    stored = nbformat.read(DOCS / "quickstart.ipynb", as_version=4)
    nbformat.validate(stored)
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
        (cell.cell_type, cell.source) for cell in script["notebook"]().cells], "run docs/quickstart.py"
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    assert len(pictures(stored)) == 2 and (DOCS / "quickstart.ipynb").stat().st_size < 1_000_000
    assert str(Path.home()) not in (DOCS / "quickstart.ipynb").read_text()


@pytest.mark.slow
def test_its_cells_run(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shutil.copy(DOCS / "cat.jpg", tmp_path)
    book = script["run"](script["notebook"](), tmp_path)
    _, top, _, _, _, _, numbers, vit = texts(book)
    first = top.split()[:2]
    assert first[0] == "cat" and float(first[1]) > 0.5
    assert numbers.count("entropy by head") == 3 and "difference of the logits below 1e-5: True" in vit
    stored = texts(nbformat.read(DOCS / "quickstart.ipynb", as_version=4))
    assert [len(text.splitlines()) for text in texts(book)] == [len(text.splitlines()) for text in stored]
    for picture in pictures(book):
        assert picture.width > 400 and len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 1000
    assert len(pictures(book)) == 2
    [page] = [output.data["text/html"] for cell in book.cells for output in cell.get("outputs", [])
              if "text/html" in output.get("data", {})]
    assert page.startswith("<iframe srcdoc=") and "layer by layer" in page
