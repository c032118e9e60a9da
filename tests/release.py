"""Check for `make release` that a release is complete: the same version everywhere, changelog, tag, wheel and sdist.

python -m tests.release            # after `python -m build`; exit code 1 names what is missing
"""

import re
import subprocess
import sys
import tarfile
import zipfile

import ea_vision
from tests.process import ROOT


def problems(version, tags, root=ROOT):
    """Return what a release of `version` lacks, one sentence each; the built files lie in root/dist."""
    missing = []
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}$", changelog, re.MULTILINE):
        missing.append(f"CHANGELOG.md must have a section '## {version}'")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        missing.append(f"CITATION.cff must say 'version: {version}'")
    if f"v{version}" not in tags:
        missing.append(
            f"the commit must have the tag v{version}, got {', '.join(tags) or 'no tag'}"
        )
    wheel = root / "dist" / f"ea_vision-{version}-py3-none-any.whl"
    if not wheel.is_file():
        missing.append(f"dist must have {wheel.name}")
    elif not any(name.endswith(".safetensors") for name in zipfile.ZipFile(wheel).namelist()):
        missing.append(f"{wheel.name} must hold the shipped weights")
    sdist = root / "dist" / f"ea_vision-{version}.tar.gz"
    if not sdist.is_file():
        missing.append(f"dist must have {sdist.name}")
    else:
        with tarfile.open(sdist) as archive:
            names = archive.getnames()
        if f"ea_vision-{version}/tests/release.py" not in names:
            missing.append(f"{sdist.name} must hold the tests")
    return missing


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
