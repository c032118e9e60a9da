"""The networks; importing this package registers them with timm."""
from ea_vision.models._builder import FAMILIES
from ea_vision.models.attn_resnet import AttnResNet
from ea_vision.models.conv_transformer import ConvTransformer
from ea_vision.models.resnet_cifar import ResNetCifar

__all__ = ["FAMILIES", "AttnResNet", "ConvTransformer", "ResNetCifar"]
