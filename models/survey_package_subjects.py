"""The architectures of other PyTorch packages: configurations of x-transformers, and classes of vit-pytorch.

Needs x-transformers==2.31.10 and vit-pytorch==1.26.14.
"""

from __future__ import annotations

import importlib

from architecture import Architecture, Config, Input
from survey_subjects import BOTH, IMAGE_SIZES, TEXT_SIZES, image, several
from torch import nn

# Classes whose forward() names its image x.
READ_X = frozenset({"CCT", "CvT", "MaxViT", "MobileViT", "RegionViT", "SepViT", "TwinsSVT"})
WORDS = Input("x", ("batch", "seq"), values=(3, 63))
WORDS_OF_ONE_LENGTH = Input("x", ("batch", 16), values=(3, 63))
DEPTH = {"dim": 32, "depth": 2, "heads": 4}
VIT = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}


def x_transformers(name: str, layers: str = "Decoder", **options: object) -> Architecture:
    """A Decoder or an Encoder of x-transformers with these options, between an embedding and the logits.

    Biases of relative positions are computed of Python numbers, so that an export holds at one length only.
    """
    words = WORDS_OF_ONE_LENGTH if {"rel_pos_bias", "dynamic_pos_bias"} & options.keys() else WORDS

    def build(_config: Config, _attention: str) -> nn.Module:
        import x_transformers as library

        made = getattr(library, layers)(**{**DEPTH, "attn_dim_head": 8, **options})
        return library.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=made)

    return Architecture(f"x-transformers/{name}", build, several(words), (), {}, BOTH, TEXT_SIZES)


def vit_pytorch(name: str, file: str = "", side: int = 64, **options: object) -> Architecture:
    """A class of vit-pytorch, from this file of the package."""

    def build(_config: Config, _attention: str) -> nn.Module:
        library = importlib.import_module(f"vit_pytorch.{file or 'vit'}")
        return getattr(library, name)(**options)

    label = f"vit-pytorch/{file or name}"
    return Architecture(label, build, image(side, "x" if name in READ_X else "img"), (), {}, BOTH, IMAGE_SIZES)


X_TRANSFORMERS = (
    x_transformers("decoder"), x_transformers("encoder", "Encoder"), x_transformers("flash", attn_flash=True),
    x_transformers("rotary", rotary_pos_emb=True), x_transformers("rotary_flash", rotary_pos_emb=True, attn_flash=True),
    x_transformers("xpos", rotary_pos_emb=True, rotary_xpos=True), x_transformers("alibi", alibi_pos_bias=True),
    x_transformers("t5_bias", rel_pos_bias=True), x_transformers("t5_bias_encoder", "Encoder", rel_pos_bias=True),
    x_transformers("dynamic_bias", dynamic_pos_bias=True, dynamic_pos_bias_log_distance=False),
    x_transformers("rms_norm", use_rmsnorm=True), x_transformers("simple_rms_norm", use_simple_rmsnorm=True),
    x_transformers("scale_norm", use_scalenorm=True), x_transformers("grouped_queries", attn_kv_heads=2),
    x_transformers("one_key_head", attn_one_kv_head=True), x_transformers("qk_norm", attn_qk_norm=True),
    x_transformers("qk_norm_scale", attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    x_transformers("memory_keys", attn_num_mem_kv=4), x_transformers("talking_heads", attn_pre_talking_heads=True,
    attn_post_talking_heads=True), x_transformers("top_k", attn_sparse_topk=4),
    x_transformers("attention_on_attention", attn_on_attn=True), x_transformers("glu", ff_glu=True),
    x_transformers("swiglu", ff_glu=True, ff_swish=True, ff_no_bias=True),
    x_transformers("relu_squared", ff_relu_squared=True), x_transformers("sandwich_norm", sandwich_norm=True),
    x_transformers("macaron", macaron=True),
    x_transformers("gated_residual", gate_residual=True), x_transformers("softclamp", attn_softclamp_logits=True),
    x_transformers("zero_key", attn_add_zero_kv=True), x_transformers("shifted", shift_tokens=1),
    x_transformers("post_norm", "Encoder", pre_norm=False), x_transformers("gated_values", attn_gate_values=True),
    x_transformers("head_scale", attn_head_scale=True), x_transformers("dynamic_tanh", use_dynamic_tanh=True),
    x_transformers("llama", use_rmsnorm=True, rotary_pos_emb=True, ff_glu=True, ff_swish=True, ff_no_bias=True,
                   attn_kv_heads=2, attn_flash=True),
    x_transformers("palm", rotary_pos_emb=True, attn_one_kv_head=True, ff_glu=True, ff_swish=True, ff_no_bias=True),
)  # fmt: skip
VIT_PYTORCH = (
    vit_pytorch("ViT", **VIT), vit_pytorch("SimpleViT", "simple_vit", **VIT),
    vit_pytorch("SimpleViT", "simple_vit_with_qk_norm", **VIT), vit_pytorch("SimpleViT",
    "simple_vit_with_register_tokens", **VIT), vit_pytorch("SimpleViT", "simple_flash_attn_vit", **VIT),
    vit_pytorch("DeepViT", "deepvit", **VIT), vit_pytorch("CaiT", "cait", **VIT, cls_depth=1),
    vit_pytorch("ViT", "parallel_vit", **VIT), vit_pytorch("ViT", "vit_for_small_dataset", **VIT),
    vit_pytorch("RvT", "rvt", **VIT), vit_pytorch("ViT", "vit_with_patch_merger", **VIT, patch_merge_num_tokens=4),
    vit_pytorch("T2TViT", "t2t", image_size=64, num_classes=10, dim=32, depth=2, heads=4, mlp_dim=64,
                t2t_layers=((7, 4), (3, 2))),
    vit_pytorch("CCT", "cct", img_size=64, embedding_dim=32, num_layers=2, num_heads=4, mlp_ratio=2, num_classes=10,
                n_conv_layers=2, positional_embedding="learnable"),
    vit_pytorch("CrossViT", "cross_vit", image_size=64, num_classes=10, depth=1, sm_dim=32, sm_patch_size=16,
                sm_enc_depth=1, sm_enc_heads=4, sm_enc_mlp_dim=64, lg_dim=48, lg_patch_size=32, lg_enc_depth=1,
                lg_enc_heads=4, lg_enc_mlp_dim=64, cross_attn_depth=1, cross_attn_heads=4),
    vit_pytorch("PiT", "pit", image_size=64, patch_size=16, dim=32, num_classes=10, depth=(1, 1), heads=4, mlp_dim=64),
    vit_pytorch("LeViT", "levit", image_size=64, num_classes=10, stages=2, dim=(32, 48), depth=2, heads=(4, 6),
                mlp_mult=2),
    vit_pytorch("CvT", "cvt", num_classes=10, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=48, s3_depth=1),
    vit_pytorch("TwinsSVT", "twins_svt", 128, num_classes=10, s1_emb_dim=16, s1_local_patch_size=4, s2_emb_dim=16,
                s2_local_patch_size=4, s3_emb_dim=32, s3_local_patch_size=4, s3_depth=1, s4_emb_dim=32,
                s4_local_patch_size=2, s4_depth=1, s1_global_k=4, s2_global_k=4, s3_global_k=4, s4_global_k=1),
    vit_pytorch("MaxViT", "max_vit", 224, num_classes=10, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1),
                window_size=7),
    vit_pytorch("NesT", "nest", image_size=64, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1),
                num_classes=10),
    vit_pytorch("MobileViT", "mobile_vit", image_size=(64, 64), dims=[16, 24, 32], num_classes=10,
                channels=[16, 16, 24, 24, 32, 32, 48, 48, 48, 48, 64]),
    vit_pytorch("XCiT", "xcit", **VIT, cls_depth=1), vit_pytorch("SepViT", "sep_vit", 224, num_classes=10, dim=16,
    dim_head=8, heads=(1, 2, 4), depth=(1, 1, 1), window_size=7), vit_pytorch("ScalableViT", "scalable_vit", 256,
    num_classes=10, dim=16, heads=(2, 4), depth=(1, 1), ssa_dim_key=(8, 8), reduction_factor=(4, 2),
    window_size=(32, None)),
    vit_pytorch("RegionViT", "regionvit", 224, num_classes=10, dim=(16, 32, 48, 64), depth=(1, 1, 1, 1), window_size=7),
)  # fmt: skip
PACKAGES = (*X_TRANSFORMERS, *VIT_PYTORCH)
