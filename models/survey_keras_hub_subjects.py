"""Models of KerasHub for the survey: backbones of one or two layers, with random weights.

Needs tensorflow==2.21.0, keras==3.15.1, keras-hub==0.32.0 and tf2onnx==1.17.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, Final

import keras
import keras_hub
from survey_keras_counts import export

Model = Any  # keras.Model
TEXT = {"vocabulary_size": 64, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 48}
GROUPED = {"vocabulary_size": 64, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32,
           "intermediate_dim": 48}  # fmt: skip
IMAGE = {"image_shape": (64, 64, 3)}
VISION = {**IMAGE, "patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 32}


def backbone(name: str, *options: Mapping[str, object], **more: object) -> Callable[[], Model]:
    """A builder of a backbone with these options."""
    merged = {key: value for each in (*options, more) for key, value in each.items()}
    return functools.partial(_build, name, merged)


def _build(name: str, options: Mapping[str, object]) -> Model:
    return getattr(keras_hub.models, f"{name}Backbone")(**options)


def exporter() -> str:
    """Return the name of the exports' kind: the backend."""
    return keras.backend.backend()


def versions() -> dict[str, str]:
    """Return the versions that the exports depend on."""
    return {name: metadata.version(name) for name in ("tensorflow", "tf2onnx", "keras", "keras-hub")}


RESNET = {"input_conv_filters": [64], "input_conv_kernel_sizes": [7], "stackwise_num_filters": [64, 128],
          "stackwise_num_blocks": [1, 1], "stackwise_num_strides": [1, 2], **IMAGE}  # fmt: skip
SUBJECTS: Final[dict[str, Callable[[], Model]]] = {
    "bert": backbone("Bert", TEXT), "roberta": backbone("Roberta", TEXT), "distil_bert": backbone("DistilBert", TEXT),
    "albert": backbone("Albert", TEXT, embedding_dim=16), "deberta_v3": backbone("DebertaV3", TEXT, bucket_size=8),
    "electra": backbone("Electra", {**TEXT, "vocab_size": 64}, embedding_dim=16), "f_net": backbone("FNet", TEXT),
    "esm": backbone("ESM", TEXT), "roformer_v2": backbone("RoformerV2", TEXT, head_size=8),
    "xl_net": backbone("XLNet", TEXT), "gpt2": backbone("GPT2", TEXT), "gpt_neo_x": backbone("GPTNeoX", TEXT),
    "opt": backbone("OPT", TEXT), "bloom": backbone("Bloom", TEXT),
    "falcon": backbone("Falcon", TEXT, num_attention_heads=4), "llama": backbone("Llama", GROUPED),
    "llama3": backbone("Llama3", GROUPED), "mistral": backbone("Mistral", GROUPED, sliding_window=4),
    "gemma": backbone("Gemma", GROUPED, head_dim=8), "gemma2": backbone("Gemma", GROUPED, head_dim=8,
    use_post_ffw_norm=True, use_post_attention_norm=True, attention_logit_soft_cap=50, final_logit_soft_cap=30,
    use_sliding_window_attention=True, sliding_window_size=4),
    "gemma3": backbone("Gemma3", GROUPED, head_dim=8, image_size=16, use_sliding_window_attention=True,
                       sliding_window_size=4, use_post_ffw_norm=True, use_post_attention_norm=True),
    "phi3": backbone("Phi3", GROUPED), "qwen": backbone("Qwen", GROUPED), "qwen3": backbone("Qwen3", GROUPED,
    head_dim=8), "mixtral": backbone("Mixtral", GROUPED, num_experts=2), "gpt_oss": backbone("GptOss", GROUPED,
    num_experts=2, sliding_window=4), "bart": backbone("Bart", TEXT), "t5": backbone("T5", TEXT),
    "t5_relu": backbone("T5", TEXT, use_gated_activation=False), "whisper": backbone("Whisper", TEXT, num_mels=8,
    max_encoder_sequence_length=32, max_decoder_sequence_length=16),
    "vit": backbone("ViT", VISION, mlp_dim=48), "deit": backbone("DeiT", VISION, intermediate_dim=48),
    "dino_v2": backbone("DINOV2", VISION, intermediate_dim=48, position_embedding_shape=(64, 64, 3)),
    "dino_v3": backbone("DINOV3", VISION, intermediate_dim=48), "swin": backbone("SwinTransformer", IMAGE,
    embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4),
    "vit_det": backbone("ViTDet", IMAGE, hidden_size=32, num_layers=2, intermediate_dim=48, num_heads=4,
                        global_attention_layer_indices=[1], window_size=2),
    "mi_t": backbone("MiT", IMAGE, layerwise_depths=[1, 1], num_layers=2, layerwise_num_heads=[1, 2],
                     layerwise_sr_ratios=[4, 2], max_drop_path_rate=0.1, layerwise_patch_sizes=[7, 3],
                     layerwise_strides=[4, 2], hidden_dims=[16, 32]),
    "res_net": backbone("ResNet", RESNET, block_type="bottleneck_block"),
    "res_net_v2": backbone("ResNet", RESNET, block_type="basic_block", use_pre_activation=True),
    "dense_net": backbone("DenseNet", IMAGE, stackwise_num_repeats=[2, 2], growth_rate=8),
    "vgg": backbone("VGG", IMAGE, stackwise_num_repeats=[1, 1], stackwise_num_filters=[16, 32]),
    "xception": backbone("Xception", IMAGE, stackwise_conv_filters=[[16, 32], [32, 32]],
                         stackwise_pooling=[True, False]),
    "efficient_net": backbone("EfficientNet", stackwise_kernel_sizes=[3, 3], stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[16, 16], stackwise_output_filters=[16, 24], stackwise_expansion_ratios=[1, 4],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25], stackwise_strides=[1, 2], input_shape=(64, 64, 3),
        stackwise_block_types=["v1", "v1"], width_coefficient=1.0, depth_coefficient=1.0),
    "efficient_net_v2": backbone("EfficientNet", stackwise_kernel_sizes=[3, 3], stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[16, 16], stackwise_output_filters=[16, 24], stackwise_expansion_ratios=[1, 4],
        stackwise_squeeze_and_excite_ratios=[0.0, 0.25], stackwise_strides=[1, 2], input_shape=(64, 64, 3),
        stackwise_block_types=["fused", "unfused"], width_coefficient=1.0, depth_coefficient=1.0),
    "hg_net_v2": backbone("HGNetV2", IMAGE, depths=[1, 1], embedding_size=16, hidden_sizes=[32, 48],
        stem_channels=[3, 8, 16], hidden_act="relu", use_learnable_affine_block=True, apply_downsample=[False, True],
        stackwise_stage_filters=[[16, 8, 32, 1, 2, 3], [32, 8, 48, 1, 2, 3]],
        use_lightweight_conv_block=[False, True]),
}  # fmt: skip
__all__ = ["SUBJECTS", "export", "exporter", "versions"]
