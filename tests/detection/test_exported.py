"""An exported detector finds what the detector finds: boxes within 1e-4 of the image's side, the same labels."""
import json

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.detection.exported import TOLERANCE, ExportedDetector, export
from ea_vision.export import detections_differ, main, runner
from ea_vision.recorder.loading import load_model
from tests.detection.tiny import CLASSES, SIDE, tiny_detector, tiny_run


@pytest.mark.parametrize("thresholds", [{}, {"score_thresh": 0.6, "nms_thresh": 0.2}, {"topk_candidates": 7},
                                        {"score_thresh": 1.0}])
def test_the_exported_form_finds_what_the_detector_finds(thresholds):
    detector = tiny_detector()
    for name, value in thresholds.items():
        setattr(detector, name, value)
    form, counts = ExportedDetector(detector), []
    for seed in range(3):
        image = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            own, got = detector([image])[0], form(image[None])
        assert got[2].tolist() == own["labels"].tolist()
        torch.testing.assert_close(got[0], own["boxes"], atol=1e-4, rtol=0)
        torch.testing.assert_close(got[1], own["scores"])
        counts.append(len(got[1]))
    assert max(counts) == 0 if thresholds.get("score_thresh") == 1.0 else min(counts) > 0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_files_agree_on_photos(tmp_path, capsys, suffix):
    """One with nothing to find, too."""
    tiny_run(tmp_path / "run", "aa_resnet34", head_convs=0)
    photo, path = tmp_path / "photo.png", tmp_path / f"a{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(photo)
    assert main([str(tmp_path / "run"), "-o", str(path), "--check", str(photo)]) == 0
    assert "largest difference on 1 image(s)" in capsys.readouterr().out
    if suffix == ".pt2":
        about = {"classes.json": ""}
        torch.export.load(path, extra_files=about)
        classes = about["classes.json"]
    else:
        import onnxruntime

        classes = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["classes"]
    assert json.loads(classes) == CLASSES
    model = load_model(str(tmp_path / "run"))
    images = [torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert max(detections_differ(model, runner(path), image) for image in images) < TOLERANCE


def test_a_difference_is_seen(tmp_path):
    tiny_run(tmp_path / "run")
    model = load_model(str(tmp_path / "run"))
    image = torch.rand(3, SIDE, SIDE)
    with torch.inference_mode():
        own = model.model(image[None])[0]
    outputs = [own[key].numpy() for key in ("boxes", "scores", "labels")]

    def difference(change) -> float:
        changed = [output.copy() for output in outputs]
        change(changed)
        return detections_differ(model, lambda _: changed, image)

    assert difference(lambda out: None) == 0
    assert difference(lambda out: out[0].__iadd__(SIDE / 100)) == pytest.approx(0.01, abs=1e-6)
    assert difference(lambda out: out[1].__iadd__(0.25)) == pytest.approx(0.25, abs=1e-6)
    assert difference(lambda out: out.__setitem__(slice(None), [output[1:] for output in out])) == float("inf")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="must end in .onnx or .pt2"):
        export(tiny_detector(), tmp_path / "a.txt", CLASSES)
