"""Models of Hugging Face's transformers evolve: equal at the start, alive one step on, back again, saved and loaded."""

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ea_vision
from ea_vision import evolve, record_attention, unevolve
from ea_vision.layers import TokenConv
from tests.models.test_across import KINDS
from tests.test_docs import ROOT, blocks

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
DECODERS = ("clip text", "llama", "bart", "t5")
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


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> dict:
    torch.manual_seed(1)
    if ARCHITECTURES[name][2].get("image_size"):
        return {"pixel_values": torch.randn(2, 3, 32, 32).to(dtype)}
    ids = torch.randint(3, 50, (2, 9))
    if name in ("bart", "t5"):
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    return {"input_ids": ids}


def output(model: nn.Module, name: str) -> torch.Tensor:
    return model(**inputs_of(name, model.dtype), return_dict=True).last_hidden_state


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


@torch.no_grad()
def test_layers_without_an_evolution_keep_the_scale_of_their_model():
    model = create("vit")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.9
    evolved = evolve(model, None, value_residual=True)
    assert_close(output(evolved, "vit"), output(model, "vit"), rtol=0, atol=1e-5)


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


# ---- against a loop of its own ---------------------------------------------------------------------------------------


def shifted(maps: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """Return maps (B, K, Q, N) moved by whole entries, 0 where nothing comes from."""
    moved = torch.zeros_like(maps)
    Q, N = maps.shape[-2:]
    for row in range(Q):
        for column in range(N):
            if 0 <= row - down < Q and 0 <= column - right < N:
                moved[..., row, column] = maps[..., row - down, column - right]
    return moved


class OwnLoop:
    """EA in transformers' unfused attention, layer by layer, entry by entry.

    real: (B, T), True where a token is no padding.
    """

    def __init__(self, evolved: nn.Module, plain: nn.Module, real: torch.Tensor, form: str):
        layers = dict(evolved.named_modules())
        self.evolutions = {
            module: layers[name].maps.evolution
            for name, module in plain.named_modules()
            if hasattr(layers[name], "maps")
        }
        self.real = real
        self.form = form
        self.previous = None

    def convolved(self, evolution: nn.Module, maps: torch.Tensor) -> torch.Tensor:
        weight, bias = evolution.convs[0].weight, evolution.convs[0].bias
        result = bias.view(1, -1, 1, 1).expand_as(maps)
        for row in (-1, 0, 1):
            for column in (-1, 0, 1):
                heads = weight[:, :, row + 1, column + 1]
                neighbour = shifted(maps, -row, -column)
                result = result + torch.einsum("ab,nbij->naij", heads, neighbour)
        return result.relu()

    def __call__(self, module, query, key, value, mask, scaling=None, position_bias=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(-2, -1) * (scaling or query.shape[-1] ** -0.5)
        if position_bias is not None:
            logits = logits + position_bias
        read = self.real[:, None, None, :] & self.real[:, None, :, None]
        if self.form == "self":
            read = read & torch.ones_like(read).tril()
        evolution = self.evolutions[module]
        if evolution is not None:
            mixed = logits
            if self.form == "none":
                mixed = evolution.alpha * self.previous + (1 - evolution.alpha) * logits
            mixed = mixed * read
            new = self.convolved(evolution, mixed) * read
            if self.form == "self":
                new = shifted(new, 1, 1)
            logits = evolution.beta * new + (1 - evolution.beta) * mixed
        self.previous = logits
        hidden = ~self.real[:, None, None, :].expand(-1, 1, logits.shape[2], -1)
        if self.form == "self":
            hidden = hidden | torch.ones_like(hidden).triu(1)
        weights = logits.masked_fill(hidden, -1e30).softmax(-1)
        return (weights @ value).transpose(1, 2), None


def lively(model: nn.Module) -> nn.Module:
    """Give every parameter of the mechanisms a value that matters."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".maps." in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", ["vit", "dinov3", "bert", "t5 encoder", "llama"])
def test_agrees_with_a_loop_over_unfused_attention(name):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = create(name).double()
    evolved = lively(evolve(plain, "ea"))
    inputs = inputs_of(name, torch.float64)
    if "pixel_values" in inputs:
        tokens = 19 if name == "dinov3" else 17
    else:
        tokens = 9
    real = torch.ones(2, tokens, dtype=torch.bool)
    if tokens == 9:
        real[0, :3] = False  # padding on the left of one sentence, on the right of the other
        real[1, 7:] = False
        inputs["attention_mask"] = real.long()
    loop = OwnLoop(evolved, plain, real, "self" if name == "llama" else "none")
    ALL_ATTENTION_FUNCTIONS.register("own_loop", loop)
    ALL_MASK_ATTENTION_FUNCTIONS.register("own_loop", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    plain.set_attn_implementation("own_loop")
    ours, theirs = evolved(**inputs).last_hidden_state, plain(**inputs).last_hidden_state
    assert_close(ours[real], theirs[real], rtol=0, atol=1e-10)


class TalkingLoop:
    """Talking heads in transformers' unfused attention, for queries that are the last of the keys."""

    def __init__(self, evolved: nn.Module, plain: nn.Module):
        layers = dict(evolved.named_modules())
        self.evolutions = {module: layers[name] for name, module in plain.named_modules()}

    def __call__(self, module, query, key, value, mask, scaling, **_):
        groups = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(groups, 1)
        values = value.repeat_interleave(groups, 1)
        evolution = self.evolutions[module].maps.evolution
        logits = torch.einsum("bkqd,bknd->bqnk", query * scaling, keys)
        mixed = evolution.proj_l(logits).permute(0, 3, 1, 2)
        Q, N = mixed.shape[2:]
        later = torch.ones(Q, N, dtype=torch.bool).triu(1 + N - Q)
        attn = mixed.masked_fill(later, -1e30).softmax(-1)
        attn = evolution.proj_w(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (attn.masked_fill(later, 0) @ values).transpose(1, 2), None


@torch.no_grad()
def test_a_decoder_agrees_with_a_loop_with_and_without_a_cache():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = create("llama").double()
    evolved = lively(evolve(plain, "talking_heads"))
    ALL_ATTENTION_FUNCTIONS.register("talking_loop", TalkingLoop(evolved, plain))
    plain.set_attn_implementation("talking_loop")
    ids = inputs_of("llama")["input_ids"]
    expected = plain(ids).last_hidden_state
    assert_close(evolved(ids).last_hidden_state, expected, rtol=0, atol=1e-10)
    cache = transformers.DynamicCache()
    parts = []
    for part in ids.split([4, 1, 1, 3], dim=1):
        step = evolved(part, past_key_values=cache, use_cache=True)
        parts.append(step.last_hidden_state)
    assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-10)


# ---- padding, caches, checkpointing, threads, compilation ------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["ea", "pa", "residual", "talking_heads", "mta", "conv2d", "gated"]
)
@pytest.mark.parametrize(
    "name", ["bert", "distilbert", "t5 encoder", "llama", "bart", "t5", "t5, targets"]
)
@torch.no_grad()
def test_results_do_not_depend_on_the_amount_of_padding(name, kind):
    whole_source = name == "t5, targets"
    name = name.split(",")[0]
    if kind not in kinds_of(name):
        pytest.skip(f"{kind} has no causal form")
    model = lively(evolve(create(name).double(), kind, value_residual=True))
    sentence = torch.randint(3, 50, (1, 6))
    expected = None
    for left, right in [(0, 0), (0, 2), (0, 7), (1, 0), (5, 0), (3, 4)]:
        padding = nn.functional.pad(sentence, (left, right), value=7)
        inputs = {"input_ids": padding}
        inputs["attention_mask"] = nn.functional.pad(torch.ones(1, 6).long(), (left, right))
        if name in ("bert", "llama"):
            inputs["position_ids"] = (torch.arange(left + 6 + right) - left).clamp(min=0)[None]
        if name == "distilbert" and left or name == "bart" and left:
            continue  # absolute positions, which a sentence moved to the right has others of
        if name == "t5":  # padded sources, and targets
            inputs["decoder_input_ids"] = padding
            inputs["decoder_attention_mask"] = inputs["attention_mask"]
        if whole_source:
            inputs["input_ids"] = sentence
            del inputs["attention_mask"]
        if name == "bart":
            inputs["decoder_input_ids"] = sentence[:, :5]
            result = model(**inputs).last_hidden_state
        else:
            result = model(**inputs).last_hidden_state[:, left : left + 6]
        expected = result if expected is None else expected
        assert_close(result, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["reattention", "refiner"])
def test_kinds_that_know_no_padding_refuse_it(kind):
    model = evolve(create("bert"), kind)
    mask = torch.ones(2, 9).long()
    mask[0, 5:] = 0
    with pytest.raises(ValueError, match="knows no mask"):
        model(**inputs_of("bert"), attention_mask=mask)


def test_masks_other_than_padding_are_refused():
    model = evolve(create("bert"), "ea")
    packed = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool().expand(2, 1, 9, 9)
    with pytest.raises(ValueError, match="a mask of padding and of the future alone"):
        model(**inputs_of("bert"), attention_mask=packed)


@pytest.mark.parametrize("kind", ["pa", "reattention", "refiner", "mta", "conv2d"])
@pytest.mark.parametrize("name", DECODERS)
def test_kinds_without_a_causal_form_refuse_decoders(name, kind):
    with pytest.raises(ValueError, match="has no form for the causal attention of"):
        evolve(create(name), kind)


def language_model(name: str, **options) -> nn.Module:
    names = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", dict(TEXT, num_key_value_heads=2)),
        "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
        "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    }
    torch.manual_seed(0)
    model_class, config_class, config = names[name]
    config = getattr(transformers, config_class)(**config, decoder_start_token_id=1, **options)
    model = getattr(transformers, model_class)(config).eval().double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def generate(model: nn.Module, **how) -> torch.Tensor:
    ids = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(3))
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **how}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)


@pytest.mark.parametrize("kind", ["residual", "talking_heads", "gated"])
@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_generates_with_a_cache_what_it_generates_without(name, kind):
    model = lively(evolve(language_model(name), kind, value_residual=True))
    for beams in (1, 3):
        cached = generate(model, use_cache=True, num_beams=beams)
        assert torch.equal(cached, generate(model, use_cache=False, num_beams=beams))


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_ea_decodes_without_a_cache_and_refuses_one(name):
    model = lively(evolve(language_model(name), "ea"))
    assert generate(model, use_cache=False).shape[1] >= 6
    with pytest.raises(ValueError, match="use_cache=False required"):
        generate(model, use_cache=True)


@pytest.mark.parametrize("name", ["vit", "bert", "t5", "bart", "llama"])
@pytest.mark.parametrize("kind", ["ea", "talking_heads"])
def test_gradient_checkpointing_changes_nothing(name, kind):
    gradients = []
    for checkpointed in (False, True):
        model = lively(evolve(create(name).double(), kind, value_residual=True)).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        (output(model, name) ** 2).sum().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        assert_close(gradients[1][key], gradient)


def test_checkpointing_that_loses_the_chain_is_refused():
    model = evolve(create("vit"), "ea").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        (output(model, "vit") ** 2).sum().backward()


@torch.no_grad()
def test_threads_do_not_meet():
    model = lively(evolve(create("bart"), "ea"))
    batches = [torch.randint(3, 50, (2, length)) for length in (5, 9, 12, 7)]
    expected = [model(input_ids=ids).last_hidden_state for ids in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda ids: model(input_ids=ids).last_hidden_state, 4 * batches))
    for ours, alone in zip(together, 4 * expected, strict=True):
        assert_close(ours, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
def test_compiles_in_one_graph(name):
    model = lively(evolve(create(name), "ea", value_residual=True))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(output(compiled, name), output(model, name), rtol=1e-4, atol=1e-4)


# ---- vision: the grid behind the prefix tokens -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "dinov2", "dinov3", "siglip", "clip vision"])
def test_grids_are_found_behind_prefix_tokens(name):
    model = create(name)
    images = torch.randn(2, 3, 24, 40)
    how = {} if name == "dinov3" else {"interpolate_pos_encoding": True}
    if name == "dinov2":
        how = {}
    expected = model(images, **how).last_hidden_state
    evolved = evolve(model, "conv2d", token_conv=True, prefix="pass")
    assert_close(evolved(images, **how).last_hidden_state, expected, rtol=0, atol=1e-5)
    prefix = {"vit": 1, "dinov2": 1, "dinov3": 3, "siglip": 0, "clip vision": 1}[name]
    mechanisms = [m for m in evolved.modules() if hasattr(m, "num_prefix_tokens")]
    assert {m.num_prefix_tokens for m in mechanisms} == {prefix}
    conv = next(m for m in mechanisms if isinstance(m, TokenConv))
    lively(evolved)
    sizes = []
    conv.register_forward_hook(lambda _, args, result: sizes.append(args[1]))
    evolved(images, **how)
    assert sizes == [(3, 5)]
    assert torch.equal(
        output(unevolve(evolve(model, None, token_conv=True)), name), output(model, name)
    )


def test_sequences_have_no_patches():
    with pytest.raises(ValueError, match="token_conv needs patches of an image"):
        evolve(create("bert"), None, token_conv=True)


@pytest.mark.parametrize("name", ["vit", "bert", "llama", "t5"])
@torch.no_grad()
def test_its_maps_are_recorded_with_their_parts(name):
    model = lively(evolve(create(name), "ea"))
    parts = ("attn", "logits", "self_logits", "prev_logits")
    with record_attention(model, parts=parts) as maps:
        output(model, name)
    layers = [maps[number] for number in maps]
    evolving = [
        layer for layer in layers if hasattr(layer, "prev_logits") and layer.prev_logits is not None
    ]
    assert len(layers) == (9 if name == "t5" else 3)
    assert len(evolving) == (6 if name == "t5" else 2)
    for layer in layers:
        assert_close(layer.attn.sum(-1), torch.ones_like(layer.attn[..., 0]))


@pytest.mark.parametrize("name", ["bert", "llama"])
@torch.no_grad()
def test_recorded_parts_of_padded_sentences_are_what_the_layer_used(name):
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :3] = real[1, 7:] = False
    inputs = dict(inputs_of(name), attention_mask=real.long())
    model = lively(evolve(create(name).double(), "ea"))
    parts = ("logits", "self_logits", "prev_logits", "conv_logits")
    with record_attention(model, layers=[2, 3], parts=parts) as maps:
        model(**inputs)
    read = real[:, None, None, :] & real[:, None, :, None]
    if name == "llama":
        read = read & torch.ones_like(read).tril()
    read = read.expand(-1, 4, -1, -1)
    evolutions = [m.evolution for m in model.modules() if getattr(m, "evolution", None) is not None]
    for number, evolution in zip((2, 3), evolutions, strict=True):
        layer = maps[number]
        mixed = evolution.alpha * layer.prev_logits + (1 - evolution.alpha) * layer.self_logits
        evolved = evolution.beta * layer.conv_logits + (1 - evolution.beta) * mixed
        assert_close(layer.logits[read], evolved[read], rtol=0, atol=1e-10)
    model = lively(evolve(create(name).double(), "talking_heads"))
    with record_attention(model, layers=2, parts="softmax") as maps:
        model(**inputs)
    probabilities = maps[2]["softmax"]
    hidden = ~real[:, None, None, :].expand(-1, 4, 9, -1)
    rows = real[:, None, :, None].expand(-1, 4, -1, 9)
    assert not probabilities[hidden & rows].any()


# ---- the tools around them -------------------------------------------------------------------------------------------


def classifier(kind: str | None = "ea") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**TEXT, num_labels=3)
    model = transformers.BertForSequenceClassification(config)
    return model if kind is None else evolve(model, kind)


def sentences(count: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 3} for row in ids]


def test_trains_with_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = classifier()
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


def test_trains_with_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    model = classifier()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    losses = []
    for _ in range(8):
        batch = torch.utils.data.default_collate(sentences(8))
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


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
    inputs = inputs_of("bert")
    assert_close(model(**inputs).last_hidden_state, output(plain, "bert"), rtol=0, atol=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        (model(**inputs).last_hidden_state ** 3).sum().backward()
        optimizer.step()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert {"lora_A", "lora_B", "modules_to_save"} <= {
        part for key in trained for part in key.split(".")
    }
    assert not [key for key, p in trained.items() if p.grad is None or not p.grad.any()]
    merged = model.merge_and_unload()
    assert_close(merged(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_models_with_attention_of_their_own_are_refused():
    config = transformers.DebertaV2Config(**TEXT)
    with pytest.raises(ValueError, match="no attention layer of it goes through"):
        evolve(transformers.DebertaV2Model(config))


def test_dropped_layers_are_refused():
    with pytest.raises(ValueError, match="layerdrop must be 0"):
        evolve(create("bart", encoder_layerdrop=0.1))


def test_windows_are_refused():
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4
    )
    with pytest.raises(ValueError, match="window|no attention layer"):
        evolve(transformers.SwinModel(config))


def test_an_evolving_model_is_not_evolved_again():
    with pytest.raises(ValueError, match="evolve already"):
        evolve(evolve(create("vit")))


def test_a_folder_is_read_with_the_keywords_of_transformers(tmp_path):
    model = evolve(create("vit"), "ea")
    model.save_pretrained(tmp_path / "inner")
    loaded = ea_vision.from_pretrained(tmp_path, subfolder="inner", dtype=torch.float64).eval()
    assert loaded.dtype == torch.float64
    assert_close(output(loaded, "vit"), output(model.double(), "vit"))


def test_a_folder_without_an_evolution_is_refused(tmp_path):
    create("vit").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no evolution in its config.json"):
        ea_vision.from_pretrained(tmp_path)


def test_everything_else_works_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import timm, torch, ea_vision\n"
        "model = ea_vision.evolve(timm.create_model('vit_tiny_patch16_224'))\n"
        "ea_vision.unevolve(model)\n"
        "try: ea_vision.evolve(torch.nn.Linear(2, 2))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot evolve" in done.stdout


@pytest.mark.parametrize("which", [0, 1])
def test_the_page_s_snippets_run(which, tmp_path, monkeypatch):
    """docs/transformers.md; weights, which are not at hand, are random."""

    class Tokenizer:
        def __call__(self, sentences, **_):
            ids = [torch.arange(3, 3 + len(sentence.split())) for sentence in sentences]
            padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
            return {"input_ids": padded, "attention_mask": (padded > 0).long()}

    loaded = {
        "AutoImageProcessor": transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
        "AutoModel": create("dinov3"),
        "AutoTokenizer": Tokenizer(),
        "AutoModelForSequenceClassification": classifier(None),
    }
    for name, found in loaded.items():
        load = lambda *_, found=found, **__: found  # noqa: E731
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", load)
    monkeypatch.chdir(tmp_path)
    page = blocks(ROOT / "docs" / "transformers.md", "python")
    block = [block for block in page if "from transformers import Auto" in block][which]
    assert len([line for line in block.splitlines() if line.strip()]) <= 13
    space = {"ea_vision": ea_vision, "images": torch.randint(256, (1, 3, 40, 40)).byte()}
    exec(compile(block, "transformers.md", "exec"), space)
    trained = space["model"].state_dict()
    assert any(".maps." in key for key in trained)
