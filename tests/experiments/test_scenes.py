"""The scenes' split is the same on every machine and has every labelled photo once; a damaged list is an error."""

from experiments.scenes import split as scenes


def test_every_photo_is_in_one_part_and_the_order_of_the_list_does_not_matter():
    names = [f"{index}.jpg" for index in range(17_034)]
    parts = scenes.split(names)
    assert [len(parts[part]) for part in ("train", "validation", "test")] == [13_000, 1_500, 2_534]
    assert sorted(sum(parts.values(), [])) == sorted(names)
    assert scenes.split(names[::-1]) == parts
    assert parts["test"][:3] == [
        "4725.jpg",
        "5872.jpg",
        "14996.jpg",
    ]  # pinned, so that later runs get the same split


def test_photos_land_in_folders_of_their_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scenes, "SIZES", {"train": 3, "validation": 1})
    (tmp_path / "train").mkdir()
    rows = ["image_name,label"]
    for index in range(6):
        (tmp_path / "train" / f"{index}.jpg").write_bytes(bytes([index]))
        rows.append(f"{index}.jpg,{5 - index}")
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    assert scenes.main([str(tmp_path), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "train: 3 photos",
        "validation: 1 photos",
        "test: 2 photos",
    ]
    for photo in (tmp_path / "out").rglob("*.jpg"):
        number = photo.read_bytes()[0]
        assert (photo.name, photo.parent.name) == (f"{number}.jpg", scenes.CLASSES[5 - number])
