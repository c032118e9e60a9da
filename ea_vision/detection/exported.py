"""Export a detector, non-maximum suppression included, to ONNX or to a torch.export program.

The exported detector takes one image, float32 (1, 3, S, S) in 0..1, already fitted into the detector's square of S
pixels (`ea_vision.detection.transforms.fit_image`), and gives boxes (n, 4) x1 y1 x2 y2 in pixels of that square, scores
(n,) and labels (n,) from 0, the surest first. S is fixed: attention's position tables are for one size.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import clip_boxes_to_image, nms

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, check_output
from ea_vision.detection.model import Detector

SUFFIXES = (".onnx", ".pt2")
TOLERANCE = 1e-4


class ExportedDetector(nn.Module):
    """A detector for one image, with the anchors as constants and no Python that depends on values.

    It finds what the detector finds: of the best `topk_candidates` of each level those that no surer box of their class
    suppresses. Scores below the detector's threshold are left out last rather than first, which gives the same: they
    suppress none above it.
    """

    def __init__(self, detector: Detector):
        super().__init__()
        self.detector, side = detector.eval(), detector.img_size
        device = next(detector.parameters()).device
        with torch.no_grad():
            maps = list(detector.backbone(torch.zeros(1, 3, side, side, device=device)).values())
            places = detector.anchor_generator.num_anchors_per_location()
            anchors = detector.anchor_generator(ImageList(torch.zeros(1, 3, side, side), [(side, side)]), maps)[0]
        self.sizes = [x.shape[-2] * x.shape[-1] * count for x, count in zip(maps, places, strict=True)]
        self.register_buffer("anchors", anchors)
        for name in ("mean", "std"):
            value = torch.tensor(getattr(detector.transform, f"image_{name}"), device=device)
            self.register_buffer(name, value.view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, 3, S, S) in 0..1 -> boxes (n, 4), scores (n,), labels (n,)."""
        detector, side = self.detector, self.detector.img_size
        outputs = detector.forward_maps((images - self.mean) / self.std)
        levels = (outputs["cls_logits"][0].split(self.sizes), outputs["bbox_regression"][0].split(self.sizes),
                  self.anchors.split(self.sizes))
        scores, labels, offsets, anchors = [], [], [], []
        for logits, of_level, places in zip(*levels, strict=True):
            best, index = logits.sigmoid().flatten().topk(min(detector.topk_candidates, logits.numel()))
            place = index // logits.shape[-1]
            scores.append(best)
            labels.append(index % logits.shape[-1])
            offsets.append(of_level[place])
            anchors.append(places[place])
        scores, labels = torch.cat(scores), torch.cat(labels)
        boxes = detector.box_coder.decode_single(torch.cat(offsets), torch.cat(anchors))
        boxes = clip_boxes_to_image(boxes, (side, side))
        apart = (labels * (side + 1)).to(boxes)[:, None]  # boxes of different classes never meet
        kept = nms(boxes + apart, scores, detector.nms_thresh)[:detector.detections_per_img]
        kept = kept[scores[kept] > detector.score_thresh]
        return boxes[kept], scores[kept], labels[kept]


def export_program(detector: Detector) -> torch.export.ExportedProgram:
    """The whole detector as a program of torch.export."""
    module = ExportedDetector(detector).eval()
    side = detector.img_size
    with torch.no_grad():
        return torch.export.export(module, (torch.zeros(1, 3, side, side, device=module.anchors.device),))


def export(detector: Detector, path: Path, classes: Sequence[str]) -> None:
    """Write a detector to FILE.onnx or FILE.pt2, all or nothing; the names of the classes are in it.

    Raises:
        UsageError: another suffix, or ONNX's packages missing.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"the file must end in {' or '.join(SUFFIXES)}, got {path}")
    if path.suffix == ".onnx" and importlib.util.find_spec("onnxscript") is None:
        raise UsageError("ONNX needs onnx and onnxscript, which are not installed: pip install onnx onnxscript")
    check_output(path)
    program, data = export_program(detector), io.BytesIO()
    if path.suffix == ".pt2":
        torch.export.save(program, data, extra_files={"classes.json": json.dumps(list(classes))})
    else:
        onnx = torch.onnx.export(program, (), dynamo=True, verbose=False, input_names=["images"],
                                 output_names=["boxes", "scores", "labels"])
        onnx.model.metadata_props["classes"] = json.dumps(list(classes))
        data.write(onnx.model_proto.SerializeToString())
    atomic_write(path, data.getvalue())
