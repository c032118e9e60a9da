"""Which models of transformers can evolve: one row for each model that can be built small, and each kind.

    python -m experiments.transformers_models              # writes experiments/results/transformers_models.csv
    python -m experiments.transformers_models vit bert t5  # prints the rows of some

A row says whether a model is accepted, and if not the reason ("refused late": its forward refuses). Accepted ones are
tried: two forwards of different sizes where the plain model takes both, equal to the plain model's; causal models see
no later token; a gradient reaches a mechanism; the saved folder loads with equal outputs; the Auto class refuses it.
"""

import argparse
import csv
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import ea_vision

RESULTS = Path(__file__).parent / "results" / "transformers_models.csv"
COLUMNS = ("model_type", "class", "kind", "two_sizes", "result", "reason")
KINDS = ("ea", "residual", "conv2d")
SECONDS = 30  # for a model and a kind
SIZES = {
    32: "hidden_size d_model dim n_embd embed_dim emb_dim encoder_hidden_size decoder_hidden_size",
    3: "num_hidden_layers num_layers n_layers n_layer encoder_layers decoder_layers num_decoder_layers",
    4: "num_attention_heads num_heads n_heads n_head encoder_attention_heads decoder_attention_heads "
    "decoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_experts_per_tok moe_top_k top_k",
    48: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim d_ff n_inner dim_feedforward",
    16: "moe_intermediate_size num_queries q_lora_rank kv_lora_rank qk_nope_head_dim num_mel_bins",
    8: "head_dim d_kv patch_size qk_rope_head_dim v_head_dim",
    50: "vocab_size",
    64: "max_position_embeddings n_positions max_source_positions",
    1: "pad_token_id bos_token_id decoder_start_token_id n_group topk_group",
    0: "encoder_layerdrop decoder_layerdrop layerdrop",
}  # fmt: skip
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
IMAGE = 32


def small_options(config: Any) -> dict[str, Any]:
    """Return options of a configuration's class that make its model small."""
    options = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            options[name] = {**small_options(value), "model_type": value.model_type}
        elif name in SMALL and isinstance(value, (int, float)) and not isinstance(value, bool):
            options[name] = type(value)(SMALL[name])
        elif name == "image_size" and isinstance(value, (int, list, tuple)):
            options[name] = IMAGE if isinstance(value, int) else [IMAGE] * len(value)
        elif name == "eos_token_id" and isinstance(value, int):
            options[name] = 2
    if "kv_lora_rank" in options:  # each head has keys of its own
        options["num_key_value_heads"] = options["num_attention_heads"]
    return options


def build(model_type: str) -> nn.Module:
    """Return the small model of a type, whose parameters all affect the output."""
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_MAPPING[config_class]
    if isinstance(model_class, (list, tuple)):
        model_class = model_class[0]
    config = config_class(**small_options(config_class()))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > 60e6:
        raise ValueError(f"{count / 1e6:.0f} million parameters after making it small")
    model = model_class(config).eval()
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")  # AIMv2 is causal with it alone
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def _first(config: Any, name: str, default: Any) -> Any:
    configs = [
        config,
        *(v for v in vars(config).values() if isinstance(v, type(config).__mro__[-2])),
    ]
    values = [getattr(each, name) for each in configs if getattr(each, name, None) is not None]
    return values[0] if values else default


def inputs_of(model: nn.Module, tokens: int, side: int) -> list[dict[str, Tensor]]:
    """Return inputs that the model may take, the likeliest first."""
    torch.manual_seed(tokens)
    words = torch.randint(3, 50, (2, tokens))
    channels = _first(model.config, "num_channels", 3)
    images = torch.randn(2, channels if isinstance(channels, int) else 3, side, side)
    bands = _first(model.config, "num_mel_bins", 16)
    frames = _first(model.config, "num_frames", _first(model.config, "frames_per_clip", 4))
    videos = torch.randn(1, frames, 3, IMAGE, IMAGE)
    main = model.main_input_name
    if main == "pixel_values":
        return [{main: images}, {main: images, "interpolate_pos_encoding": True}, {main: videos},
                {main: images, "input_ids": words}]  # fmt: skip
    if main == "pixel_values_videos":
        return [{main: videos}]
    if main in ("input_features", "input_values"):
        spectra = torch.randn(2, bands, 128)  # Whisper's takes one length
        sounds = [{main: torch.randn(2, 400 * tokens)}, {main: spectra}, {main: spectra.mT}]
        return [*sounds, *({**sound, "decoder_input_ids": words} for sound in sounds)]
    texts = [
        {"input_ids": words, "decoder_input_ids": words[:, :-1]},
        {"input_ids": words},
        {"input_ids": words, "pixel_values": images, "attention_mask": torch.ones_like(words)},
    ]
    return texts[::-1] if hasattr(model.config, "vision_config") else texts


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors of numbers in a model's output."""
    torch.manual_seed(1)
    result = model(**inputs)
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


@torch.no_grad()
def working_inputs(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return two inputs that the plain model takes, of different sizes if it can.

    Raises:
        Exception: that of its forward with the likeliest input.
    """
    likeliest = None
    for number, inputs in enumerate(inputs_of(model, 9, IMAGE)):
        try:
            outputs(model, inputs)
        except Exception as error:  # noqa: BLE001 whatever a model raises: the input is not for it
            likeliest = likeliest or error
            continue
        larger = inputs_of(model, 7, 48)[number]
        for other in (
            larger,
            {**larger, "interpolate_pos_encoding": True},
            inputs_of(model, 7, IMAGE)[number],
        ):
            try:
                outputs(model, other)
                return [inputs, other]
            except Exception:  # noqa: BLE001
                continue
        return [inputs, inputs]
    raise likeliest


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference between outputs, relative to the largest number."""
    scale = max(float(tensor.abs().max()) for tensor in second)
    pairs = zip(first, second, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / max(scale, 1e-9)


def sees_later_tokens(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Return whether the output at a token depends on the last token."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = inputs[name].clone()
    changed[:, -1] = 53 - changed[:, -1]
    before = outputs(model, inputs)[0]
    after = outputs(model, {**inputs, name: changed})[0]
    return not torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5)


def mechanism_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".maps." in name]


def check(plain: nn.Module, inputs: list[dict[str, Tensor]], evolved: nn.Module) -> str:
    """Return "" if an evolved model does what the page says, else what is wrong."""
    with torch.no_grad():
        for each in (*inputs, inputs[0]):
            start = difference(outputs(evolved, each), outputs(plain, each))
            if not start < 1e-4:
                return f"differs from the plain model by {start:.0e}"
    sum(tensor.pow(2).sum() for tensor in outputs(evolved, inputs[0])).backward()
    gradients = [parameter.grad for parameter in mechanism_parameters(evolved)]
    if not any(gradient is not None and gradient.any() for gradient in gradients):
        return "no gradient reaches a mechanism"
    with torch.no_grad():
        for parameter in mechanism_parameters(evolved):
            parameter += 0.3 * torch.randn_like(parameter)
        moved = outputs(evolved, inputs[0])
        if not difference(moved, outputs(plain, inputs[0])) > 0:
            return "the mechanisms change nothing"
        reads_words = "input_ids" in inputs[0] and moved[0].ndim == 3
        if reads_words and not sees_later_tokens(plain, inputs[0]):
            if sees_later_tokens(evolved, inputs[0]):
                return "sees later tokens"
        with tempfile.TemporaryDirectory() as folder:
            evolved.save_pretrained(folder)
            loaded = ea_vision.from_pretrained(folder).eval()
            if difference(outputs(loaded, inputs[0]), moved) > 1e-6:
                return "the loaded model differs"
            try:
                transformers.AutoModel.from_pretrained(folder)
            except ValueError as error:
                if "ea_vision.from_pretrained" not in str(error):
                    return f"the Auto class does not name the way: {shortened(error)}"
            else:
                return "the Auto class reads the plain model"
    return ""


def shortened(error: Exception) -> str:
    """Return the type and the first line of an error, without paths and addresses."""
    text = str(error).strip().partition("\n")[0]
    text = re.sub(r"(/[\w.+-]+){2,}|0x[0-9a-f]+", "...", text)
    return f"{type(error).__name__}: {text[:160]}"


def _late(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def rows_of(model_type: str) -> list[dict[str, str]]:
    """Return the rows of a model: not built or not run, or one for each kind."""
    row = {**dict.fromkeys(COLUMNS, ""), "model_type": model_type}
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    step = "not built"
    try:
        plain = build(model_type)
        row["class"] = type(plain).__name__
        step = "not run"
        inputs = working_inputs(plain)
    except Exception as error:  # noqa: BLE001
        return [{**row, "result": step, "reason": shortened(error)}]
    finally:
        signal.alarm(0)
    shapes = [
        [tensor.shape for tensor in each.values() if isinstance(tensor, Tensor)] for each in inputs
    ]
    row["two_sizes"] = "yes" if shapes[0] != shapes[1] else "no"
    rows = []
    for kind in KINDS:
        signal.alarm(SECONDS)
        try:
            evolved = ea_vision.evolve(plain, kind)
        except ValueError as error:
            rows.append({**row, "kind": kind, "result": "refused", "reason": shortened(error)})
            continue
        except Exception as error:  # noqa: BLE001
            rows.append({**row, "kind": kind, "result": "wrong", "reason": shortened(error)})
            continue
        finally:
            signal.alarm(0)
        signal.alarm(SECONDS)
        try:
            fault = check(plain, inputs, evolved)
        except (TimeoutError, ValueError) as error:
            late = "not run" if isinstance(error, TimeoutError) else "refused late"
            rows.append({**row, "kind": kind, "result": late, "reason": shortened(error)})
            continue
        except Exception as error:  # noqa: BLE001
            fault = shortened(error)
        finally:
            signal.alarm(0)
        result = "wrong" if fault else "accepted"
        rows.append({**row, "kind": kind, "result": result, "reason": fault})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "model_type", nargs="*", help="as in config.json; default: all, into a file"
    )
    types = parser.parse_args().model_type
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    names = types or [name for name, config in CONFIG_MAPPING.items() if config in MODEL_MAPPING]
    part = RESULTS.with_suffix(".part")
    file = sys.stdout if types else part.open("w", newline="", encoding="utf-8")
    with file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name in names:
            writer.writerows(rows_of(name))
            file.flush()
    if not types:
        part.replace(RESULTS)


if __name__ == "__main__":
    main()
