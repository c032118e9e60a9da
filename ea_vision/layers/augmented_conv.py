"""Attention-augmented convolution whose attention maps may evolve from layer to layer.

Papers:
* AA: `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925
* EA: `Evolving Attention with Residual Convolutions` - https://arxiv.org/abs/2102.12895
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9

The layer (AA paper, section 3):
1. a convolution computes a part of the output channels;
2. beside it, a 1x1 projection of the input, pooled where the convolution has a stride, gives queries, keys and values;
3. logits = (q k + q height_rel[row offset] + q width_rel[column offset]) / sqrt(D), for each head;
4. the evolution mixes in the previous layer's logits (PA and EA, `ea_vision.layers.evolution`);
5. out = softmax(logits) v, heads concatenated and projected; the output is [convolution, out].

Steps 3 to 5 are `ea_vision.ops.evolving_attention`, unless a hook wants to see the maps. Position tables, windows,
absolute positions, projections and the fitting of checkpoints have files of their own beside this one.

Shape letters: B batch, C channels, H x W the attention map, N = H*W its pixels (row-major), K heads, D width of a
head.
"""

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, fx, nn

from ea_vision.layers.evolution import EvolvingMaps
from ea_vision.layers.fit_weights import fit_weights
from ea_vision.layers.position_tables import PositionTables
from ea_vision.layers.positions import add_sine, append_coordinates, check_position
from ea_vision.layers.projection import Projection
from ea_vision.layers.tracing import record_whole
from ea_vision.ops import Size, evolving_attention, forced, halve, log_large_map, normalise_heads
from ea_vision.ops.reference import neighbours_logits, own_logits


def check_fusion(fusion: str) -> None:
    """Raise ValueError unless `AugmentedConv2d` knows this fusion."""
    if fusion not in ("concat", "add"):
        raise ValueError(f"fusion must be 'concat' or 'add', got {fusion!r}")


def _check_widths(num_heads: int, **widths: int) -> None:
    """Raise ValueError unless num_heads divides each width."""
    for name, width in widths.items():
        if num_heads < 1 or width < num_heads or width % num_heads:
            raise ValueError(
                f"{name} must be a positive multiple of num_heads={num_heads}, got {width}"
            )


def _check_sizes(
    out_channels: int, attn_channels: int, stride: int, kernel_size: int, feat_size: Size
) -> None:
    """Raise ValueError unless `AugmentedConv2d` supports these values."""
    if not 0 < attn_channels <= out_channels:
        raise ValueError(
            f"attn_channels must be 1 to out_channels={out_channels}, got {attn_channels}"
        )
    if stride not in (1, 2):
        raise ValueError(f"stride must be 1 or 2, got {stride}")
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd and positive, got {kernel_size}")
    if len(feat_size) != 2 or min(feat_size) < 1:
        raise ValueError(f"feat_size must be a positive (height, width), got {tuple(feat_size)}")


@register_notrace_module  # sizes are checked at run time, so FX keeps the layer whole
class AugmentedConv2d(PositionTables, EvolvingMaps, nn.Module):
    """A convolution and a multi-head self-attention side by side, concatenated on channels (AA paper, section 3.2) or
    added.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, both branches together.
        kernel_size: odd side of the convolution's kernel.
        stride: 1 or 2; at 2 the attention branch's input is average-pooled (3x3, stride 2).
        dim_qk: width of queries and of keys, all heads together.
        dim_v: width of values, all heads together.
        num_heads: K.
        feat_size: (height, width) of the attention map; it determines the size of the position tables. The layer also
            runs on other sizes: a smaller map uses the middle of the tables, a larger one a resized copy.
        position: how attention knows positions. "relative": terms of the logits by offset, with learned tables;
            "none"; "sine": sines and cosines added to the branch's input; "coord": coordinates appended to it (both
            after pooling, see `ea_vision.layers.positions`).
        qk_norm: whether each head's queries and keys are divided by the root of their mean square, in float32, before
            scale and position terms. The parameter `qk_gain` (K), which begins at 1, multiplies the queries. None:
            only if a loaded checkpoint has `qk_gain`. False: never; loading such a checkpoint is an error.
        pool_attention: number of further poolings before the attention (True is one); the branch's result is then
            resized bilinearly to the convolution's size.
        evolution: `Evolution` of a layer that has a predecessor in its chain, or None.
        fusion: "concat": each branch computes a part of the output channels. "add": the convolution computes all of
            them, and the attention's result, projected to the same number, is added. The projection begins at zero, so
            the layer begins as its convolution.
        conv: with fusion="add", the convolution of a plain network, which the layer uses unchanged (with any groups or
            dilation); by default the layer creates its own.
        attn_channels: with fusion="concat", output channels of the attention branch (default `dim_v`). If they equal
            out_channels, there is no convolution.
        dilation: of the convolution that the layer creates.
        conv_drop: dropout probability of the convolution branch's output.
        attn_drop: dropout probability of the attention probabilities.
        window: odd side in pixels, or (height, width), of the area around its pixel that a query sees, or None for the
            whole map; position tables cover the offsets inside. With `evolution`, whole maps evolve and are handed on;
            the window is applied afterwards.
        head_window: odd number of neighbouring heads, centred on the query's own, whose keys a query sees under one
            softmax (CSAN).
        head_border: "clip": the first and the last heads have fewer neighbours; "wrap": the heads form a ring.

    Raises:
        ValueError: num_heads does not divide a width; attn_channels exceeds out_channels; fusion is unknown, or does
            not use conv or attn_channels; conv has other channels or stride; stride is not 1 or 2; kernel_size is even;
            feat_size is not two positive numbers; position is unknown; 4 does not divide in_channels for "sine"; a
            window is even; a ring has fewer heads than head_window; or head_window > 1 with an evolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        *,
        dim_qk: int,
        dim_v: int,
        num_heads: int = 8,
        feat_size: Size,
        position: str = "relative",
        qk_norm: bool | None = None,
        pool_attention: bool | int = False,
        evolution: nn.Module | None = None,
        fusion: str = "concat",
        conv: nn.Conv2d | None = None,
        attn_channels: int | None = None,
        dilation: int = 1,
        conv_drop: float = 0.0,
        attn_drop: float = 0.0,
        window: int | Size | None = None,
        head_window: int = 1,
        head_border: str = "clip",
        device=None,
        dtype=None,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        check_fusion(fusion)
        if attn_channels is None:
            attn_channels = out_channels if fusion == "add" else dim_v
        elif fusion == "add" and attn_channels != out_channels:
            raise ValueError(f"attn_channels must be None with fusion='add', got {attn_channels}")
        _check_widths(num_heads, dim_qk=dim_qk, dim_v=dim_v)
        _check_sizes(out_channels, attn_channels, stride, kernel_size, feat_size)
        self.position = check_position(position)
        if self.position == "sine" and in_channels % 4:
            raise ValueError(f"position='sine' needs in_channels that 4 divides, got {in_channels}")
        self.num_heads = num_heads
        self.set_windows(window, head_window, head_border, evolution)
        self.fusion = fusion
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = stride
        self.dim_qk = dim_qk
        self.dim_v = dim_v
        self.dim_head_qk = dim_qk // num_heads
        self.dim_head_v = dim_v // num_heads
        self.relative = self.position == "relative"
        self.resize_result = int(pool_attention) > 0
        self.num_pools = int(pool_attention) + (stride == 2)
        self.scale = self.dim_head_qk**-0.5
        self.need_logits = evolution is not None or not self.local

        conv_channels = out_channels if fusion == "add" else out_channels - attn_channels
        self.conv = conv
        if conv is not None:
            self._check_conv(conv)
        elif conv_channels > 0:
            padding = dilation * (kernel_size // 2)
            options = {"padding": padding, "dilation": dilation, "bias": False, **dd}
            self.conv = nn.Conv2d(in_channels, conv_channels, kernel_size, stride, **options)
        self.conv_drop = nn.Dropout(conv_drop)
        coordinates = 3 if self.position == "coord" else 0
        self.qkv = Projection(in_channels + coordinates, 2 * dim_qk + dim_v, **dd)
        self.add_tables(feat_size, **dd)
        self.qk_norm = qk_norm
        self.qk_gain = nn.Parameter(torch.empty(num_heads, **dd)) if qk_norm else None
        self.evolution = evolution
        if evolution is not None:
            log_large_map(num_heads, self.feat_size)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Projection(dim_v, attn_channels, **dd)
        if conv is None:
            self.reset_parameters()
        else:
            self.reset_attention()

    def _check_conv(self, conv: nn.Conv2d) -> None:
        """Raise ValueError unless a plain network's convolution fits the layer."""
        if self.fusion != "add":
            raise ValueError(f"conv needs fusion='add', got fusion={self.fusion!r}")
        required = (self.in_channels, self.out_channels, self.stride)
        received = (conv.in_channels, conv.out_channels, conv.stride[0])
        if received != required:
            raise ValueError(
                f"conv must have (in_channels, out_channels, stride) = {required}, got {received}"
            )

    def reset_parameters(self) -> None:
        """Initialise the convolution by He, and the attention as `reset_attention` does."""
        if self.conv is not None:
            nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.reset_attention()

    def reset_attention(self) -> None:
        """Initialise projections by Glorot, tables normal with std dim_head_qk**-0.5 (AA code), the queries' gains with
        1, and with fusion="add" the last projection with 0."""
        for projection in (self.qkv, self.proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)
        if self.fusion == "add":
            nn.init.zeros_(self.proj.weight)
        for name, _ in self.table_sizes(self.feat_size):
            nn.init.normal_(getattr(self, name), std=self.scale)
        if self.qk_gain is not None:
            nn.init.ones_(self.qk_gain)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        reason = fit_weights(self, state_dict, prefix)
        if reason is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:
            error_messages = args[-1]
            error_messages.append(reason)

    def branch_input(self, x: Tensor) -> Tensor:
        """Return the input of the projection `qkv`: x (B, C, H', W') pooled, with absolute positions."""
        for _ in range(self.num_pools):
            x = halve(x)
        if self.position == "sine":
            x = add_sine(x)
        elif self.position == "coord":
            x = append_coordinates(x)
        return x

    def heads_of(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Size]:
        """Return queries, keys and values of the attention branch, and the map's size.

        Args:
            projected: (B, 2 * dim_qk + dim_v, H, W), the output of `qkv`.

        Returns:
            q and k (B, K, N, D), normalised with qk_norm, q not scaled; v (B, K, N, Dv); (H, W).
        """
        B, _, H, W = projected.shape
        qk, v = projected.split([2 * self.dim_qk, self.dim_v], dim=1)
        qk = qk.reshape(B, 2 * self.num_heads, self.dim_head_qk, H * W)
        if self.qk_gain is None:
            q, k = qk.transpose(-2, -1).chunk(2, dim=1)
        else:
            q, k = normalise_heads(qk, self.qk_gain)
        v = v.reshape(B, self.num_heads, self.dim_head_v, H * W).transpose(-2, -1)
        return q, k, v, (H, W)

    def logits_of(self, q: Tensor, k: Tensor, feat_size: Size) -> Tensor:
        """Return the layer's logits before any evolution; see `EvolvingMaps`."""
        tables = self.tables_on(feat_size)
        if self.head_window > 1:
            return neighbours_logits(q, k, *tables, self.scale, feat_size, self.head_window)
        return own_logits(q, k, *tables, self.scale, feat_size)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev_logits: Tensor | None,
        feat_size: Size,
        bias: Tensor | None,
        need_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        operands = None
        if forced[-1:] != ["reference"]:
            operands = self._operands(prev_logits)
        if operands is None:
            out, logits = self.attend_step_by_step(q, k, v, prev_logits, feat_size)
            return out, logits if self.head_window == 1 else None
        watched = bool(self._forward_hooks) and (self.evolution is not None or not self.local)
        scale = self.scale * operands.pop("own_scale", 1.0)
        return evolving_attention(
            q,
            k,
            v,
            self.height_rel,
            self.width_rel,
            **operands,
            feat_size=feat_size,
            scale=scale,
            need_logits=need_logits or watched,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            window=self.window,
            head_window=self.head_window,
            head_border=self.head_border,
        )

    def attend(
        self, x: Tensor, prev_logits: Tensor | None, need_logits: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention branch before its resizing, (B, attn_channels, H, W), and the logits (B, K, N, N),
        or None as in `forward`."""
        pooled = x
        if self.num_pools > 0 or self.position in ("sine", "coord"):
            pooled = self.branch_input(x)
        q, k, v, feat_size = self.heads_of(self.qkv(pooled))
        out, logits = self.attend_heads(pooled, q, k, v, prev_logits, feat_size, need_logits)
        # heads concatenated
        out = out.transpose(-2, -1).reshape(x.shape[0], self.dim_v, *feat_size)
        if x.stride(1) == 1 and not x.is_contiguous():  # channels last
            out = out.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.proj(out), logits

    def forward(
        self, x: Tensor, prev_logits: Tensor | None = None, need_logits: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            x: (B, in_channels, H', W').
            prev_logits: (B, K, N, N), the previous attention layer's logits; a layer without `evolution` ignores them.
            need_logits: whether to return the logits. Default: the layer's `need_logits`, which is True unless the
                network says that no layer reads them, or the layer has a window and no evolution. If False, faster
                implementations return None instead, unless the layer has a forward hook (which makes no difference in a
                layer with a window and no evolution).

        Returns:
            y (B, out_channels, H'/stride, W'/stride), and the logits (B, K, N, N) that entered the softmax, before a
            window hides any. With head_window > 1 they are None, since no layer evolves from such maps.

        Raises:
            ValueError: the layer has an `evolution`, and prev_logits are missing or have another shape.
        """
        if isinstance(x, fx.Proxy):
            return record_whole(self, x, prev_logits, need_logits)
        if need_logits is None:
            need_logits = self.need_logits
        attn, logits = self.attend(x, prev_logits, need_logits)
        if self.resize_result:
            height = -(-x.shape[2] // self.stride)  # rounded up
            width = -(-x.shape[3] // self.stride)
            resized = F.interpolate(
                attn, size=(height, width), mode="bilinear", align_corners=False
            )
            attn = resized.to(attn.dtype)  # autocast on CUDA makes it float32
        if self.conv is None:
            return attn, logits
        y = self.conv_drop(self.conv(x))
        if self.fusion == "add":
            return y + attn, logits
        return torch.cat([y, attn], dim=1), logits

    def extra_repr(self) -> str:
        shown = [f"num_heads={self.num_heads}, feat_size={self.feat_size}"]
        shown.append(f"position={self.position!r}")
        if self.qk_gain is not None:
            shown.append("qk_norm=True")
        if self.local:
            shown.append(f"window={self.window}, head_window={self.head_window}")
        if self.fusion != "concat":
            shown.append(f"fusion={self.fusion!r}")
        return ", ".join(shown)
