"""`make release` refuses other versions and a missing changelog, tag or built file."""

import tarfile
import zipfile

from tests.release import problems


def make_release(root, version):
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version}\n", encoding="utf-8")
    (root / "CITATION.cff").write_text(f"title: x\nversion: {version}\n", encoding="utf-8")
    (root / "dist").mkdir()
    with zipfile.ZipFile(root / "dist" / f"ea_vision-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ea_vision/weights/a.safetensors", b"")
    test = root / "release.py"
    test.write_text("", encoding="utf-8")
    with tarfile.open(root / "dist" / f"ea_vision-{version}.tar.gz", "w:gz") as sdist:
        sdist.add(test, f"ea_vision-{version}/tests/release.py")


def test_each_part_that_a_release_lacks_is_named(tmp_path):
    make_release(tmp_path, "1.2.3")
    assert problems("1.2.3", ["v1.2.3"], tmp_path) == []
    lines = problems("1.2.4", ["v1.2.3"], tmp_path)
    for line, part in zip(
        lines,
        ("CHANGELOG.md", "CITATION.cff", "tag v1.2.4, got ['v1.2.3']", "1.2.4-py3", "1.2.4.tar"),
        strict=True,
    ):
        assert part in line
