"""A trained detector on images of any size."""

from collections.abc import Iterable, Iterator

import torch
from PIL import Image
from torch import Tensor

from ea_vision.detection.model import Detector
from ea_vision.detection.transforms import fit_image, found_in_original


def detect(detector: Detector, images: Iterable[Image.Image]) -> Iterator[dict[str, Tensor]]:
    """Run a detector, in evaluation mode, on RGB images of any size; yield for each, in their order, torchvision's
    boxes (n, 4), x1 y1 x2 y2 in pixels of the image, scores (n,) and labels (n,), highest score first, on the CPU.

    An image is fitted into the detector's square as in evaluation. Objects outside the image are left out, as are those
    that the detector itself leaves out (score_thresh, detections_per_img).

    Raises:
        FloatingPointError: the network's outputs are not finite.
    """

    def check(_, args: tuple, outputs: dict[str, Tensor]) -> None:
        for output in outputs.values():
            if not output.isfinite().all():
                raise FloatingPointError("gives no finite number")

    device = next(detector.parameters()).device
    for image in images:
        fitted = fit_image(image, detector.img_size).to(device)
        with torch.no_grad(), detector.head.register_forward_hook(check):
            [detected] = detector(fitted[None])
        yield found_in_original(detected, (image.height, image.width), detector.img_size)
