"""mkdocs hooks: which files the site has, and pages of the API reference from the docstrings.

Every tracked file of docs/, experiments/ and visualize/ keeps its path in the site, so links between pages hold
there as they hold in the repository; README.md is the front page.
"""

import ast
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("docs", "experiments", "visualize", "weights", "slurm", "tests/outside")
SINGLE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff")
LEFT_OUT = {".safetensors"}

# Page of the reference: its title, and the modules whose public names it documents.
REFERENCE = {
    "models": ("Networks and evolve", ["ea_vision.models"]),
    "layers": ("Layers", ["ea_vision.layers"]),
    "ops": ("Operators", ["ea_vision.ops"]),
    "recorder": (
        "Record",
        [
            "ea_vision.recorder.recording",
            "ea_vision.recorder.maps",
            "ea_vision.recorder.quantities",
        ],
    ),
    "visualize": ("Figures", ["ea_vision.visualize"]),
    "deployment": ("Deploy and export", ["ea_vision.deployment"]),
    "detection": ("Detection", ["ea_vision.detection.model"]),
}


def public_names(module: str) -> list[str]:
    """Return the public names that a package imports from its own files, or that a file defines."""
    path = ROOT / module.replace(".", "/")
    is_package = path.is_dir()
    text = (path / "__init__.py" if is_package else path.with_suffix(".py")).read_text("utf-8")
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and is_package:
            if str(node.module).startswith("ea_vision"):
                names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
    return sorted(name for name in names if not name.startswith("_"))


def tracked() -> list[str]:
    """Return the paths of the repository's files that the site has."""
    command = ["git", "ls-files", "--", *ROOMS, *SINGLE]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    kept = []
    for name in names:
        if Path(name).suffix not in LEFT_OUT and not name.startswith("docs/site/"):
            kept.append(name)
    return kept


@event_priority(100)  # before the plugin that renders notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's files and the pages of the reference."""
    for name in tracked():
        if name == "README.md":
            files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / name)))
        else:
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for name, (title, modules) in REFERENCE.items():
        blocks = []
        for module in modules:
            blocks.append(
                f"::: {module}\n    options: {{members: false, show_root_heading: false}}"
            )
            blocks += [f"::: {module}.{public}" for public in public_names(module)]
        text = "\n\n".join([f"# {title}", *blocks]) + "\n"
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^):#]+)(?P<rest>#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the repository's README.md to the front page; keep only the text of links to folders."""
    here = posixpath.dirname(page.file.src_uri)

    def for_the_site(link: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(here, link["target"]))
        if (ROOT / path).is_dir():
            return link["text"]
        if path == "README.md":
            front = posixpath.relpath("index.md", here or ".")
            return f"[{link['text']}]({front}{link['rest'] or ''})"
        return link[0]

    return LINK.sub(for_the_site, markdown)
