"""Models of Hugging Face's transformers evolve: equal at the start, alive one step on, back again, saved and loaded."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ea_vision
from ea_vision import evolve, unevolve
from tests.models.test_across import KINDS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32)
VISION = dict(SMALL, image_size=32, patch_size=8)
TEXT = dict(SMALL, vocab_size=50, max_position_embeddings=40)
SEQ2SEQ = dict(
    vocab_size=50,
    d_model=32,
    encoder_layers=3,
    decoder_layers=3,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    max_position_embeddings=40,
)
T5 = dict(vocab_size=50, d_model=32, d_kv=6, d_ff=32, num_layers=3, num_heads=4)
ARCHITECTURES = {  # (class, configuration)
    "vit": ("ViTModel", "ViTConfig", VISION),
    "dinov2": ("Dinov2Model", "Dinov2Config", VISION),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", dict(VISION, num_register_tokens=2)),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
    "clip vision": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
    "bert": ("BertModel", "BertConfig", TEXT),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        dict(
            vocab_size=50, max_position_embeddings=40, dim=32, n_layers=3, n_heads=4, hidden_dim=32
        ),
    ),
    "t5 encoder": ("T5EncoderModel", "T5Config", T5),
    "clip text": ("CLIPTextModel", "CLIPTextConfig", TEXT),
    "llama": ("LlamaModel", "LlamaConfig", dict(TEXT, num_key_value_heads=2)),
    "bart": ("BartModel", "BartConfig", SEQ2SEQ),
    "t5": ("T5Model", "T5Config", T5),
}
DECODERS = {"clip text", "llama", "bart", "t5"}
CAUSAL = {"ea", "residual", "talking_heads", "xsa", "gated"}
every = pytest.mark.parametrize("name", ARCHITECTURES)


def create(name: str, **options) -> nn.Module:
    """A small network whose parameters all matter."""
    torch.manual_seed(0)
    model_class, config_class, config = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**{**config, **options})
    model = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def inputs_of(name: str) -> dict:
    torch.manual_seed(1)
    if ARCHITECTURES[name][2].get("image_size"):
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(3, 50, (2, 9))
    if name in ("bart", "t5"):
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    return {"input_ids": ids}


def output(model: nn.Module, name: str) -> torch.Tensor:
    return model(**inputs_of(name), return_dict=True).last_hidden_state


def kinds_of(name: str) -> list[str]:
    kinds = [kind for kind in KINDS if name not in DECODERS or kind in CAUSAL]
    if name in ("bart", "t5"):
        kinds.remove("xsa")  # cross-attention has no values of its own tokens
    return kinds


def stepped(model: nn.Module, name: str) -> nn.Module:
    """Take a step of training, and return the model with the gradients of the next one."""
    for _ in range(2):
        model.zero_grad()
        (output(model, name) ** 3).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad.sign()
    return model


@every
def test_begins_as_the_plain_model_by_every_kind_and_goes_back(name):
    model = create(name)
    expected = output(model, name)
    for kind in kinds_of(name):
        evolved = evolve(model, kind, value_residual=True)
        assert_close(output(evolved, name), expected, rtol=0, atol=1e-5)
        back = unevolve(evolved)
        assert torch.equal(output(back, name), expected)
        assert repr(back) == repr(model)
        assert back.state_dict().keys() == model.state_dict().keys()
        new = evolved.state_dict().keys() - model.state_dict().keys()
        assert new and all(".maps." in key for key in new)
    assert torch.equal(output(model, name), expected)


@every
def test_every_new_parameter_learns(name):
    for kind in kinds_of(name):
        model = stepped(evolve(create(name), kind, value_residual=True), name)
        idle = [
            key
            for key, parameter in model.named_parameters()
            if ".maps." in key and (parameter.grad is None or not parameter.grad.any())
        ]
        # beta times ReLU of the convolution, whose bias the softmax cancels where the ReLU is open everywhere
        assert not [key for key in idle if not key.endswith("proj_l.bias")], kind
        with pytest.raises(ValueError, match="gates must be 0"):
            unevolve(model)


@every
def test_is_saved_with_its_evolution_and_loaded(name, tmp_path):
    for kind in kinds_of(name):
        model = stepped(evolve(create(name), kind, value_residual=True), name).eval()
        model.save_pretrained(tmp_path)
        loaded = ea_vision.from_pretrained(tmp_path).eval()
        assert type(loaded) is type(create(name))
        assert torch.equal(output(loaded, name), output(model, name))
        assert loaded.config.ea_vision == model.config.ea_vision
        copied = copy.deepcopy(loaded)
        assert torch.equal(output(copied, name), output(model, name))
