"""The networks; importing this package registers them with timm. The file of a new family needs only these names."""

from ea_vision.models._attention_config import AttentionConfig, ChainBuilder, to_size
from ea_vision.models._build import (
    Network,
    build_network,
    get_network,
    list_networks,
    plain_network,
    register_networks,
    shipped_weights,
)
from ea_vision.models._network import ChainedNetwork, HeadedNetwork
from ea_vision.models._stages import AttnStage
from ea_vision.models.attn_mnasnet import AttnMnasNet
from ea_vision.models.attn_resnet import AttnResNet
from ea_vision.models.conv_transformer import ConvTransformer
from ea_vision.models.evolve import evolve, evolved_transformer, unevolve
from ea_vision.models.note import EVOLVED
from ea_vision.models.plain_resnet import ResNetCifar
from ea_vision.models.spatial_transformer import SpatialTransformerNet
from ea_vision.models.vision_transformer import EvolvingVisionTransformer
from ea_vision.models.wide_resnet import WideResNet
