"""Check for `make release` that a release is complete: the same version everywhere, changelog, tag, wheel and sdist.

python -m tests.release            # after `python -m build`; exit code 1 names what is missing
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import ea_vision
from tests.process import ROOT

HERE = "tests/release.py"


def problems(version, tags, root=ROOT):
    """Return what a release of `version` lacks, one sentence each; the built files lie in root/dist."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    citation = (root / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    wheel = root / "dist" / f"ea_vision-{version}-py3-none-any.whl"
    sdist = root / "dist" / f"ea_vision-{version}.tar.gz"
    suffixes = set()
    if wheel.is_file():
        suffixes = {Path(name).suffix for name in zipfile.ZipFile(wheel).namelist()}
    packed = []
    if sdist.is_file():
        with tarfile.open(sdist) as archive:
            packed = archive.getnames()
    requirements = {
        f"CHANGELOG.md must have a section '## {version}'": f"## {version}" in changelog,
        f"CITATION.cff must say 'version: {version}'": f"version: {version}" in citation,
        f"the commit must have the tag v{version}, got {tags}": f"v{version}" in tags,
        f"dist must have {wheel.name} with the shipped weights": ".safetensors" in suffixes,
        f"dist must have {sdist.name} with the tests": f"ea_vision-{version}/{HERE}" in packed,
    }
    return [sentence for sentence, is_met in requirements.items() if not is_met]


def main():
    command = ["git", "tag", "--points-at", "HEAD"]
    tags = subprocess.check_output(command, cwd=ROOT, text=True).split()
    missing = problems(ea_vision.__version__, tags)
    for sentence in missing:
        print(f"error: {sentence}", file=sys.stderr)
    if not missing:
        print(
            f"ea_vision {ea_vision.__version__} is ready: push the tag, and the workflow publishes it"
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
