"""mkdocs hooks: which files the site has, and pages of the API reference from the docstrings.

Every tracked file of docs/, experiments/ and visualize/ keeps its path in the site, so links between pages hold
there as they hold in the repository; README.md is the front page.
"""

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from reference import PAGES, ROOT, entries  # noqa: E402  (beside this file, which mkdocs runs by its path)

ROOMS = ("docs", "experiments", "visualize", "weights", "slurm", "tests/outside")
SINGLE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff")
LEFT_OUT = {".safetensors"}


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
    for page, names in entries().items():
        title, modules = PAGES[page]
        blocks = [f"# {title}"]
        for module in modules:
            blocks.append(
                f"::: {module}\n    options: {{members: false, show_root_heading: false}}"
            )
        for name, place in names.items():
            blocks.append(
                f"::: {place}\n    options: {{heading: {name}, toc_label: {name.rpartition('.')[2]}}}"
            )
        boost = (
            "---\nsearch:\n  boost: 3\n---\n\n" if page == "start" else ""
        )  # a name's own entry is the first hit
        text = boost + "\n\n".join(blocks) + "\n"
        files.append(File.generated(config, f"reference/{page}.md", content=text))
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
