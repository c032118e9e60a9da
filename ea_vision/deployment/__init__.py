"""Networks for inference: `deploy` folds what is constant, and lays the attention out for ONNX Runtime.

    small = ea_vision.deploy(model.eval())                       # the same outputs, fewer operations
    torch.onnx.export(small, (images,), "model.onnx", dynamo=True)

In eager PyTorch and under torch.compile the kernels of `ea_vision.ops` go on computing the attention; in an exported
program plain operations with folded weights do, those of `ea_vision.deployment.attention`.
"""

from ea_vision.deployment.fold import deploy
