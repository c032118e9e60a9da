"""Detection: images with boxes, RetinaNet over any backbone, its trainer, detections as JSON and pictures."""
