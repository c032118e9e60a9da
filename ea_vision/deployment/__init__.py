"""Networks for inference: `deploy` folds constants into weights, and arranges the attention for ONNX Runtime.

    small = ea_vision.deploy(model.eval())                       # the same outputs, fewer operations
    torch.onnx.export(small, (images,), "model.onnx", dynamo=True)

In eager PyTorch and under torch.compile the kernels of `ea_vision.ops` still compute the attention. An exported program
computes it by plain operations with folded weights, those of `ea_vision.deployment.attention`.
"""

from ea_vision.deployment.fold import deploy
