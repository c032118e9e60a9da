"""The recorded commit is that of the package's own repository."""

import shutil
import subprocess

import pytest

from ea_vision.base import provenance


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_repository_that_holds_the_environment_is_not_the_packages(
    tmp_path, monkeypatch
):
    def git(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    package = tmp_path / ".venv" / "ea_vision"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(provenance, "PACKAGE", package)
    git("init")
    git("add", "mine.py")
    git("commit", "-m", "of the user")
    assert provenance.provenance()["git_commit"] is None
    git("add", ".")
    git("commit", "-m", "of the package")
    assert provenance.provenance()["git_commit"] == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed = True")
    assert provenance.provenance()["git_commit"] == git("rev-parse", "HEAD") + "+changes"
