"""Networks for inference: `deploy` arranges the attention for export, and folds its scales and gates into weights.

    small = ea_vision.deploy(model.eval())                       # the same outputs
    torch.onnx.export(small, (images,), "model.onnx", dynamo=True)

In eager PyTorch and under torch.compile the kernels of `ea_vision.ops` still compute the attention. An exported program
computes it by plain operations with folded weights, those of `ea_vision.deployment.attention`.
"""

from ea_vision.deployment.deploy import deploy
