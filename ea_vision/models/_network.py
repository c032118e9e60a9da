"""timm's interface for networks with chained attention.

A family's file defines its blocks, a subclass of `ChainedNetwork`, and its variants (by `register_networks`), and
quotes the papers' figures for them. A file outside this package can do the same with the names of `ea_vision.models`.

Shape letters: B batch, C channels, H x W image or map, N = H*W pixels of a map, K heads.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d, Evolution
from ea_vision.models._attention_config import to_size
from ea_vision.models._stages import AttnStage, Step, TensorStage, received
from ea_vision.ops import Size

try:
    # Not exported. Newer timm's own models call it, so that its save_for_hf knows of a resize.
    from timm.models import _input as timm_input
except ImportError:
    # Older timm keeps no record of sizes.
    timm_input = None


class ChainedNetwork:
    """timm's interface for a network with chained attention: a mixin for `nn.Module` or a network of timm's.

    The network defines `img_size`, `reset_classifier`, and `feature_info`, one entry for each of `feature_steps()`. An
    entry's "end" names modules that follow its "module".

    Attributes:
        relay: the way of the logits between its stages; `ChainBuilder` sets it.
    """

    feature_indices: tuple[int, ...] = (0, 1, 2, 3, 4)  # default of features_only
    min_img_size = 1  # pixels

    def feature_steps(self) -> list[Step]:
        """Return the network up to its head as functions (x, prev_logits) -> (x, logits) | x, one for each feature of
        `feature_info`."""
        raise NotImplementedError

    def forward_end(self, x: Tensor) -> Tensor:
        """Compute the output of `forward_features` from the last feature; by default it is that feature."""
        return x

    @contextmanager
    def one_forward(self) -> Iterator[None]:
        """Inside the block, stages that are called one by one hand maps on as in the network's own forward."""
        self.relay.begin()
        try:
            yield
        finally:
            self.relay.end()

    def run_steps(
        self, x: Tensor, count: int, take_indices: Collection[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the first `count` of `feature_steps`; return the last feature, and the list of those taken."""
        intermediates = []
        logits = None
        with self.one_forward():
            for index, step in enumerate(self.feature_steps()[:count]):
                x, logits = received(step(x, logits))
                if index in take_indices:
                    intermediates.append(x)
        return x, intermediates

    def forward_features(self, x: Tensor) -> Tensor:
        """Turn (B, in_chans, H, W) into (B, num_features, H / r, W / r), r being the last feature's reduction."""
        x, _ = self.run_steps(x, len(self.feature_info))
        return self.forward_end(x)

    @staticmethod
    def map_size(img_size: Size, reduction: int) -> Size:
        """Return (height, width) of a map, rounded up, since every halving rounds up."""
        return -(-img_size[0] // reduction), -(-img_size[1] // reduction)

    def set_input_size(self, img_size: int | Size) -> None:
        """Fit the position tables to another input size, in pixels; see `AugmentedConv2d.set_feat_size`."""
        self.img_size = to_size(img_size, self.min_img_size)
        if timm_input is not None:
            timm_input.update_model_input_size(self, self.img_size)
        saved = {**getattr(self, "_model_args", {}), "img_size": self.img_size}
        if "base" in saved:  # evolved: the plain network knows no img_size
            saved["evolution"] = {**saved["evolution"], "img_size": saved.pop("img_size")}
            if timm_input is not None:
                self._traits.pop("img_size")
        self._model_args = saved
        for module in self.modules():
            if isinstance(module, AugmentedConv2d):
                module.set_feat_size(self.map_size(self.img_size, module.map_reduction))

    def fill_offsets_beyond(self, img_size: int | Size) -> None:
        """Fill the entries of position tables that images of this size, in pixels, have not trained; see
        `AugmentedConv2d.fill_offsets_beyond`."""
        size = to_size(img_size, self.min_img_size)
        for module in self.modules():
            if isinstance(module, AugmentedConv2d):
                module.fill_offsets_beyond(self.map_size(size, module.map_reduction))

    def no_weight_decay(self) -> set[str]:
        kinds = ("height_rel", "width_rel", "qk_gain")
        return {name for name, _ in self.named_parameters() if name.endswith(kinds)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                module.grad_checkpointing = enable

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the features of `feature_info`.

        Args:
            x: (B, in_chans, H, W).
            indices: the last n if a number, all if None, else those listed.
            norm: accepted for timm's interface; there is no final norm.
            stop_early: stop after the last one wanted.
            output_fmt: "NCHW".
            intermediates_only: leave out the final features.

        Returns:
            final features and the list of intermediates, or the list alone.

        Raises:
            ValueError: another output_fmt.
            AssertionError: an index that does not exist.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        count = max_index + 1 if stop_early else len(self.feature_info)
        x, intermediates = self.run_steps(x, count, take_indices)
        if intermediates_only:
            return intermediates
        if count == len(self.feature_info):
            x = self.forward_end(x)
        return x, intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last wanted one, the modules behind them, and the head."""
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        unused = []
        for info in self.feature_info[max_index + 1 :]:
            unused += [info["module"], *info.get("end", ())]
        for name in unused:
            module = self.get_submodule(name)
            takes_logits = isinstance(module, AttnStage) and not isinstance(module, TensorStage)
            self.set_submodule(name, AttnStage() if takes_logits else nn.Identity())
        if prune_head or unused:
            self.num_features = self.feature_info[max_index]["num_chs"]
            self.reset_classifier(0, "")
        return take_indices


class HeadedNetwork(ChainedNetwork):
    """A `ChainedNetwork` that ends in timm's `ClassifierHead`.

    The network has `head`, `num_classes`, `num_features` and `forward_features`.
    """

    def init_weights(self) -> None:
        """Initialise convolutions by He, then attention layers and evolutions by their own methods."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, AugmentedConv2d):
                module.reset_parameters()
            if isinstance(module, Evolution):
                module.restore_start()

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.in_features = self.num_features
        self.head.reset(num_classes, global_pool)
        # a head without a classifier does not know the network's device and dtype
        weight = next(self.parameters())
        self.head.to(weight.device, weight.dtype).train(self.training)
        self.head_hidden_size = self.num_features * self.head.global_pool.feat_mult()

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Turn (B, num_features, H, W) into (B, num_classes), or with `pre_logits` into pooled features."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Turn (B, in_chans, H, W) into (B, num_classes)."""
        return self.forward_head(self.forward_features(x))
