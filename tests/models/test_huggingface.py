"""Models of Hugging Face's transformers evolve: equal at the start, learn after one step, are reverted and saved."""

import copy
import json
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import ea_vision
from ea_vision import evolve, record_attention, unevolve
from ea_vision.base.errors import UsageError
from ea_vision.layers import Evolution, TokenConv
from ea_vision.layers.sequence_attention import Chain
from ea_vision.ops import use_implementation
from experiments.transformers_models import build, working_inputs
from tests.layers.oracle import map_conv
from tests.models.zoo import KINDS, idle, stirred
from tests.process import python
from tests.refused import refused

SMALL = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32)
VISION = dict(SMALL, image_size=32, patch_size=8)
TEXT = dict(SMALL, vocab_size=50, max_position_embeddings=40)
LLAMA = dict(TEXT, num_key_value_heads=2)
TOWER = dict(TEXT, bos_token_id=0, eos_token_id=2)
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
DISTILBERT = dict(
    vocab_size=50, max_position_embeddings=40, dim=32, n_layers=3, n_heads=4, hidden_dim=32
)
GPT2 = dict(
    vocab_size=50,
    n_positions=40,
    n_embd=32,
    n_layer=3,
    n_head=4,
    scale_attn_by_inverse_layer_idx=True,
    add_cross_attention=True,
)
T5 = dict(vocab_size=50, d_model=32, d_kv=6, d_ff=32, num_layers=3, num_heads=4)
ARCHITECTURES = {  # (class, options of its configuration)
    "vit": ("ViTModel", VISION),
    "dinov2": ("Dinov2Model", VISION),
    "dinov3": ("DINOv3ViTModel", dict(VISION, num_register_tokens=2)),
    "siglip": ("SiglipVisionModel", VISION),
    "clip vision": ("CLIPVisionModel", VISION),
    "bert": ("BertModel", TEXT),
    "roberta": ("RobertaModel", TEXT),
    "distilbert": ("DistilBertModel", DISTILBERT),
    "t5 encoder": ("T5EncoderModel", T5),
    "clip text": ("CLIPTextModel", TEXT),
    "llama": ("LlamaModel", LLAMA),
    "gpt neox": ("GPTNeoXModel", TEXT),
    "gpt2": ("GPT2Model", GPT2),
    "bart": ("BartModel", SEQ2SEQ),
    "t5": ("T5Model", T5),
}
DECODERS = ("clip text", "llama", "gpt neox", "gpt2", "bart", "t5")
CAUSAL = {"ea", "residual", "talking_heads", "xsa", "gated"}
NEAR = {"rtol": 0, "atol": 1e-5}
EXACT = {"rtol": 0, "atol": 1e-10}
every = pytest.mark.parametrize("name", ARCHITECTURES)


def create(name, **options):
    """A small network without dropout, whose parameters all affect the output."""
    torch.manual_seed(0)
    class_name, small = ARCHITECTURES[name]
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**{**small, **options})).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def model_of(family, **options):
    """A network of this family with weights as they are drawn."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{family}Model")(config).eval()


def inputs_of(name, dtype=torch.float32):
    torch.manual_seed(1)
    if "image_size" in ARCHITECTURES[name][1]:
        return {"pixel_values": torch.randn(2, 3, 32, 32).to(dtype)}
    ids = torch.randint(3, 50, (2, 9))
    if name in ("bart", "t5"):
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    if name == "gpt2":
        return {"input_ids": ids, "encoder_hidden_states": torch.randn(2, 5, 32).to(dtype)}
    return {"input_ids": ids}


def output(model, name, **inputs):
    return model(**{**inputs_of(name, model.dtype), **inputs}, return_dict=True).last_hidden_state


def begun(model, inputs, *args, **options):
    """Return the evolved model, which begins as the plain one."""
    evolved = evolve(model, *args, **options)
    with torch.no_grad():
        assert_close(evolved(**inputs)[0], model(**inputs)[0], **NEAR)
    return evolved


def kinds_of(name):
    kinds = [kind for kind in KINDS if name not in DECODERS or kind in CAUSAL]
    if name in ("gpt2", "bart", "t5"):
        kinds.remove("xsa")  # cross-attention has no values of its own tokens
    return kinds


def stepped(model, name):
    """Take a step of training, and return the model with the gradients of the next one."""
    for _ in range(2):
        model.zero_grad()
        (output(model, name) ** 3).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad.sign()
    return model


@pytest.mark.parametrize("name", ["vit", "bart", "llama"])
def test_another_implementation_of_attention_is_refused(name):
    """transformers advises "eager" for output_attentions: the maps would silently be those of the plain model."""
    model = evolve(create(name), "talking_heads")
    expected = output(model, name)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with refused(f"needs attn_implementation 'ea_vision', got '{implementation}'", ValueError):
            output(model, name)
    model.set_attn_implementation("ea_vision")
    assert torch.equal(output(model, name), expected)
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    with refused("got 'eager'", ValueError):
        output(copied, name)
    assert torch.equal(output(model, name), expected)


def test_layers_without_an_evolution_keep_the_scale_of_their_model():
    model = create("vit")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.9
    begun(model, inputs_of("vit"), None, value_residual=True)


def reloaded(model, folder):
    """Save a model, and return a copy of what is loaded."""
    model.save_pretrained(folder)
    loaded = ea_vision.from_pretrained(folder)
    assert loaded.config.ea_vision == model.config.ea_vision
    return copy.deepcopy(loaded)


def edited(folder, *without, **evolution):
    """Leave entries out of the configuration in a folder, and change its evolution."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in without:
        del config[name]
    config["ea_vision"] |= evolution
    path.write_text(json.dumps(config))


def without_mechanisms(folder):
    path = folder / "model.safetensors"
    weights = {key: value for key, value in load_file(path).items() if ".maps." not in key}
    save_file(weights, path, metadata={"format": "pt"})


FAULTS = {  # status of weights, with what is changed in the folder
    "missing": without_mechanisms,
    "unexpected": partial(edited, attn_layers=[2]),
    "mismatched": partial(edited, kernel_size=5),
}


@pytest.mark.parametrize("status", FAULTS)
def test_weights_that_are_not_the_evolution_s_are_refused_by_name(status, tmp_path):
    """transformers would leave memory as it is in missing ones, and leave out unexpected ones."""
    evolving("bert").save_pretrained(tmp_path)
    FAULTS[status](tmp_path)
    with refused(rf"{status}, the first of them encoder\.layer\.\d\..*maps"):
        ea_vision.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_a_folder_is_read_with_the_keywords_of_transformers(tmp_path):
    """Also where the plain model's attention is not installed."""
    model = evolve(create("vit"))
    folder = tmp_path / "inner"
    model.save_pretrained(folder)
    attention = {"attn_implementation": "flash_attention_2"}
    edited(folder, **attention)
    loaded, info = ea_vision.from_pretrained(
        tmp_path, subfolder="inner", dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values())
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.float64
    assert loaded.config.ea_vision.items() >= attention.items()
    assert_close(output(loaded.eval(), "vit"), output(model.double(), "vit"))


def test_transformers_initialises_no_mechanism_anew():
    model = evolving("vit")
    before = copy.deepcopy(model.state_dict())
    model._is_hf_initialized = False
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) or ".maps." not in name, name


def plain_loaders(folder, name, **how):
    """Return the ways of loading a folder that do not know its evolution."""
    model_class = getattr(transformers, name)
    auto = transformers.AutoModel
    return {
        "Auto": lambda: auto.from_pretrained(folder, **how),
        "class": lambda: model_class.from_pretrained(folder, **how),
        "configuration": lambda: auto.from_config(transformers.AutoConfig.from_pretrained(folder)),
        "pipeline": lambda: transformers.pipeline("feature-extraction", folder, **how),
    }


@pytest.mark.parametrize("way", ["Auto", "class", "configuration", "pipeline"])
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_an_evolved_folder_is_not_read_as_the_plain_model(name, way, tmp_path):
    plain = create(name)
    model = lively(evolve(plain))
    model.save_pretrained(tmp_path)
    class_name = type(plain).__name__
    for how in ({}, {} if way == "pipeline" else {"attn_implementation": "eager"}):
        load = plain_loaders(tmp_path, class_name, **how)[way]
        with pytest.raises(ValueError, match=r"ea_vision\.from_pretrained"):  # in lines of theirs
            load()
    unevolve(evolve(plain)).save_pretrained(tmp_path / "plain")
    if way != "pipeline":
        plain_loaders(tmp_path / "plain", class_name)[way]()
    with refused("evolved model's configuration, without mechanisms", ValueError):
        output(transformers.AutoModel.from_config(model.config), name)
    # folders that were saved without these entries
    edited(tmp_path, "attn_implementation", "experts_implementation")
    for load in (ea_vision.from_pretrained, ea_vision.load):
        assert torch.equal(output(load(str(tmp_path)).eval(), name), output(model, name))


def test_a_tower_of_an_evolved_folder_is_not_read_as_the_plain_tower(tmp_path):
    evolve(model_of("CLIP", text_config=TOWER, vision_config=VISION)).save_pretrained(tmp_path)
    for tower in (transformers.CLIPVisionModel, transformers.CLIPTextModel):
        for how in ({}, {"attn_implementation": "eager"}):
            with refused(r"ea_vision\.from_pretrained", ValueError):
                tower.from_pretrained(tmp_path, **how)
    ea_vision.from_pretrained(tmp_path)


def test_a_plain_model_with_an_evolved_part_is_refused(tmp_path):
    """Its config.json is a plain model's, its weights are not."""
    model = model_of("CLIP", text_config=TEXT, vision_config=VISION)
    model.save_pretrained(tmp_path / "plain")
    assert type(ea_vision.load(tmp_path / "plain")) is transformers.CLIPModel
    model.vision_model = evolve(model.vision_model)
    model.save_pretrained(tmp_path / "part")
    with refused("unexpected, the first of them vision_model"):
        ea_vision.load(tmp_path / "part")


def test_an_adapter_s_base_is_found_by_no_plain_name(tmp_path):
    """AutoPeftModel, and transformers, would put the adapter on the plain model that was evolved."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    create("bert").save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModel.from_pretrained(tmp_path / "plain")
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=["maps"])
    evolved = evolve(plain, start="paper")
    assert unevolve(evolve(plain)).name_or_path == str(tmp_path / "plain")
    evolved.save_pretrained(tmp_path / "evolved")
    loaded = ea_vision.from_pretrained(str(tmp_path / "evolved"))
    for base, message in (
        (evolved, r"ea_vision\.evolve\("),
        (loaded, r"ea_vision\.from_pretrained"),
    ):
        adapted = peft.get_peft_model(base, config)
        adapted.save_pretrained(tmp_path / "adapter")
        for auto in (peft.AutoPeftModel, transformers.AutoModel):
            with pytest.raises((ValueError, OSError), match=message):
                auto.from_pretrained(tmp_path / "adapter")
    again = ea_vision.from_pretrained(str(tmp_path / "evolved"))
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(output(again, "bert"), output(adapted.eval(), "bert"))


# ---- against an independent loop over the layers ---------------------------------------------------------------------


# padding on the left of one sentence, on the right of the other
REAL = torch.ones(2, 9, dtype=torch.bool)
REAL[0, :3] = REAL[1, 7:] = False


def read(real, causal):
    """Return (B, 1, T, T), True where neither the query nor the key is padding, nor the key a later one."""
    pairs = real[:, None, None, :] & real[:, None, :, None]
    return pairs.tril() if causal else pairs


class Loop:
    """Evolving maps in transformers' unfused attention, layer by layer, by sums over shifted maps.

    real: (B, T), True where a token is no padding.
    """

    def __init__(self, evolved, plain, real, causal):
        layers = dict(evolved.named_modules())
        self.evolutions = {}
        for name, module in plain.named_modules():
            if hasattr(layers[name], "maps"):
                self.evolutions[module] = layers[name].maps.evolution
        self.real = real
        self.causal = causal
        self.previous = None

    def __call__(self, module, query, key, value, mask, scaling=None, position_bias=0.0, **_):
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(-2, -1) * (scaling or query.shape[-1] ** -0.5)
        logits = logits + (0.0 if position_bias is None else position_bias)
        evolution = self.evolutions[module]
        heads = getattr(evolution, "proj_l", None)
        if heads is not None:
            logits = mixed_heads(evolution.proj_l, logits)
        elif evolution is not None:
            logits = self.convolved(evolution, logits)
        self.previous = logits
        hidden = ~self.real[:, None, None, :].expand(-1, 1, logits.shape[2], -1)
        if self.causal:
            hidden = hidden | torch.ones_like(hidden).triu(1)
        attn = logits.masked_fill(hidden, -1e30).softmax(-1)
        if heads is not None:
            attn = mixed_heads(evolution.proj_w, attn).masked_fill(hidden, 0)
        return (attn @ value).transpose(1, 2), None

    def convolved(self, evolution, logits):
        if not self.causal:
            logits = evolution.alpha * self.previous + (1 - evolution.alpha) * logits
        pairs = read(self.real, self.causal)
        mixed = logits * pairs
        new = map_conv(mixed, evolution.convs[0]) * pairs
        if self.causal:  # moved down and to the right by one
            new = F.pad(new, (1, -1, 1, -1))
        return evolution.beta * new + (1 - evolution.beta) * mixed


def mixed_heads(linear, maps):
    return linear(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


lively = partial(stirred, by=0.3)


def evolving(name, kind="ea", **options):
    return lively(evolve(create(name), kind, **options))


@pytest.mark.parametrize(
    "name, kind",
    [
        *product(["vit", "dinov3", "bert", "t5 encoder", "llama"], ["ea"]),
        ("llama", "talking_heads"),
    ],
)
@torch.no_grad()
def test_agrees_with_a_loop_over_unfused_attention(name, kind):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = create(name).double()
    evolved = lively(evolve(plain, kind))
    inputs = {}
    real = torch.ones(2, 19 if name == "dinov3" else 17, dtype=torch.bool)
    if "vocab_size" in ARCHITECTURES[name][1]:
        real = REAL
        inputs["attention_mask"] = real.long()
    ALL_ATTENTION_FUNCTIONS.register("loop", Loop(evolved, plain, real, name == "llama"))
    ALL_MASK_ATTENTION_FUNCTIONS.register("loop", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    plain.set_attn_implementation("loop")
    assert_close(
        output(evolved, name, **inputs)[real], output(plain, name, **inputs)[real], **EXACT
    )


def in_parts(model, ids, cache):
    """Return the outputs for some tokens after the others, whose keys are in the cache."""
    parts = []
    for part in ids.split([4, 1, 1, 3], dim=1):
        parts.append(model(part, past_key_values=cache, use_cache=True)[0])
    return torch.cat(parts, dim=1)


# ---- padding, caches, checkpointing, threads, compilation ------------------------------------------------------------


def padded_inputs(name, sentence, left, right):
    """Return a sentence with padding as a model's inputs; in "t5, targets" only a decoder's targets are padded."""
    padded = F.pad(sentence, (left, right), value=7)
    mask = F.pad(torch.ones_like(sentence), (left, right))
    targets = {"decoder_input_ids": padded, "decoder_attention_mask": mask}
    if name == "t5, targets":
        return {"input_ids": sentence, **targets}
    inputs = {"input_ids": padded, "attention_mask": mask}
    if name == "t5":
        inputs |= targets
    elif name == "bart":
        inputs["decoder_input_ids"] = sentence
    elif name in ("bert", "llama"):
        positions = torch.arange(padded.shape[1]) - left
        inputs["position_ids"] = positions.clamp(min=0)[None]
    return inputs


@pytest.mark.parametrize(
    "kind", ["ea", "pa", "residual", "talking_heads", "mta", "conv2d", "gated"]
)
@pytest.mark.parametrize(
    "name", ["bert", "distilbert", "t5 encoder", "llama", "bart", "t5", "t5, targets"]
)
@torch.no_grad()
def test_results_do_not_depend_on_the_amount_of_padding(name, kind):
    family = name.removesuffix(", targets")
    if kind not in kinds_of(family):
        pytest.skip(f"{kind} has no causal form")
    model = evolving(family, kind, value_residual=True).double()
    sentence = torch.randint(3, 50, (1, 6))
    expected = model(**padded_inputs(name, sentence, 0, 0)).last_hidden_state
    for left, right in [(0, 2), (0, 7), (1, 0), (5, 0), (3, 4)]:
        if left and name in ("distilbert", "bart"):
            continue  # a sentence moved to the right has other absolute positions
        result = model(**padded_inputs(name, sentence, left, right)).last_hidden_state
        assert_close(result[:, left : left + 6], expected, **EXACT)


def language_model(name):
    torch.manual_seed(0)
    generating = {
        "llama": transformers.LlamaForCausalLM,
        "gpt neox": transformers.GPTNeoXForCausalLM,
        "bart": transformers.BartForConditionalGeneration,
        "t5": transformers.T5ForConditionalGeneration,
    }
    model_class = generating[name]
    config = model_class.config_class(**ARCHITECTURES[name][1], decoder_start_token_id=1)
    model = model_class(config).eval().double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def generate(model, **how):
    ids = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(3))
    how.update(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)


@pytest.mark.parametrize("kind", ["residual", "talking_heads", "gated"])
@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_generates_with_a_cache_what_it_generates_without(name, kind):
    model = lively(evolve(language_model(name), kind, value_residual=True))
    for beams in (1, 3):
        cached = generate(model, use_cache=True, num_beams=beams)
        assert torch.equal(cached, generate(model, use_cache=False, num_beams=beams))


@pytest.mark.parametrize("kind", ["residual", "talking_heads", "xsa", "gated"])
@pytest.mark.parametrize("name", ["llama", "gpt neox"])
@torch.no_grad()
def test_a_cache_changes_nothing(name, kind):
    """A static cache has room for future tokens in its keys and values."""
    model = lively(evolve(language_model(name), kind, value_residual=True))
    ids = inputs_of("llama")["input_ids"]
    expected = model(ids, use_cache=False).logits
    static = transformers.StaticCache(model.config, max_cache_len=16)
    for cache in (transformers.DynamicCache(), static):
        assert_close(in_parts(model, ids, cache), expected, **EXACT)


def test_layers_that_read_another_s_keys_see_all_that_are_written():
    """As in Gemma 3n, where such layers have no cache entry."""
    config = transformers.LlamaConfig(**{**ARCHITECTURES["llama"][1], "num_hidden_layers": 1})
    chain = Chain("residual", cross=False, depth=3)
    layer = nn.Module()
    layer.layer_idx = 2
    keys = torch.zeros(1, 2, 5, 8)
    for cache, places in (
        (transformers.DynamicCache(), 5),
        (transformers.StaticCache(config, max_cache_len=16), 16),
    ):
        cache.update(keys, keys, 0)
        chain.note_input(layer, (), {"past_key_values": cache})
        assert chain.written(layer, places) == 5


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_ea_decodes_without_a_cache_and_refuses_one(name):
    model = lively(evolve(language_model(name), "ea"))
    assert generate(model, use_cache=False).shape[1] >= 6
    with refused("use_cache=False required", ValueError):
        generate(model, use_cache=True)


@pytest.mark.parametrize("name", ["vit", "bert", "t5", "bart", "llama"])
@pytest.mark.parametrize("kind", ["ea", "talking_heads"])
def test_gradient_checkpointing_changes_nothing(name, kind):
    model = evolving(name, kind, value_residual=True).double().train()
    parameters = list(model.parameters())

    def gradients():
        loss = output(model, name).square().sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(gradients(), expected)


def test_checkpointing_that_loses_the_chain_is_refused():
    model = evolve(create("vit"), "ea").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with refused("use_reentrant", ValueError):
        (output(model, "vit") ** 2).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
def test_compiles_in_one_graph(name):
    model = evolving(name, value_residual=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(output(compiled, name), output(model, name), rtol=1e-4, atol=1e-4)


# ---- vision: the grid behind the prefix tokens -----------------------------------------------------------------------


def sizes_of(name):
    """Inputs of two sizes."""
    inputs = inputs_of(name)
    if "pixel_values" not in inputs:
        return inputs, {key: value[:, :-2].contiguous() for key, value in inputs.items()}
    if "dino" in name:
        return inputs, {"pixel_values": torch.randn(2, 3, 24, 40)}
    resized = {"pixel_values": torch.randn(2, 3, 24, 40), "interpolate_pos_encoding": True}
    return inputs, resized


@every
@torch.no_grad()
def test_forwards_of_two_sizes_follow_one_another(name):
    model = create(name)
    inputs = 2 * sizes_of(name)
    expected = [model(**each)[0] for each in inputs]
    for kind in kinds_of(name):
        evolved = evolve(model, kind)
        for each, state in zip(inputs, expected, strict=True):
            assert_close(evolved(**each)[0], state, **NEAR)


def siglip2():
    text = dict(TOWER, projection_size=32, pad_token_id=1)
    sizes = dict(SMALL, num_patches=16, patch_size=4)
    model = model_of("Siglip2", text_config=text, vision_config=sizes)
    inputs = []
    for H, W in ((3, 4), (2, 5)):
        inputs.append(
            {
                "input_ids": torch.randint(3, 50, (1, 9)),
                "pixel_values": torch.randn(1, H * W, 48),
                "pixel_attention_mask": torch.ones(1, H * W, dtype=torch.long),
                "spatial_shapes": torch.tensor([[H, W]]),
            }
        )
    return model, inputs


@torch.no_grad()
def test_a_mechanism_s_convolution_is_no_patch_embedding():
    """The patches of SigLIP 2 are embedded by no Conv2d."""
    model, inputs = siglip2()
    for kind in ("ea", "pa", "residual"):
        evolved = evolve(model, kind)
        for each in 2 * inputs:
            assert_close(evolved(**each)[0], model(**each)[0], **NEAR)


@torch.no_grad()
def test_layers_with_a_configuration_of_their_own_evolve(tmp_path):
    """CLIPSeg's decoder keeps a copy of the image tower's."""
    torch.manual_seed(0)
    small = dict(reduce_dim=16, extract_layers=[0, 1], decoder_num_attention_heads=4)
    config = transformers.CLIPSegConfig(text_config=TOWER, vision_config=VISION, **small)
    plain = transformers.CLIPSegForImageSegmentation(config).eval()
    ids = torch.randint(3, 50, (2, 9))
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    evolved = begun(plain, inputs, "ea")
    assert torch.equal(unevolve(evolved)(**inputs).logits, plain(**inputs).logits)
    again = reloaded(lively(evolved), tmp_path)
    assert torch.equal(again(**inputs).logits, evolved(**inputs).logits)


@pytest.mark.parametrize(
    "name, prefix", [("vit", 1), ("dinov2", 1), ("dinov3", 3), ("siglip", 0), ("clip vision", 1)]
)
def test_grids_are_found_behind_prefix_tokens(name, prefix):
    model = create(name)
    _, inputs = sizes_of(name)
    evolved = begun(model, inputs, "conv2d", token_conv=True, prefix="pass")
    mechanisms = [m for m in evolved.modules() if hasattr(m, "num_prefix_tokens")]
    assert {m.num_prefix_tokens for m in mechanisms} == {prefix}
    conv = next(m for m in mechanisms if isinstance(m, TokenConv))
    sizes = []
    conv.register_forward_hook(lambda _, args, result: sizes.append(args[1]))
    lively(evolved)(**inputs)
    assert sizes == [(3, 5)]
    back = unevolve(evolve(model, None, token_conv=True))
    assert torch.equal(output(back, name), output(model, name))


@pytest.mark.parametrize("name, layers, chained", [("vit", 3, 2), ("bert", 3, 2), ("t5", 9, 6)])
@torch.no_grad()
def test_its_maps_are_recorded_with_those_before(name, layers, chained):
    model = evolving(name)
    with record_attention(model, parts=("attn", "prev_logits")) as maps:
        output(model, name)
    assert len(maps) == layers
    assert sum(layer.prev_logits is not None for layer in maps.values()) == chained
    for layer in maps.values():
        assert_close(layer.attn.sum(-1), torch.ones_like(layer.attn[..., 0]))


@pytest.mark.parametrize("name", ["bert", "llama"])
@torch.no_grad()
def test_recorded_parts_of_padded_sentences_are_what_the_layer_used(name):
    mask = {"attention_mask": REAL.long()}
    model = evolving(name).double()
    parts = ("logits", "self_logits", "prev_logits", "conv_logits")
    with record_attention(model, layers=[2, 3], parts=parts) as maps:
        output(model, name, **mask)
    pairs = read(REAL, name == "llama").expand(-1, 4, -1, -1)
    evolutions = [each for each in model.modules() if isinstance(each, Evolution)]
    for number, evolution in zip((2, 3), evolutions, strict=True):
        layer = maps[number]
        mixed = evolution.alpha * layer.prev_logits + (1 - evolution.alpha) * layer.self_logits
        evolved = evolution.beta * layer.conv_logits + (1 - evolution.beta) * mixed
        assert_close(layer.logits[pairs], evolved[pairs], **EXACT)
    model = evolving(name, "talking_heads").double()
    with record_attention(model, layers=2, parts="softmax") as maps:
        output(model, name, **mask)
    to_padding = REAL[:, :, None] & ~REAL[:, None, :]
    assert not maps[2]["softmax"].transpose(0, 1)[:, to_padding].any()


# ---- the tools around them -------------------------------------------------------------------------------------------


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(**TEXT, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def sentences(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 3} for row in ids]


@torch.no_grad()
def test_blocks_with_hooks_of_accelerate_run_their_mechanisms():
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    mechanisms = dict(kind="conv2d", start="paper", token_conv="paper")
    expected = evolve(create("vit"), **mechanisms)
    plain = create("vit")
    for block in plain.modules():
        if type(block).__name__ == "ViTLayer":
            hooks.add_hook_to_module(block, hooks.AlignDevicesHook(execution_device="cpu"))
    model = evolve(plain, **mechanisms)
    model.load_state_dict(expected.state_dict())
    assert torch.equal(output(model, "vit"), output(expected, "vit"))
    assert torch.equal(output(unevolve(evolve(plain)), "vit"), output(create("vit"), "vit"))


@pytest.mark.parametrize("kind", ["ea", "mta", "xsa"])
@torch.no_grad()
def test_offloaded_weights_of_mechanisms_are_loaded_or_refused(kind):
    """accelerate loads them for a module's forward alone; those of mta were read from memory that nobody had set."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = evolving("vit", kind)
    expected = output(model, "vit")
    together = {"preload_module_classes": ["SequenceMaps"]}
    loaded = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"), **together)
    assert_close(output(loaded, "vit"), expected)
    one_by_one = accelerate.cpu_offload(model, torch.device("cpu"))
    if kind == "ea":
        return assert_close(output(one_by_one, "vit"), expected)
    with refused(r"offloaded.*preload_module_classes=\['SequenceMaps'\]", ValueError):
        output(one_by_one, "vit")


def test_evolve_never_moves_weights_whatever_implementation_is_forced():
    """Moving quantised weights moves their scales; a copy without numbers runs on the meta device."""

    class Quantised(nn.Parameter):
        def to(self, *_, **__):
            raise RuntimeError("moved")

    model = create("vit")
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.weight = Quantised(linear.weight.data, requires_grad=False)
    with use_implementation("cpu"):
        evolving = evolve(model, "ea")
    assert_close(output(evolving, "vit"), output(model, "vit"))


def test_trains_with_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = evolve(classifier())
    before = copy.deepcopy(model.state_dict())
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=20,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        save_steps=20,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=sentences(80))
    assert trainer.train().global_step == 20
    after = model.state_dict()
    assert all(not torch.equal(after[key], before[key]) for key in before if ".maps." in key)
    loaded = ea_vision.from_pretrained(tmp_path / "checkpoint-20").eval()
    ids = torch.arange(3, 11)[None]
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["vit", "bert", "llama", "t5"])
@torch.no_grad()
def test_half_precision_stays_near(name, dtype):
    model = create(name)
    expected = output(model, name)
    evolved = evolve(model, "ea", value_residual=True).to(dtype)
    result = output(evolved, name)
    assert result.dtype == dtype
    assert (result - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("kind", ["ea", "gated"])  # gated reads the layer's input
def test_lora_on_queries_and_values(kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = create("bert")
    evolved = evolve(plain, kind, value_residual=True)
    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["maps"], r=2)
    model = peft.get_peft_model(evolved, config)
    assert_close(output(model, "bert"), output(plain, "bert"), **NEAR)
    stepped(model, "bert")
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    for part in ("lora_A", "lora_B", "modules_to_save"):
        assert any(part in key.split(".") for key in trained)
    assert trained.isdisjoint(idle(model))
    expected = output(model, "bert")
    assert_close(output(model.merge_and_unload(), "bert"), expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_masks_that_a_kind_cannot_take_are_refused():
    packed = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool().expand(2, 1, 9, 9)
    padded = torch.ones(2, 9).long()
    padded[0, 5:] = 0
    for kind, mask, reason in (
        ("ea", packed, "a mask that hides only padding and, if causal, later"),
        ("reattention", padded, "does not support masks"),
        ("refiner", padded, "does not support masks"),
    ):
        with refused(reason, ValueError):
            evolve(create("bert"), kind)(**inputs_of("bert"), attention_mask=mask)


@pytest.mark.parametrize("number", [-1e4, -1e9, -torch.inf, True])
@pytest.mark.parametrize("kind", ["ea", "pa", "mta", "talking_heads"])
@torch.no_grad()
def test_masks_hide_padding_by_any_number(kind, number):
    model = evolving("bert", kind).double()
    expected = output(model, "bert", attention_mask=REAL.long())
    mask = REAL[:, None, None, :].expand(-1, 1, 9, -1)
    if number is not True:
        mask = torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(~mask, number)
    result = output(model, "bert", attention_mask=mask)
    assert_close(result[REAL], expected[REAL], **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("name", ["yolos", "vit_mae"])
def test_tokens_that_form_no_grid_are_for_kinds_that_need_none(name):
    """YOLOS has detection tokens after its patches; ViTMAE drops random patches."""
    model = build(name)
    inputs = working_inputs(model)[0]
    if name == "vit_mae":
        inputs["noise"] = torch.rand(len(inputs["pixel_values"]), 16)
    for kind in (None, "residual", "talking_heads", "xsa", "gated"):
        evolved = begun(model, inputs, kind, value_residual=True)
        assert not torch.equal(lively(evolved)(**inputs)[0], model(**inputs)[0])
    for kind, token_conv in (("ea", False), ("conv2d", False), (None, True)):
        with refused("a grid of 4x4 patches required, got", ValueError):
            evolve(model, kind, token_conv=token_conv)(**inputs)


def pyramid(depths, heads):
    sizes = dict(depths=depths, num_attention_heads=heads)
    return model_of("Segformer", hidden_sizes=[8, 16, 16, 32], **sizes)


@pytest.mark.parametrize("heads", [[1, 2, 4, 8], [2, 2, 4, 8], [1, 2, 4, 4]])
@torch.no_grad()
def test_a_chain_begins_anew_where_there_are_other_heads_or_another_stage(heads):
    """Stages have maps of different sizes, also those with equally many heads."""
    model = pyramid([2, 2, 1, 1], heads)
    images = torch.randn(1, 3, 64, 64)
    evolved = begun(model, {"pixel_values": images}, "ea")
    evolutions = [each for each in evolved.modules() if isinstance(each, Evolution)]
    assert [each.convs[0].in_channels for each in evolutions] == heads[:2]
    expected = model(images)[0]
    assert not torch.equal(lively(evolved)(images)[0], expected)
    assert torch.equal(unevolve(evolve(model))(images)[0], expected)


def test_causal_layers_without_their_mask_take_what_needs_none():
    """AIMv2's text tower reads later tokens where it gets no mask."""
    begun(model_of("Aimv2Text", **TEXT), inputs_of("bert"), "residual")


@pytest.mark.parametrize("family", ["PegasusX", "BigBirdPegasus"])
@torch.no_grad()
def test_a_decoder_is_causal_by_the_mask_that_it_builds(family):
    """These build a mask for cross-attention beside the causal one."""
    model = model_of(family, **SEQ2SEQ, block_size=8)
    words = torch.randint(3, 50, (2, 16))
    inputs = {"input_ids": words, "decoder_input_ids": words[:, :7].clone(), "use_cache": False}
    evolved = lively(begun(model, inputs, "ea"))
    results = []
    for last in (5, 9):
        inputs["decoder_input_ids"][:, 6] = last
        results.append(evolved(**inputs)[0])
    assert torch.equal(results[0][:, :6], results[1][:, :6])
    assert not torch.equal(results[0], results[1])


@torch.no_grad()
def test_sequences_that_are_longer_than_a_sliding_window_are_refused():
    four_layers = {**TEXT, "num_hidden_layers": 4}  # the first and the last see all tokens
    model = model_of("ModernBert", **four_layers, pad_token_id=0, local_attention=8)
    evolve(model, "ea", layers=[4])(torch.full((1, 6), 7))
    evolved = evolve(model, "ea")
    evolved(torch.full((1, 5), 7))
    with refused("windows and packed sequences have other masks", ValueError):
        evolved(torch.full((1, 6), 7))


def without_its_evolution():
    model = create("vit")
    model.config.ea_vision = evolve(create("vit")).config.ea_vision
    return model


SWIN = dict(image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
CAUSAL_FORM = "has no form for the causal attention of"
FOLLOW = "layer 2 of the chain must follow layer 1"
UNKNOWN = (
    r"no attention layer of it goes through .* transformers \S+ \(tested with 5.20 and later\)"
)
HEADS = [1, 2, 2, 4]
deep = partial(pyramid, [2] * 4, HEADS)
MISFITS = [  # network, options of `evolve`, reason
    (deep, {"kind": "xsa"}, "each query's own value, got .* queries and .* keys"),
    (deep, {"kind": "conv2d"}, "needs patches of an image"),
    (partial(pyramid, [1] * 4, HEADS), {}, "prev_logits of shape .* required, got"),
    # layers that call attention twice
    *product([partial(model_of, "DiffLlama", **LLAMA)], [{}, {"kind": "residual"}], [FOLLOW]),
    # frames attend to each other, too
    (
        partial(model_of, "XCLIPVision", **VISION, num_frames=2),
        {"kind": "conv2d"},
        "a grid of 4x4 patches required, got 2 tokens",
    ),
    (partial(build, "t5gemma2"), {}, "needs a mask that hides only padding"),
]
NOT_CAUSAL = []
for name, kind in product(DECODERS, sorted(set(KINDS) - CAUSAL)):
    NOT_CAUSAL.append((partial(create, name), {"kind": kind}, CAUSAL_FORM))
REFUSED = [
    (
        partial(build, "gemma2"),
        {"kind": "residual"},
        "not support 'attn_logit_softcapping', which Gemma2Attention",
    ),
    (
        partial(build, "gpt_oss"),
        {"kind": "residual"},
        "do not support 'sinks', which GptOssAttention has",
    ),
    (partial(model_of, "DebertaV2", **TEXT), {}, UNKNOWN),
    (partial(model_of, "Swin", **SWIN), {}, "window|no attention layer"),
    (partial(create, "bart", encoder_layerdrop=0.1), {}, "layerdrop must be 0"),
    (lambda: evolve(create("vit")), {}, "evolve already"),
    (without_its_evolution, {}, "names an evolution whose weights it lacks"),
    (
        partial(create, "bert"),
        {"kind": None, "token_conv": True},
        "token_conv needs patches of an image",
    ),
    *product(
        [lambda: siglip2()[0]],
        [{"kind": None, "token_conv": True}, {"kind": "conv2d"}],
        ["needs patches of an image, embedded by a Conv2d"],
    ),
    (partial(create, "t5"), {"start": "paper", "alpha": 0.1}, "leave alpha out, got 0.1"),
    *NOT_CAUSAL,
    *[
        (partial(model_of, name, **SEQ2SEQ, block_size=8), {"kind": "pa"}, CAUSAL_FORM)
        for name in ("PegasusX", "BigBirdPegasus")
    ],
    # reads later tokens where it gets no mask
    (partial(model_of, "Aimv2Text", **TEXT), {}, "causal layers needs their mask"),
]


@pytest.mark.parametrize(
    "create_model, options, reason, error",
    [(*row, UsageError) for row in MISFITS] + [(*row, ValueError) for row in REFUSED],
)
def test_what_cannot_evolve_is_refused_before_its_forward(create_model, options, reason, error):
    model = create_model()
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    with refused(reason, error):
        evolve(model, **options)
    assert not seen


def test_what_did_not_evolve_does_not_go_back(tmp_path):
    with refused("an evolving network required", ValueError):
        unevolve(without_its_evolution())
    create("vit").save_pretrained(tmp_path)
    with refused("no evolution in its config.json", ValueError):
        ea_vision.from_pretrained(tmp_path)


def test_what_would_be_refused_evolves_where_it_is_off():
    evolve(create("t5"), "ea", start="paper")
    plain = model_of("Gemma2", **LLAMA, head_dim=8, attn_logit_softcapping=None)
    begun(plain, {"input_ids": torch.arange(1, 9)[None], "use_cache": False}, "residual")


def test_everything_else_works_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import timm, torch, ea_vision\n"
        "model = ea_vision.evolve(timm.create_model('vit_tiny_patch16_224'))\n"
        "ea_vision.unevolve(model)\n"
        "try: ea_vision.evolve(torch.nn.Linear(2, 2))\n"
        "except ValueError as error: print(error)\n"
    )
    done = python("-c", code)
    assert "cannot evolve" in done.stdout, done.stderr
