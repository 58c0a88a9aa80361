"""Switches of `optimizer.optimize_model`: which fusions it makes."""

from __future__ import annotations

import argparse
from enum import Enum


class AttentionMaskFormat:
    """What the mask input of an Attention node holds."""

    MaskIndexEnd = 0
    MaskIndexEndAndStart = 1
    AttentionMask = 2
    NoMask = 3


class AttentionOpType(Enum):
    """The operator that attention is fused to."""

    Attention = "Attention"
    MultiHeadAttention = "MultiHeadAttention"
    GroupQueryAttention = "GroupQueryAttention"
    PagedAttention = "PagedAttention"

    def __str__(self) -> str:
        return self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionOpType) and self.value == other.value


_IMAGE_MODELS = ("unet", "vae", "clip")

#: Switches of the models of images.
_IMAGE_SWITCHES = (
    "enable_nhwc_conv",
    "enable_group_norm",
    "enable_skip_group_norm",
    "enable_bias_splitgelu",
    "enable_packed_qkv",
    "enable_packed_kv",
    "enable_bias_add",
)

#: Arguments of the command line, each with what it switches off.
_DISABLING = {
    "disable_attention": ("enable_attention", "Attention"),
    "disable_skip_layer_norm": ("enable_skip_layer_norm", "SkipLayerNormalization"),
    "disable_embed_layer_norm": ("enable_embed_layer_norm", "EmbedLayerNormalization"),
    "disable_bias_skip_layer_norm": (
        "enable_bias_skip_layer_norm",
        "a bias in SkipLayerNormalization",
    ),
    "disable_bias_gelu": ("enable_bias_gelu", "a bias in Gelu and FastGelu"),
    "disable_layer_norm": ("enable_layer_norm", "LayerNormalization"),
    "disable_gelu": ("enable_gelu", "Gelu"),
    "disable_shape_inference": ("enable_shape_inference", "symbolic shape inference"),
    "disable_rotary_embeddings": ("enable_rotary_embeddings", "RotaryEmbedding"),
    "disable_group_norm": ("enable_group_norm", "GroupNorm"),
    "disable_skip_group_norm": ("enable_skip_group_norm", "SkipGroupNorm"),
    "disable_packed_kv": ("enable_packed_kv", "packed keys and values"),
    "disable_packed_qkv": ("enable_packed_qkv", "packed queries, keys and values"),
    "disable_bias_add": ("enable_bias_add", "BiasAdd"),
    "disable_bias_splitgelu": ("enable_bias_splitgelu", "BiasSplitGelu"),
    "disable_nhwc_conv": ("enable_nhwc_conv", "NhwcConv"),
}

_ENABLING = {
    "enable_gelu_approximation": ("enable_gelu_approximation", "FastGelu instead of Gelu"),
    "enable_gemm_fast_gelu": ("enable_gemm_fast_gelu", "GemmFastGelu"),
    "use_multi_head_attention": ("use_multi_head_attention", "MultiHeadAttention for Attention"),
}

_MASKS = {
    "use_mask_index": (AttentionMaskFormat.MaskIndexEnd, "masks are lengths (padding at the end)"),
    "use_raw_attention_mask": (AttentionMaskFormat.AttentionMask, "masks are 0 and 1"),
    "no_attention_mask": (AttentionMaskFormat.NoMask, "there is no mask; for bert"),
}


class FusionOptions:
    """Switches for a kind of model. Those without a rewrite of ours have no effect."""

    def __init__(self, model_type: str) -> None:
        self.enable_gelu = True
        self.enable_layer_norm = True
        self.enable_attention = True
        self.enable_rotary_embeddings = True
        self.use_multi_head_attention = False
        self.disable_multi_head_attention_bias = False
        self.enable_skip_layer_norm = True
        self.enable_embed_layer_norm = model_type not in ("clip", "qwen3")
        self.enable_bias_skip_layer_norm = True
        self.enable_bias_gelu = True
        self.enable_gelu_approximation = False
        self.enable_qordered_matmul = True
        self.enable_shape_inference = True
        self.enable_gemm_fast_gelu = False
        self.group_norm_channels_last = True
        self.attention_mask_format = AttentionMaskFormat.AttentionMask
        if model_type == "bert":
            self.attention_mask_format = AttentionMaskFormat.MaskIndexEnd
        elif model_type in ("vit", "qwen3"):
            self.attention_mask_format = AttentionMaskFormat.NoMask
        self.attention_op_type: AttentionOpType | None = None
        if model_type in _IMAGE_MODELS:
            for name in _IMAGE_SWITCHES:
                setattr(self, name, True)

    def use_raw_attention_mask(self, use_raw_mask: bool = True) -> None:
        """Says whether masks are 0 and 1 for each position, or lengths."""
        raw, lengths = AttentionMaskFormat.AttentionMask, AttentionMaskFormat.MaskIndexEnd
        self.attention_mask_format = raw if use_raw_mask else lengths

    def disable_attention_mask(self) -> None:
        """Says that there is no mask."""
        self.attention_mask_format = AttentionMaskFormat.NoMask

    def set_attention_op_type(self, attn_op_type: AttentionOpType) -> None:
        """Chooses the operator that attention is fused to."""
        self.attention_op_type = attn_op_type

    @staticmethod
    def parse(args: argparse.Namespace) -> FusionOptions:
        """Returns the options that arguments of the command line name; see `add_arguments`."""
        options = FusionOptions(args.model_type)
        for table, value in ((_DISABLING, False), (_ENABLING, True)):
            for argument, (switch, _) in table.items():
                if getattr(args, argument, False):
                    setattr(options, switch, value)
        if getattr(args, "use_group_norm_channels_first", False):
            options.group_norm_channels_last = False
        for argument, (mask, _) in _MASKS.items():
            if getattr(args, argument, False):
                options.attention_mask_format = mask
        return options

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the arguments that `parse` reads."""
        for argument, (_, what) in _DISABLING.items():
            parser.add_argument(f"--{argument}", action="store_true", help=f"does not fuse {what}")
        for argument, (_, what) in _ENABLING.items():
            parser.add_argument(f"--{argument}", action="store_true", help=f"uses {what}")
        for argument, (_, what) in _MASKS.items():
            parser.add_argument(f"--{argument}", action="store_true", help=what)
        parser.add_argument(
            "--use_group_norm_channels_first",
            action="store_true",
            help="GroupNorm is NCHW, not NHWC; for unet and vae",
        )
