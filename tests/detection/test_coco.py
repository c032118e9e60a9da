"""`CocoFolder`: what it reads, what it mends and says, and what it refuses."""
import contextlib
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import BrokenImage
from ea_vision.detection.coco import CocoFolder, cut_box, results_of
from ea_vision.detection.evaluate import coco_metrics


def content() -> dict:
    """Two images; three categories whose ids have gaps and no order."""
    return {
        "images": [{"id": 7, "file_name": "a.png", "width": 30, "height": 20},
                   {"id": 3, "file_name": "deep/b.png", "width": 16, "height": 24}],
        "categories": [{"id": 90, "name": "cat"}, {"id": 1, "name": "ship"}, {"id": 13, "name": "dog"}],
        "annotations": [{"id": 1, "image_id": 7, "category_id": 90, "bbox": [2, 3, 10.5, 8]},
                        {"id": 2, "image_id": 7, "category_id": 13, "bbox": [0, 0, 30, 20], "area": 400, "iscrowd": 0},
                        {"id": 3, "image_id": 7, "category_id": 1, "bbox": [1, 1, 5, 5], "iscrowd": 1}],
    }


def write(root, what, images="val", file="val.json"):
    for name, size in (("a.png", (30, 20)), ("deep/b.png", (16, 24))):
        path = root / images / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((size[1], size[0], 3), 9, np.uint8)).save(path)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(what if isinstance(what, str) else json.dumps(what))
    return root


@pytest.mark.parametrize("images, file", [("val", "val.json"), ("val2017", "annotations/instances_val2017.json")])
def test_boxes_labels_and_an_image_without_boxes(tmp_path, images, file):
    data = CocoFolder(write(tmp_path, content(), images, file), "val")
    assert data.classes == ["ship", "dog", "cat"] and data.category_ids == [1, 13, 90] and not data.notes()
    image, target = data[0]
    assert image.shape == (3, 20, 30) and image.dtype == torch.uint8 and target["size"] == (20, 30)
    assert target["boxes"].tolist() == [[2, 3, 12.5, 11], [0, 0, 30, 20]]  # the crowd is not among them
    assert target["labels"].tolist() == [2, 1] and target["image_id"] == 7
    empty = data[1][1]
    assert len(data) == 2 and empty["boxes"].shape == (0, 4) and empty["labels"].shape == (0,)
    assert data.describe(1).endswith("deep/b.png")


def test_labels_map_back_to_the_ids_of_the_json(tmp_path):
    data = CocoFolder(write(tmp_path, content()), "val")
    target = data[0][1]
    rows = results_of(7, {**target, "scores": torch.tensor([0.9, 0.5])}, data.category_ids)
    assert rows == [{"image_id": 7, "category_id": 90, "bbox": [2, 3, 10.5, 8], "score": 0.9},
                    {"image_id": 7, "category_id": 13, "bbox": [0, 0, 30, 20], "score": 0.5}]
    truth = data.ground_truth()
    assert [(row["category_id"], row["area"], row["iscrowd"]) for row in truth["annotations"]] == [
        (90, 84, 0), (13, 400, 0), (1, 25, 1)]
    assert [category["id"] for category in truth["categories"]] == data.category_ids


def test_useless_boxes_are_mended_by_rule_counted_and_listed(tmp_path):
    what = content()
    boxes = [[-5, 2, 10, 40], [28, 18, 9, 9], [30, 2, 4, 4], [4, 4, 0, 3], [4, 4, -2, 3]]
    what["annotations"] = [{"id": 10 + i, "image_id": 7, "category_id": 1, "bbox": box} for i, box in enumerate(boxes)]
    what["annotations"][0] |= {"area": 70, "segmentation": [[1, 2, 3, 4, 5, 6]]}
    what["annotations"] += [{"id": 20, "image_id": 7, "category_id": 2, "bbox": [1, 1, 2, 2]},
                            {"id": 21, "image_id": 8, "category_id": 1, "bbox": [1, 1, 2, 2]}]
    data = CocoFolder(write(tmp_path, what), "val")
    assert data[0][1]["boxes"].tolist() == [[0, 2, 5, 20], [28, 18, 30, 20]]
    assert [row["area"] for row in data.ground_truth()["annotations"]] == [70, 2 * 2]
    assert "segmentation" not in data.annotations[0][0]
    assert data.problems == {"box reaches beyond the image": [10, 11],
                             "box without area inside the image": [12, 13, 14],
                             "unknown category": [20], "unknown image": [21]}
    notes = data.notes()
    assert len(notes) == 4
    assert "2 annotation(s), box reaches beyond the image: cut at its border (id 10, 11)" in notes[0]
    assert cut_box([1, 1, 2, 2], 3, 3) == [1, 1, 2, 2] and cut_box([3, 0, 1, 1], 3, 3) is None


def without(part, field):
    what = content()
    del what[part][0][field]
    return what


def with_value(part, field, value):
    what = content()
    what[part][-1][field] = value
    return what


@pytest.mark.parametrize("what, message", [
    ('{"images": [', "val.json is damaged: it is not valid JSON"),
    ("[]", "a mapping is required, got []"),
    ({**content(), "categories": None}, "categories must be a list, got None"),
    ({**content(), "images": []}, "at least one of its images"),
    (without("images", "width"), "images[0].width must be a positive whole number of pixels, got nothing"),
    (without("annotations", "bbox"), "annotations[0].bbox must be four numbers"),
    (with_value("annotations", "bbox", [1, 2, 3]), "annotations[2].bbox must be four numbers: x, y, width, height in "
                                                   "pixels, got [1, 2, 3]"),
    (with_value("annotations", "bbox", [1, 2, 3, float("nan")]), "annotations[2].bbox"),
    (with_value("annotations", "category_id", "cat"), "annotations[2].category_id must be a whole number up to "
                                                     "9007199254740992, got 'cat'"),
    (with_value("images", "file_name", "../b.png"), "images[1].file_name must be a path inside"),
    (with_value("images", "id", 7), "images[1].id must be there once, got 7"),
    (with_value("images", "file_name", "c.png"), "1 of the 2 images of"),
    (with_value("images", "file_name", "\ud800.png"), "images[1].file_name must be a path inside"),
    (with_value("images", "width", 10**400), "images[1].width must be a positive whole number of pixels, got 1000"),
    (with_value("images", "id", "7"), "images[1].id must be a whole number, as images[0].id is, got '7'"),
    (with_value("annotations", "area", -1), "annotations[2].area must be a number of at least 0, got -1"),
    (with_value("annotations", "iscrowd", None), "annotations[2].iscrowd must be 0 or 1, got None"),
])
def test_damaged_json_is_one_clear_line(tmp_path, what, message):
    with pytest.raises(UsageError) as error:
        CocoFolder(write(tmp_path, what), "val")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(UsageError, match="must have train/ with images and train.json, or COCO's own train2017/"):
        CocoFolder(write(tmp_path, content()), "train")


def test_an_image_of_another_size_or_that_is_broken(tmp_path):
    data = CocoFolder(write(tmp_path, content()), "val")
    Image.new("RGB", (20, 30)).save(data.folder / "a.png")
    with pytest.raises(BrokenImage, match="20x30 pixels, val.json says 30x20"):
        data[0]
    (data.folder / "a.png").write_bytes(b"no image")
    with pytest.raises(BrokenImage):
        data[0]


def test_select_and_fingerprint(tmp_path):
    data = CocoFolder(write(tmp_path / "one", content()), "val")
    other = CocoFolder(write(tmp_path / "two", content()), "val")
    chosen = data.select([1, 0])
    assert [chosen[index][1]["image_id"] for index in (0, 1)] == [3, 7] and data[0][1]["image_id"] == 7
    assert [len(data.select([1]).ground_truth()[part]) for part in ("images", "annotations")] == [1, 0]
    assert (before := data.fingerprint()) == other.fingerprint() != chosen.fingerprint()
    Image.new("RGB", (30, 20), "red").save(data.folder / "a.png")
    assert data.fingerprint() != before  # by its size
    (data.folder / "a.png").unlink()
    (data.folder / "a.png").symlink_to("nowhere")
    assert len(data.fingerprint()) == 64


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from([10**400, -10**400, 2**53, 1e308, "1", "\0", "\ud800", "n" * 300, ".", "a.png", 7]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=4)
TYPES = {"id": (int, str), "image_id": (int, str), "file_name": str, "width": int, "height": int, "name": str,
         "category_id": int, "bbox": list, "area": (int, float), "iscrowd": int}


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_json_holds_it_is_refused_in_one_line_or_fully_used(tmp_path, data):
    """One value of a good JSON is replaced, left out or repeated: no traceback, and nothing is accepted in silence."""
    what = content()
    part = data.draw(st.sampled_from(["images", "categories", "annotations"]))
    entry = data.draw(st.sampled_from(what[part]))
    field = data.draw(st.sampled_from(sorted(entry)))
    how = data.draw(st.sampled_from(["value", "value", "value", "inside", "missing", "entry", "part"]))
    value = data.draw(VALUES)
    if how == "value":
        entry[field] = value
    elif how == "inside" and field == "bbox":
        entry[field][data.draw(st.integers(0, 3))] = value
    elif how == "missing":
        del entry[field]
    elif how == "entry":
        what[part].append(value)
    else:
        what[part] = value
    write(tmp_path, json.dumps(what))
    try:
        found = CocoFolder(tmp_path, "val")
    except UsageError as error:
        assert "\n" not in str(error)
        assert error.__context__ is None or isinstance(error.__context__, (OSError, ValueError, RecursionError))
        return
    for rows in what.values():
        for row in rows:
            for name, kind in TYPES.items():
                assert name not in row or isinstance(row[name], kind) and (name == "iscrowd" or row[name] is not True)
    left_out = [ids for wrong, ids in found.problems.items() if wrong != "box reaches beyond the image"]
    assert sum(map(len, found.annotations)) + sum(map(len, left_out)) == len(what["annotations"])
    assert len(found.notes()) == len(found.problems) and len(found.fingerprint()) == 64
    for index in range(len(found)):
        with contextlib.suppress(BrokenImage):
            image, target = found[index]
            height, width = target["size"]
            assert ((target["boxes"] >= 0) & (target["boxes"] <= torch.tensor([width, height] * 2))).all()
    if not found.num_boxes():
        return
    rows = [{key: row[key] for key in ("image_id", "category_id", "bbox")} | {"score": 0.9}
            for row in found.ground_truth()["annotations"] if not row["iscrowd"]]
    assert coco_metrics(found.ground_truth(), rows)[0]["AP"] == pytest.approx(100)
