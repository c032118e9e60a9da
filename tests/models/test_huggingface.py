"""Models of Hugging Face's transformers evolve: equal at the start, learn after one step, are reverted and saved."""

import copy
import json
import shutil
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.testing import assert_close

import ea_vision
from ea_vision import evolve, record_attention, unevolve
from ea_vision.layers import Evolution, TokenConv
from ea_vision.layers.sequence_attention import Chain
from ea_vision.ops import use_implementation
from experiments.transformers_models import build, small_options
from tests.layers.oracle import map_conv
from tests.models.zoo import KINDS, idle, stirred
from tests.process import python
from tests.refused import refused

# families of images: their number of prefix tokens
IMAGES = {"ViT": 1, "Dinov2": 1, "DINOv3ViT": 3, "SiglipVision": 0, "CLIPVision": 1}
ENCODERS = [*IMAGES, "Bert", "Roberta", "DistilBert", "T5Encoder"]
WITH_CROSS_ATTENTION = ["GPT2", "Bart", "T5"]
DECODERS = ["CLIPText", "Llama", "GPTNeoX", *WITH_CROSS_ATTENTION]
FAMILIES = [*ENCODERS, *DECODERS]
OPTIONS = {
    "DINOv3ViT": dict(num_register_tokens=2),
    "GPT2": dict(scale_attn_by_inverse_layer_idx=True, add_cross_attention=True),
    "T5Encoder": dict(d_kv=6),
    "T5": dict(d_kv=6, decoder_start_token_id=0),
}
CAUSAL = {"ea", "residual", "talking_heads", "xsa", "gated"}
NEAR = {"rtol": 0, "atol": 1e-5}
EXACT = {"rtol": 0, "atol": 1e-10}


def create(family, head="Model", **options):
    """A small network without dropout, whose parameters all affect the output."""
    torch.manual_seed(0)
    model_class = getattr(transformers, family + head)
    small = small_options(model_class.config_class())
    config = model_class.config_class(**{**small, **OPTIONS.get(family, {}), **options})
    model = model_class(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def inputs_of(model, tokens=9, size=(32, 32)):
    """The same at every call."""
    torch.manual_seed(1)
    if model.main_input_name == "pixel_values":
        images = torch.randn(2, 3, *size).to(model.dtype)
        return {"pixel_values": images, "interpolate_pos_encoding": True}
    inputs = {"input_ids": torch.randint(3, 50, (2, tokens))}
    if hasattr(model, "decoder"):
        inputs["decoder_input_ids"] = inputs["input_ids"][:, 2:]
    if getattr(model.config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = torch.randn(2, 5, 32).to(model.dtype)
    return inputs


def output(model, **inputs):
    return model(**{**inputs_of(model), **inputs})[0]


def begun(model, inputs, *args, **options):
    """Return the evolved model, which begins as the plain one."""
    evolved = evolve(model, *args, **options)
    with torch.no_grad():
        assert_close(evolved(**inputs)[0], model(**inputs)[0], **NEAR)
    return evolved


def kinds_of(family):
    kinds = [kind for kind in KINDS if family in ENCODERS or kind in CAUSAL]
    if family in WITH_CROSS_ATTENTION:
        kinds.remove("xsa")  # cross-attention has no values of its own tokens
    return kinds


def stepped(model):
    """Take a step of training, and return the model with the gradients of the next one."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        (output(model) ** 3).sum().backward()
        optimizer.step()
    return model


lively = partial(stirred, by=0.3)


def evolving(family, kind="ea", **options):
    return lively(evolve(create(family), kind, **options))


def test_another_implementation_of_attention_is_refused():
    """transformers advises "eager" for output_attentions: the maps would silently be those of the plain model."""
    model = evolve(create("Bart"), "talking_heads")
    expected = output(model)
    changed = copy.deepcopy(model)
    for implementation in ("eager", "sdpa"):
        changed.set_attn_implementation(implementation)
        with refused(f"needs attn_implementation 'ea_vision', got '{implementation}'", ValueError):
            output(changed)
        assert torch.equal(output(model), expected)
    changed.set_attn_implementation("ea_vision")
    assert torch.equal(output(changed), expected)


def test_layers_without_an_evolution_keep_the_scale_of_their_model():
    model = create("ViT")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.9
    begun(model, inputs_of(model), None, value_residual=True)


# ---- folders ---------------------------------------------------------------------------------------------------------


def reloaded(model, folder):
    """Save a model, and return a copy of what is loaded."""
    model.save_pretrained(folder)
    loaded = ea_vision.from_pretrained(folder)
    assert loaded.config.ea_vision == model.config.ea_vision
    return copy.deepcopy(loaded)


@pytest.mark.parametrize(
    "status, options",
    [
        ("missing", {"value_residual": True}),
        ("unexpected", {"attn_layers": [2]}),
        ("mismatched", {"kernel_size": 5}),
    ],
)
def test_weights_that_are_not_the_evolution_s_are_refused_by_name(status, options, tmp_path):
    """transformers would leave memory as it is in missing ones, and leave out unexpected ones."""
    plain = create("Bert")
    evolve(plain).save_pretrained(tmp_path)
    evolve(plain, **options).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", tmp_path)
    with refused(rf"{status}, the first of them encoder\.layer\.\d\..*maps"):
        ea_vision.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_a_folder_is_read_with_the_keywords_of_transformers(tmp_path):
    """Also where the plain model's attention is not installed."""
    model = evolve(create("ViT"))
    model.config.ea_vision["attn_implementation"] = "flash_attention_2"
    model.save_pretrained(tmp_path / "inner")
    loaded, info = ea_vision.from_pretrained(
        tmp_path, subfolder="inner", dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values())
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.float64
    assert loaded.config.ea_vision == model.config.ea_vision
    assert_close(output(loaded.eval()), output(model.double()))


def test_transformers_initialises_no_mechanism_anew():
    model = evolving("ViT")
    before = copy.deepcopy(model.state_dict())
    model._is_hf_initialized = False
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) or ".maps." not in name, name


def built_by_configuration(folder, **how):
    config = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModel.from_config(config, **how)


PLAIN = {  # family: what reads a folder of its plain model
    "ViT": [transformers.AutoModel.from_pretrained, transformers.ViTModel.from_pretrained],
    "Bert": [transformers.AutoModel.from_pretrained, built_by_configuration],
    "CLIP": [
        transformers.CLIPVisionModel.from_pretrained,
        transformers.CLIPTextModel.from_pretrained,
    ],
}


@pytest.mark.parametrize("family", PLAIN)
def test_an_evolved_folder_is_not_read_as_the_plain_model_or_a_tower_of_it(family, tmp_path):
    plain = create(family)
    evolve(plain).save_pretrained(tmp_path)
    unevolve(evolve(plain)).save_pretrained(tmp_path / "plain")
    for load, how in product(PLAIN[family], ({}, {"attn_implementation": "eager"})):
        with pytest.raises(ValueError, match=r"ea_vision\.from_pretrained"):  # in lines of theirs
            load(tmp_path, **how)
        load(tmp_path / "plain", **how)


def test_nor_in_a_pipeline_and_folders_of_earlier_versions_are_read(tmp_path):
    model = evolving("Bert")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ea_vision\.from_pretrained"):
        transformers.pipeline("feature-extraction", str(tmp_path))
    with refused("evolved model's configuration, without mechanisms", ValueError):
        output(transformers.AutoModel.from_config(model.config))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for entry in ("attn_implementation", "experts_implementation"):
        del config[entry]
    path.write_text(json.dumps(config))
    for load in (ea_vision.from_pretrained, ea_vision.load):
        assert torch.equal(output(load(str(tmp_path)).eval()), output(model))


def test_a_plain_model_with_an_evolved_part_is_refused(tmp_path):
    """Its config.json is a plain model's, its weights are not."""
    model = create("CLIP")
    model.save_pretrained(tmp_path / "plain")
    assert type(ea_vision.load(tmp_path / "plain")) is transformers.CLIPModel
    model.vision_model = evolve(model.vision_model)
    model.save_pretrained(tmp_path / "part")
    with refused("unexpected, the first of them vision_model"):
        ea_vision.load(tmp_path / "part")


def test_an_adapter_s_base_is_found_by_no_plain_name(tmp_path):
    """AutoPeftModel, and transformers, would put the adapter on the plain model that was evolved."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    create("Bert").save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModel.from_pretrained(tmp_path / "plain")
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=["maps"])
    evolved = evolve(plain, start="paper")
    assert unevolve(evolve(plain)).name_or_path == str(tmp_path / "plain")
    evolved.save_pretrained(tmp_path / "evolved")
    load = partial(ea_vision.from_pretrained, str(tmp_path / "evolved"))
    for base, message in (
        (evolved, r"ea_vision\.evolve\("),
        (load(), r"ea_vision\.from_pretrained"),
    ):
        adapted = peft.get_peft_model(base, config)
        adapted.save_pretrained(tmp_path / "adapter")
        for auto in (peft.AutoPeftModel, transformers.AutoModel):
            with pytest.raises((ValueError, OSError), match=message):
                auto.from_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter").eval()
    assert torch.equal(output(again), output(adapted.eval()))


# ---- against an independent loop over the layers ---------------------------------------------------------------------


# padding on the left of one sentence, on the right of the other
REAL = torch.ones(2, 9, dtype=torch.bool)
REAL[0, :3] = REAL[1, 7:] = False
PADDED = {"attention_mask": REAL.long()}


def read(real, causal):
    """Return (B, 1, T, T), True where neither the query nor the key is padding, nor the key a later one."""
    pairs = real[:, None, None, :] & real[:, None, :, None]
    return pairs.tril() if causal else pairs


class Loop:
    """Evolving maps in transformers' unfused attention, layer by layer, by sums over shifted maps.

    pairs: what the queries read, see `read`.
    """

    def __init__(self, evolved, plain, pairs, causal):
        layers = dict(evolved.named_modules())
        self.evolutions = {}
        for name, module in plain.named_modules():
            if hasattr(layers[name], "maps"):
                self.evolutions[module] = layers[name].maps.evolution
        self.pairs = pairs
        self.causal = causal
        self.previous = None

    def __call__(self, module, query, key, value, mask, scaling, position_bias=0.0, **_):
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
        logits = query @ key.mT * scaling + position_bias
        evolution = self.evolutions[module]
        mixes_heads = hasattr(evolution, "proj_l")
        if mixes_heads:
            logits = mixed_heads(evolution.proj_l, logits)
        elif evolution is not None:
            logits = self.convolved(evolution, logits)
        self.previous = logits
        attn = logits.masked_fill(~self.pairs, -1e30).softmax(-1)
        if mixes_heads:
            attn = mixed_heads(evolution.proj_w, attn).masked_fill(~self.pairs, 0)
        return (attn @ value).transpose(1, 2), None

    def convolved(self, evolution, logits):
        if not self.causal:
            logits = evolution.alpha * self.previous + (1 - evolution.alpha) * logits
        mixed = logits * self.pairs
        new = map_conv(mixed, evolution.convs[0]) * self.pairs
        if self.causal:  # moved down and to the right by one
            new = F.pad(new, (1, -1, 1, -1))
        return evolution.beta * new + (1 - evolution.beta) * mixed


def mixed_heads(linear, maps):
    return linear(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "family, kind",
    [
        *product(["ViT", "DINOv3ViT", "Bert", "T5Encoder", "Llama"], ["ea"]),
        ("Llama", "talking_heads"),
    ],
)
@torch.no_grad()
def test_agrees_with_a_loop_over_unfused_attention(family, kind):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = create(family).double()
    evolved = lively(evolve(plain, kind))
    inputs = {} if family in IMAGES else PADDED
    real = REAL if inputs else torch.ones(output(plain).shape[:2], dtype=torch.bool)
    causal = family == "Llama"
    ALL_ATTENTION_FUNCTIONS.register("loop", Loop(evolved, plain, read(real, causal), causal))
    ALL_MASK_ATTENTION_FUNCTIONS.register("loop", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    plain.set_attn_implementation("loop")
    assert_close(output(evolved, **inputs)[real], output(plain, **inputs)[real], **EXACT)


# ---- padding, caches, checkpointing, threads, compilation ------------------------------------------------------------


PADDING = 7


def padded_inputs(family, sides, sentence, left, right):
    """Return a sentence as a model's inputs, padded in some of them: the source ("") and the targets ("decoder_")."""
    padded = F.pad(sentence, (left, right), value=PADDING)
    inputs = {"input_ids": sentence}
    if family in ("T5", "Bart"):
        inputs["decoder_input_ids"] = sentence
    else:
        positions = torch.arange(padded.shape[1]) - left
        inputs["position_ids"] = positions.clamp(min=0)[None]
    for side in sides:
        inputs[f"{side}input_ids"] = padded
        inputs[f"{side}attention_mask"] = (padded != PADDING).long()
    return inputs


@pytest.mark.parametrize(
    "family, sides",
    [
        ("Bert", [""]),
        ("Llama", [""]),
        ("Bart", [""]),
        ("T5", [""]),
        ("T5", ["decoder_"]),
        ("T5", ["", "decoder_"]),
    ],
)
@torch.no_grad()
def test_results_do_not_depend_on_the_amount_of_padding(family, sides):
    sentence = torch.randint(8, 50, (1, 6))
    for kind in sorted(set(kinds_of(family)) - {"reattention", "refiner"}):
        model = evolving(family, kind, value_residual=True).double()
        expected = model(**padded_inputs(family, sides, sentence, 0, 0))[0]
        for left, right in [(0, 2), (0, 7), (1, 0), (5, 0), (3, 4)]:
            if left and family == "Bart":  # its positions are learned, and count padding
                continue
            inputs = padded_inputs(family, sides, sentence, left, right)
            tokens = inputs.get("decoder_input_ids", inputs["input_ids"])
            result = model(**inputs)[0]
            message = f"{kind}, {left} and {right}: {{}}".format
            assert_close(result[tokens != PADDING], expected[0], **EXACT, msg=message)


@pytest.mark.parametrize("kind", ["ea", "residual", "talking_heads", "gated"])
@pytest.mark.parametrize(
    "family, head",
    [
        ("Llama", "ForCausalLM"),
        ("Bart", "ForConditionalGeneration"),
        ("T5", "ForConditionalGeneration"),
    ],
)
def test_generates_with_a_cache_what_it_generates_without_or_refuses_it(family, head, kind):
    model = lively(evolve(create(family, head), kind, value_residual=True)).double()
    ids = torch.randint(3, 50, (2, 6))
    for beams in (1, 3):
        sizes = dict(num_beams=beams, max_new_tokens=6, min_new_tokens=6)
        sizes |= dict(output_scores=True, return_dict_in_generate=True)
        expected = model.generate(ids, use_cache=False, **sizes)
        if kind == "ea":
            with refused("use_cache=False required", ValueError):
                model.generate(ids, use_cache=True, **sizes)
        else:
            cached = model.generate(ids, use_cache=True, **sizes)
            assert torch.equal(cached.sequences, expected.sequences)
            assert_close(cached.scores, expected.scores, **EXACT)


@pytest.mark.parametrize("kind", ["residual", "talking_heads", "xsa", "gated"])
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
@torch.no_grad()
def test_a_cache_changes_nothing(family, kind):
    """A static cache has room for future tokens in its keys and values."""
    model = evolving(family, kind, value_residual=True).double()
    ids = inputs_of(model)["input_ids"]
    expected = model(ids, use_cache=False)[0]
    static = transformers.StaticCache(model.config, max_cache_len=16)
    for cache in (transformers.DynamicCache(), static):
        parts = []
        for part in ids.split([4, 1, 1, 3], dim=1):
            parts.append(model(part, past_key_values=cache, use_cache=True)[0])
        assert_close(torch.cat(parts, dim=1), expected, **EXACT)


def test_layers_that_read_another_s_keys_see_all_that_are_written():
    """As in Gemma 3n, where such layers have no cache entry."""
    config = create("Llama", num_hidden_layers=1).config
    cache = transformers.StaticCache(config, max_cache_len=16)
    keys = torch.zeros(1, 2, 5, 8)
    cache.update(keys, keys, 0)
    chain = Chain("residual", cross=False, depth=3)
    layer = nn.Module()
    layer.layer_idx = 2
    chain.note_input(layer, (), {"past_key_values": cache})
    assert chain.written(layer, 16) == 5


@pytest.mark.parametrize("family", ["ViT", "Bert", "T5", "Bart", "Llama"])
@pytest.mark.parametrize("kind", ["ea", "talking_heads"])
def test_gradient_checkpointing_changes_nothing_or_is_refused(family, kind):
    model = evolving(family, kind, value_residual=True).double().train()

    def gradients():
        model.zero_grad()
        loss = output(model).square().sum()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(gradients(), expected)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with refused("use_reentrant", ValueError):
        gradients()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ViT", "Bert", "Llama"])
def test_compiles_in_one_graph(family):
    model = evolving(family, value_residual=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(output(compiled), output(model), rtol=1e-4, atol=1e-4)


# ---- sizes, and the grid behind the prefix tokens --------------------------------------------------------------------


def inputs_of_siglip2(H, W):
    image = {
        "pixel_values": torch.randn(1, H * W, 192),
        "pixel_attention_mask": torch.ones(1, H * W),
        "spatial_shapes": torch.tensor([[H, W]]),
    }
    return {"input_ids": torch.randint(3, 50, (1, 9)), **image}


@pytest.mark.parametrize("family", [*FAMILIES, "Siglip2"])
@torch.no_grad()
def test_forwards_of_two_sizes_follow_one_another(family):
    """The patches of SigLIP 2 are embedded by no Conv2d, and those of mechanisms are none either."""
    model = create(family)
    if family == "Siglip2":
        inputs = 2 * [inputs_of_siglip2(3, 4), inputs_of_siglip2(2, 5)]
        kinds = ["ea", "pa", "residual"]
    else:
        inputs = 2 * [inputs_of(model), inputs_of(model, 7, (24, 40))]
        kinds = kinds_of(family)
    expected = [model(**each)[0] for each in inputs]
    for kind in kinds:
        evolved = evolve(model, kind)
        assert_close([evolved(**each)[0] for each in inputs], expected, **NEAR)


@torch.no_grad()
def test_layers_with_a_configuration_of_their_own_evolve(tmp_path):
    """CLIPSeg's decoder keeps a copy of the image tower's."""
    plain = create("CLIPSeg", "ForImageSegmentation", reduce_dim=16, extract_layers=[0, 1])
    ids = torch.randint(3, 50, (2, 9))
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    evolved = begun(plain, inputs, "ea")
    assert torch.equal(unevolve(evolved)(**inputs).logits, plain(**inputs).logits)
    again = reloaded(lively(evolved), tmp_path)
    assert torch.equal(again(**inputs).logits, evolved(**inputs).logits)


@pytest.mark.parametrize("family", IMAGES)
def test_grids_are_found_behind_prefix_tokens(family):
    model = create(family)
    inputs = inputs_of(model, size=(24, 40))
    evolved = begun(model, inputs, "conv2d", token_conv=True, prefix="pass")
    mechanisms = [m for m in evolved.modules() if hasattr(m, "num_prefix_tokens")]
    assert {m.num_prefix_tokens for m in mechanisms} == {IMAGES[family]}
    conv = next(m for m in mechanisms if isinstance(m, TokenConv))
    sizes = []
    conv.register_forward_hook(lambda _, args, result: sizes.append(args[1]))
    lively(evolved)(**inputs)
    assert sizes == [(3, 5)]


@pytest.mark.parametrize("family", ["ViT", "Bert", "Llama"])
@torch.no_grad()
def test_recorded_parts_are_what_the_layers_used(family):
    model = evolving(family).double()
    inputs = {} if family in IMAGES else PADDED
    parts = ("attn", "logits", "self_logits", "prev_logits", "conv_logits")
    with record_attention(model, parts=parts) as maps:
        output(model, **inputs)
    first, *others = maps.values()
    assert first.prev_logits is None
    assert len(others) == 2
    pairs = torch.ones_like(first.attn, dtype=torch.bool)
    if inputs:
        pairs = read(REAL, family == "Llama").expand_as(pairs)
    for layer in others:
        assert_close(layer.attn.sum(-1), torch.ones_like(layer.attn[..., 0]))
        evolution = model.get_submodule(layer.name).evolution
        mixed = evolution.alpha * layer.prev_logits + (1 - evolution.alpha) * layer.self_logits
        expected = evolution.beta * layer.conv_logits + (1 - evolution.beta) * mixed
        assert_close(layer.logits[pairs], expected[pairs], **EXACT)


@torch.no_grad()
def test_each_chain_of_an_encoder_and_its_decoder_begins_without_maps_before():
    model = evolving("T5")
    with record_attention(model, parts="prev_logits") as maps:
        output(model)
    starts = [layer.name for layer in maps.values() if layer.prev_logits is None]
    assert (len(maps), len(starts)) == (9, 3)


@pytest.mark.parametrize("family", ["Bert", "Llama"])
@torch.no_grad()
def test_recorded_probabilities_to_padding_are_0(family):
    model = evolving(family, "talking_heads")
    with record_attention(model, layers=2, parts="softmax") as maps:
        output(model, **PADDED)
    to_padding = REAL[:, :, None] & ~REAL[:, None, :]
    softmax = maps[2]["softmax"].transpose(0, 1)
    assert not softmax[:, to_padding].any()


# ---- the tools around them -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_blocks_with_hooks_of_accelerate_run_their_mechanisms():
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    mechanisms = dict(kind="conv2d", start="paper", token_conv="paper")
    expected = evolve(create("ViT"), **mechanisms)
    plain = create("ViT")
    for block in plain.modules():
        if type(block).__name__ == "ViTLayer":
            hooks.add_hook_to_module(block, hooks.AlignDevicesHook(execution_device="cpu"))
    model = evolve(plain, **mechanisms)
    model.load_state_dict(expected.state_dict())
    assert torch.equal(output(model), output(expected))
    assert torch.equal(output(unevolve(evolve(plain))), output(create("ViT")))


@pytest.mark.parametrize("kind", ["ea", "mta", "xsa"])
@torch.no_grad()
def test_offloaded_weights_of_mechanisms_are_loaded_or_refused(kind):
    """accelerate loads them for a module's forward alone; those of mta were read from memory that nobody had set."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = evolving("ViT", kind)
    expected = output(model)
    offload = partial(accelerate.cpu_offload, execution_device=torch.device("cpu"))
    loaded = offload(copy.deepcopy(model), preload_module_classes=["SequenceMaps"])
    assert_close(output(loaded), expected)
    one_by_one = offload(model)
    if kind == "ea":
        return assert_close(output(one_by_one), expected)
    with refused(r"offloaded.*preload_module_classes=\['SequenceMaps'\]", ValueError):
        output(one_by_one)


def test_evolve_never_moves_weights_whatever_implementation_is_forced():
    """Moving quantised weights moves their scales; a copy without numbers runs on the meta device."""

    class Quantised(nn.Parameter):
        def to(self, *_, **__):
            raise RuntimeError("moved")

    model = create("ViT")
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.weight = Quantised(linear.weight.data, requires_grad=False)
    with use_implementation("cpu"):
        evolving = evolve(model, "ea")
    assert_close(output(evolving), output(model))


def test_trains_with_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = evolve(create("Bert", "ForSequenceClassification", num_labels=3))
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
    sentences = torch.randint(3, 50, (80, 8))
    examples = [{"input_ids": sentence, "labels": sentence[0] % 3} for sentence in sentences]
    trainer = transformers.Trainer(model, arguments, train_dataset=examples)
    assert trainer.train().global_step == 20
    after = model.state_dict()
    assert all(not torch.equal(after[key], before[key]) for key in before if ".maps." in key)
    loaded = ea_vision.from_pretrained(tmp_path / "checkpoint-20").eval()
    assert torch.equal(output(loaded), output(model.eval()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["ViT", "Bert", "Llama", "T5"])
@torch.no_grad()
def test_half_precision_stays_near(family, dtype):
    model = create(family)
    expected = output(model)
    result = output(evolve(model, "ea", value_residual=True).to(dtype))
    assert result.dtype == dtype
    assert (result - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("kind", ["ea", "gated"])  # gated reads the layer's input
def test_lora_on_queries_and_values(kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = create("Bert")
    evolved = evolve(plain, kind, value_residual=True)
    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["maps"], r=2)
    model = peft.get_peft_model(evolved, config)
    assert_close(output(model), output(plain), **NEAR)
    stepped(model)
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    for part in ("lora_A", "lora_B", "modules_to_save"):
        assert any(part in key.split(".") for key in trained)
    assert trained.isdisjoint(idle(model))
    expected = output(model)
    assert_close(output(model.merge_and_unload()), expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


SENTENCES = [torch.ones(4, 4), torch.ones(5, 5)]
PACKED = torch.block_diag(*SENTENCES).bool().expand(2, 1, 9, 9)


@pytest.mark.parametrize(
    "kind, mask, reason",
    [
        ("ea", PACKED, "a mask that hides only padding and, if causal, later"),
        ("reattention", REAL.long(), "does not support masks"),
        ("refiner", REAL.long(), "does not support masks"),
    ],
)
def test_masks_that_a_kind_cannot_take_are_refused(kind, mask, reason):
    with refused(reason, ValueError):
        output(evolve(create("Bert"), kind), attention_mask=mask)


@pytest.mark.parametrize("number", [-1e4, -1e9, -torch.inf, None])
@pytest.mark.parametrize("kind", ["ea", "pa", "mta", "talking_heads"])
@torch.no_grad()
def test_masks_hide_padding_by_any_number_or_are_boolean(kind, number):
    model = evolving("Bert", kind).double()
    mask = REAL[:, None, None, :].expand(-1, 1, 9, -1)
    if number is not None:
        mask = torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(~mask, number)
    result = output(model, attention_mask=mask)
    assert_close(result[REAL], output(model, **PADDED)[REAL], **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Yolos", "ViTMAE"])
def test_tokens_that_form_no_grid_are_for_kinds_that_need_none(family):
    """YOLOS has detection tokens after its patches; ViTMAE drops random patches."""
    model = create(family)
    inputs = inputs_of(model)
    if family == "ViTMAE":
        inputs["noise"] = torch.rand(2, 16)
    for kind in (None, "residual", "talking_heads", "xsa", "gated"):
        evolved = begun(model, inputs, kind, value_residual=True)
        assert not torch.equal(lively(evolved)(**inputs)[0], model(**inputs)[0])
    for kind, token_conv in (("ea", False), ("conv2d", False), (None, True)):
        with refused("a grid of 4x4 patches required, got", ValueError):
            evolve(model, kind, token_conv=token_conv)(**inputs)


pyramid = partial(
    create, "Segformer", hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 2, 2, 4]
)


@pytest.mark.parametrize("heads", [[1, 2, 4, 8], [2, 2, 4, 8], [1, 2, 4, 4]])
@torch.no_grad()
def test_a_chain_begins_anew_where_there_are_other_heads_or_another_stage(heads):
    """Stages have maps of different sizes, also those with equally many heads."""
    model = pyramid(depths=[2, 2, 1, 1], num_attention_heads=heads)
    images = torch.randn(1, 3, 64, 64)
    evolved = begun(model, {"pixel_values": images}, "ea")
    evolutions = [each for each in evolved.modules() if isinstance(each, Evolution)]
    assert [each.convs[0].in_channels for each in evolutions] == heads[:2]
    expected = model(images)[0]
    assert not torch.equal(lively(evolved)(images)[0], expected)
    assert torch.equal(unevolve(evolve(model))(images)[0], expected)


def test_causal_layers_without_their_mask_take_what_needs_none():
    """AIMv2's text tower reads later tokens where it gets no mask."""
    model = create("Aimv2Text")
    begun(model, inputs_of(model), "residual")


@pytest.mark.parametrize("family", ["PegasusX", "BigBirdPegasus"])
@torch.no_grad()
def test_a_decoder_is_causal_by_the_mask_that_it_builds(family):
    """These build a mask for cross-attention beside the causal one."""
    model = create(family, block_size=8, use_cache=False)
    inputs = inputs_of(model, 16)
    evolved = lively(begun(model, inputs, "ea"))
    expected = evolved(**inputs)[0]
    targets = inputs["decoder_input_ids"].clone()
    targets[:, -1] = 1
    result = evolved(**{**inputs, "decoder_input_ids": targets})[0]
    assert torch.equal(result[:, :-1], expected[:, :-1])
    assert not torch.equal(result, expected)


@torch.no_grad()
def test_sequences_that_are_longer_than_a_sliding_window_are_refused():
    # of four layers, the first and the last see all tokens
    model = create("ModernBert", num_hidden_layers=4, local_attention=8)
    words = torch.full((1, 6), 7)
    evolve(model, "ea", layers=[4])(words)
    evolved = evolve(model, "ea")
    evolved(words[:, :5])
    with refused("windows and packed sequences have other masks", ValueError):
        evolved(words)


def without_its_evolution():
    model = create("ViT")
    model.config.ea_vision = evolve(create("ViT")).config.ea_vision
    return model


UNKNOWN = (
    r"no attention layer of it goes through .* transformers \S+ \(tested with 5.20 and later\)"
)
REFUSED = [  # network, options of `evolve`, reason
    (
        partial(pyramid, depths=[2] * 4),
        {"kind": "xsa"},
        "each query's own value, got .* queries and .* keys",
    ),
    (partial(pyramid, depths=[2] * 4), {"kind": "conv2d"}, "needs patches of an image"),
    (partial(pyramid, depths=[1] * 4), {}, "prev_logits of shape .* required, got"),
    # layers that call attention twice
    *product(
        [partial(create, "DiffLlama")],
        [{}, {"kind": "residual"}],
        ["layer 2 of the chain must follow layer 1"],
    ),
    # frames attend to each other, too
    (
        partial(create, "XCLIPVision", num_frames=2),
        {"kind": "conv2d"},
        "a grid of 4x4 patches required, got 2 tokens",
    ),
    (partial(build, "t5gemma2"), {}, "needs a mask that hides only padding"),
    (
        partial(create, "Gemma2"),
        {"kind": "residual"},
        "not support 'attn_logit_softcapping', which Gemma2Attention",
    ),
    (
        partial(create, "GptOss"),
        {"kind": "residual"},
        "do not support 'sinks', which GptOssAttention has",
    ),
    (partial(create, "DebertaV2"), {}, UNKNOWN),
    (partial(create, "Swin"), {}, "window|no attention layer"),
    (partial(create, "Bart", encoder_layerdrop=0.1), {}, "layerdrop must be 0"),
    (partial(evolving, "ViT"), {}, "evolve already"),
    (without_its_evolution, {}, "names an evolution whose weights it lacks"),
    (
        partial(create, "Bert"),
        {"kind": None, "token_conv": True},
        "token_conv needs patches of an image",
    ),
    *product(
        [partial(create, "Siglip2")],
        [{"kind": None, "token_conv": True}, {"kind": "conv2d"}],
        ["needs patches of an image, embedded by a Conv2d"],
    ),
    # reads later tokens where it gets no mask
    (partial(create, "Aimv2Text"), {}, "causal layers needs their mask"),
]
for family, kind in product([*DECODERS, "PegasusX", "BigBirdPegasus"], sorted(set(KINDS) - CAUSAL)):
    REFUSED.append(
        (partial(create, family), {"kind": kind}, "has no form for the causal attention of")
    )


@pytest.mark.parametrize("create_model, options, reason", REFUSED)
def test_what_cannot_evolve_is_refused_before_its_forward(create_model, options, reason):
    model = create_model()
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    with refused(reason):
        evolve(model, **options)
    assert not seen


def test_what_did_not_evolve_does_not_go_back(tmp_path):
    with refused("an evolving network required", ValueError):
        unevolve(without_its_evolution())
    create("ViT").save_pretrained(tmp_path)
    with refused("no evolution in its config.json", ValueError):
        ea_vision.from_pretrained(tmp_path)


def test_what_would_be_refused_evolves_where_it_is_off():
    causal = create("T5")
    evolve(causal, "ea", start="paper")
    with refused("leave alpha out, got 0.1", ValueError):
        evolve(causal, "ea", start="paper", alpha=0.1)
    plain = create("Gemma2", attn_logit_softcapping=None, use_cache=False)
    begun(plain, inputs_of(plain), "residual")


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
