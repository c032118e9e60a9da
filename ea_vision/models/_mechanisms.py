"""The mechanisms of a transformer's blocks, from keywords."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

import ea_vision.layers
from ea_vision.base.errors import UsageError
from ea_vision.layers import create_evolution, evolution_class
from ea_vision.models._attention_config import check_numbers


@dataclass(frozen=True)
class Mechanisms:
    """Mechanisms across layers, as `evolve` and `timm.create_model` take them; see `evolve` for the errors.

    Attributes:
        kind: a registered evolution, or None.
        attn_layers: the blocks that evolve, counted from 1; None: all that can.
        prefix: "convolve" or "pass", see `evolve`.
        token_conv: False, True or "paper", see `evolve`.
        value_residual: False, True or "paper", see `evolve`.
        options: of the evolution.
    """

    kind: str | None
    attn_layers: Sequence[int] | None = None
    prefix: str = "convolve"
    token_conv: bool | str = False
    value_residual: bool | str = False
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("value_residual", "token_conv"):
            if getattr(self, name) not in (False, True, "paper"):
                raise ValueError(
                    f"{name} must be False, True or 'paper', got {getattr(self, name)!r}"
                )
        if self.attn_layers is not None:
            check_numbers("attn_layers", self.attn_layers)
        if self.prefix not in ("convolve", "pass"):
            raise ValueError(f"prefix must be 'convolve' or 'pass', got {self.prefix!r}")

    @classmethod
    def of_evolve(
        cls,
        kind: str | None = "ea",
        layers: Sequence[int] | None = None,
        prefix: str = "convolve",
        start: str = "identity",
        attn_layers: Sequence[int] | None = None,
        token_conv: bool | str = False,
        value_residual: bool | str = False,
        **options: Any,
    ) -> "Mechanisms":
        """Return the mechanisms given by the arguments of `ea_vision.evolve` for vision transformers and sequences.

        Raises:
            ValueError: there is nothing to add, or a value is invalid.
        """
        if kind is None and not (token_conv or value_residual):
            raise UsageError("a kind, token_conv or value_residual required, got none of them")
        if kind is not None:
            options["start"] = start
        numbers = attn_layers if layers is None else layers
        return cls(kind, numbers, prefix, token_conv, value_residual, options)

    def keywords(self) -> dict[str, Any]:
        """Return the keywords with which `ea_vision.evolve` adds these mechanisms, in types that JSON has."""
        keywords = asdict(self)
        options = keywords.pop("options")
        if self.attn_layers is not None:
            keywords["attn_layers"] = list(map(int, self.attn_layers))
        return keywords | options

    @property
    def reads_previous(self) -> bool:
        """Return whether a layer reads what the previous layer handed on."""
        return self.kind is None or evolution_class(self.kind).reads_previous

    def give(
        self,
        blocks: Sequence[nn.Module],
        attentions: Sequence[nn.Module],
        channels: int,
        num_prefix_tokens: int,
        class_token_alone: bool,
    ) -> None:
        """Give each block its `token_conv`, and its attention `evolution`, `need_logits` and `value_residual`.

        class_token_alone: whether only the class token's row of the last map is read.
        """
        weight = next(blocks[0].parameters())
        dd = {"device": weight.device, "dtype": weight.dtype}
        evolving = self._evolving(len(blocks), class_token_alone)
        for number, (block, attn) in enumerate(zip(blocks, attentions, strict=True), start=1):
            attn.evolution = None
            attn.value_residual = None
            block.token_conv = None
            attn.need_logits = self.reads_previous and number + 1 in evolving
            if number in evolving:
                attn.evolution = self._new_evolution(
                    attn.num_heads, channels, num_prefix_tokens, **dd
                )
            if number > 1 and self.value_residual:
                attn.value_residual = ea_vision.layers.ValueResidual(
                    self.value_residual != "paper", **dd
                )
            if number > 1 and self.token_conv:
                from_zeros = self.token_conv != "paper"
                block.token_conv = ea_vision.layers.TokenConv(
                    channels, num_prefix_tokens, from_zeros, **dd
                )
            for module in (attn.evolution, attn.value_residual, block.token_conv):
                if module is not None:
                    module.train(block.training)

    def _new_evolution(
        self, num_heads: int, channels: int, num_prefix_tokens: int, **dd
    ) -> nn.Module:
        evolution = create_evolution(self.kind, num_heads, channels=channels, **dd, **self.options)
        if hasattr(evolution, "num_prefix_tokens"):
            passing = self.prefix == "pass" or evolution.spatial
            evolution.num_prefix_tokens = num_prefix_tokens if passing else 0
        elif self.prefix == "pass":
            raise ValueError(
                f"prefix='pass' needs an evolution with num_prefix_tokens, got {self.kind!r}"
            )
        return evolution

    def _evolving(self, depth: int, class_token_alone: bool) -> list[int]:
        """Return the blocks, counted from 1, that will evolve."""
        if self.kind is None:
            create_evolution(None, 1, **self.options)  # refuses options
            return []
        kind = evolution_class(self.kind)
        # Only the class token's row of the last map is read, and that row would bypass the convolution.
        idle_last = (self.prefix == "pass" or kind.spatial) and class_token_alone
        possible = range(1 + kind.reads_previous, depth + (not idle_last))
        numbers = list(possible) if self.attn_layers is None else sorted(set(self.attn_layers))
        wrong = [layer for layer in numbers if layer not in possible]
        if wrong or not numbers:
            why = "the first block has no predecessor"
            if idle_last:
                passing = "prefix='pass'" if self.prefix == "pass" else "prefix tokens that pass"
                why += (
                    f", and with {passing} a convolution in the last would never get a gradient, since only the "
                    "class token's row is read there"
                )
            raise ValueError(
                f"attn_layers of this model that can evolve are {list(possible)} of {depth} ({why}); "
                f"got {wrong or 'none'}"
            )
        return numbers


def check_idle(model: nn.Module) -> None:
    """Raise UsageError if a mechanism of a network changes anything; the message names the first."""
    active = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "changes_nothing") and not module.changes_nothing()
    ]
    if active:
        raise UsageError(
            "all gates must be 0, or mechanisms at their identity start, for the plain network to compute the same; "
            f"got {len(active)} that are not, the first of them {active[0]}"
        )


def refuse(model: nn.Module, reason: str | None) -> None:
    """Raise UsageError if there is a reason why a network cannot evolve."""
    if reason is not None:
        raise UsageError(f"this {type(model).__name__} cannot evolve: {reason}")
