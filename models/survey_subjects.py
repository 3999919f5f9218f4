"""The architectures of the survey: classes of transformers, timm, torchvision, diffusers and torch, in tiny sizes.

Each row says how a module is built and what it reads.  Sizes are as small as the code of the architecture allows, and
keep what matters to spellings: several heads, fewer key heads than query heads, several layers, windows that do not
cover all keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch
from architecture import Architecture, Builder, Config, Input, Variant
from torch import nn

DYNAMO, TS = Variant("dynamo", "dynamo", None), Variant("ts", "ts", 17)
BOTH = (DYNAMO, TS)
WITH_EAGER = (*BOTH, Variant("ts", "ts", 17, "eager"))
TEXT_SIZES = ({"batch": 2, "seq": 16, "target": 12}, {"batch": 3, "seq": 24, "target": 20})
IMAGE_SIZES = ({"batch": 2}, {"batch": 3})

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
STAGES = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
AUDIO = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 16}


# --- what modules read ------------------------------------------------------------------------------------------


def ids(config: Config) -> tuple[Input, ...]:
    """Token ids with a padding mask."""
    return (
        Input("input_ids", ("batch", "seq"), values=(3, 63)),
        Input("attention_mask", ("batch", "seq"), values=(0, 1), prefix_mask=True),
    )


def both_ids(config: Config) -> tuple[Input, ...]:
    """Token ids of an encoder, with a padding mask, and those of a decoder."""
    return (*ids(config), Input("decoder_input_ids", ("batch", "target"), values=(3, 63)))


def with_encoder(features: Input) -> Callable[[Config], tuple[Input, ...]]:
    """Features of sound, and the token ids of a decoder."""
    return lambda config: (features, Input("decoder_input_ids", ("batch", "target"), values=(3, 63)))


def floats(name: str, *dims: str | int) -> Callable[[Config], tuple[Input, ...]]:
    """One tensor of floats."""
    return lambda config: (Input(name, dims),)


def image(side: int = 32, name: str = "pixel_values") -> Callable[[Config], tuple[Input, ...]]:
    """A batch of square images."""
    return floats(name, "batch", 3, side, side)


def several(*inputs: Input) -> Callable[[Config], tuple[Input, ...]]:
    """These inputs."""
    return lambda config: inputs


# --- how modules are built --------------------------------------------------------------------------------------


def transformers_class(model: str, config: str, part: str, options: Mapping[str, object]) -> Builder:
    """A builder for a class of transformers, or for one of its submodules."""

    def build(_config: Config, attention: str) -> nn.Module:
        import transformers

        chosen = {"attn_implementation": attention} if attention else {}
        made = getattr(transformers, model)(getattr(transformers, config)(**{"use_cache": False, **options, **chosen}))
        return functools.reduce(getattr, part.split("."), made) if part else made

    return build


def hf(
    name: str,
    model: str,
    options: Mapping[str, object],
    inputs: Callable[[Config], tuple[Input, ...]] = ids,
    *,
    config: str = "",
    part: str = "",
    eager: bool = True,
    **more: object,
) -> Architecture:
    """An architecture of transformers; `config` is the class of its configuration where the name does not tell it."""
    prefix = model.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").removesuffix("Model")
    build = transformers_class(model, config or f"{prefix}Config", part, {**options, **more})
    return Architecture(f"transformers/{name}", build, inputs, (), {}, WITH_EAGER if eager else BOTH, TEXT_SIZES)


def timm(name: str, side: int = 64, **options: object) -> Architecture:
    """An architecture of timm, by the name of the model."""

    def build(_config: Config, _attention: str) -> nn.Module:
        import timm as library

        return library.create_model(name, pretrained=False, num_classes=10, **options)

    return Architecture(f"timm/{name}", build, image(side, "x"), (), {}, BOTH, IMAGE_SIZES)


def torchvision(name: str, side: int = 64, **options: object) -> Architecture:
    """An architecture of torchvision, by the name of the function."""

    def build(_config: Config, _attention: str) -> nn.Module:
        from torchvision import models

        return getattr(models, name)(weights=None, num_classes=10, **options)

    return Architecture(f"torchvision/{name}", build, image(side, "x"), (), {}, BOTH, IMAGE_SIZES)


def diffusers(name: str, inputs: Callable[[Config], tuple[Input, ...]], **options: object) -> Architecture:
    """An architecture of diffusers, by the name of the class."""

    def build(_config: Config, _attention: str) -> nn.Module:
        import diffusers as library

        made = getattr(library, name)(**options)
        return made.decoder if name == "AutoencoderKL" else made

    return Architecture(f"diffusers/{name}", build, inputs, (), {}, BOTH, IMAGE_SIZES)


def torch_module(name: str, make: Callable[[], nn.Module], *inputs: Input) -> Architecture:
    """A module of torch.nn."""
    return Architecture(f"torch/{name}", lambda *_: make(), several(*inputs), (), {}, BOTH, TEXT_SIZES)


@functools.cache
def declare_torchvision_operators() -> torch.library.Library:
    """Declare the operators without which torchvision cannot be imported beside a torch for CPUs.

    Its wheel has them for CUDA; no architecture of the survey calls them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in "nms", "qnms":
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


# --- the table --------------------------------------------------------------------------------------------------

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "pad_token_id": 0,
      "decoder_start_token_id": 0}  # fmt: skip
LATENT = DECODER | MIXTURE | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
SEQ = ("batch", "seq")
FEATURES = Input("input_features", ("batch", 8, 64))
ENCODERS = (
    hf("bert", "BertModel", COMMON), hf("roberta", "RobertaModel", COMMON), hf("distilbert", "DistilBertModel", COMMON),
    hf("albert", "AlbertModel", COMMON, embedding_size=16), hf("electra", "ElectraModel", COMMON, embedding_size=16),
    hf("mpnet", "MPNetModel", COMMON, eager=False), hf("rembert", "RemBertModel", COMMON, eager=False),
    hf("megatron_bert", "MegatronBertModel", COMMON, eager=False),
    hf("deberta", "DebertaModel", COMMON, relative_attention=True, pos_att_type=["c2p", "p2c"], eager=False),
    hf("deberta_v2", "DebertaV2Model", COMMON, relative_attention=True, pos_att_type=["c2p", "p2c"],
       position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", eager=False),
    hf("esm", "EsmModel", COMMON, position_embedding_type="rotary", mask_token_id=3),
    hf("roformer", "RoFormerModel", COMMON, embedding_size=32, eager=False),
    hf("modernbert", "ModernBertModel", COMMON, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1,
       sep_token_id=2), hf("nomic_bert", "NomicBertModel", COMMON),
    hf("squeezebert", "SqueezeBertModel", COMMON, eager=False, embedding_size=32),
    hf("mobilebert", "MobileBertModel", COMMON, embedding_size=16, true_hidden_size=32, intra_bottleneck_size=32,
       hidden_size=32, num_feedforward_networks=1), hf("convbert", "ConvBertModel", COMMON, embedding_size=32,
       head_ratio=2, conv_kernel_size=3, eager=False),
    hf("xlnet", "XLNetModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": 64}, eager=False),
    hf("fnet", "FNetModel", COMMON, several(Input("input_ids", SEQ, values=(3, 63))), eager=False,
       tpu_short_seq_length=16),
    hf("layoutlm", "LayoutLMModel", COMMON), hf("bert_generation", "BertGenerationEncoder", COMMON,
       config="BertGenerationConfig"),
)  # fmt: skip
DECODERS = (
    hf("gpt2", "GPT2LMHeadModel", COMMON, config="GPT2Config"), hf("gpt_neo", "GPTNeoForCausalLM", {
        "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4,
        "vocab_size": 64, "max_position_embeddings": 64, "window_size": 8}, eager=False),
    hf("gpt_neox", "GPTNeoXForCausalLM", COMMON, rotary_pct=0.5), hf("gptj", "GPTJForCausalLM", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 64, "n_positions": 64}, eager=False),
    hf("codegen", "CodeGenForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 64,
       "n_positions": 64}, eager=False), hf("gpt_bigcode", "GPTBigCodeForCausalLM", COMMON),
    hf("opt", "OPTForCausalLM", COMMON, ffn_dim=48, word_embed_proj_dim=32),
    hf("bloom", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, eager=False),
    hf("falcon", "FalconForCausalLM", COMMON, alibi=False), hf("falcon_alibi", "FalconForCausalLM", COMMON, alibi=True),
    hf("mpt", "MptForCausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_seq_len": 64},
       eager=False),
    hf("llama", "LlamaForCausalLM", DECODER), hf("llama31", "LlamaForCausalLM", DECODER, rope_parameters={
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}),
    hf("llama_yarn", "LlamaForCausalLM", DECODER, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4,
        "factor": 4.0, "original_max_position_embeddings": 16}),
    hf("mistral", "MistralForCausalLM", DECODER, sliding_window=8),
    hf("mixtral", "MixtralForCausalLM", DECODER, **MIXTURE), hf("qwen2", "Qwen2ForCausalLM", DECODER),
    hf("qwen2_sliding", "Qwen2ForCausalLM", DECODER, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    hf("qwen3", "Qwen3ForCausalLM", DECODER), hf("gemma", "GemmaForCausalLM", DECODER), hf("gemma2",
       "Gemma2ForCausalLM", DECODER, sliding_window=8, query_pre_attn_scalar=8), hf("gemma3", "Gemma3ForCausalLM",
       DECODER, config="Gemma3TextConfig", sliding_window=8, query_pre_attn_scalar=8),
    hf("phi", "PhiForCausalLM", COMMON, partial_rotary_factor=0.5), hf("phi3", "Phi3ForCausalLM", DECODER),
    hf("phi3_longrope", "Phi3ForCausalLM", DECODER, original_max_position_embeddings=32, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32}),
    hf("stablelm", "StableLmForCausalLM", DECODER, partial_rotary_factor=0.5), hf("cohere", "CohereForCausalLM",
       DECODER), hf("cohere2", "Cohere2ForCausalLM", DECODER, sliding_window=8), hf("olmo", "OlmoForCausalLM", DECODER),
    hf("olmo2", "Olmo2ForCausalLM", DECODER), hf("starcoder2", "Starcoder2ForCausalLM", DECODER),
    hf("glm", "GlmForCausalLM", DECODER, partial_rotary_factor=0.5), hf("glm4", "Glm4ForCausalLM", DECODER,
       partial_rotary_factor=0.5), hf("granite", "GraniteForCausalLM", DECODER),
    hf("nemotron", "NemotronForCausalLM", DECODER, partial_rotary_factor=0.5), hf("persimmon", "PersimmonForCausalLM",
       COMMON, partial_rotary_factor=0.5), hf("deepseek_v2", "DeepseekV2ForCausalLM", LATENT), hf("deepseek_v3",
       "DeepseekV3ForCausalLM", LATENT), hf("minicpm3", "MiniCPM3ForCausalLM", LATENT), hf("xglm", "XGLMForCausalLM",
       {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 64}, eager=False),
    hf("biogpt", "BioGptForCausalLM", COMMON), hf("smollm3", "SmolLM3ForCausalLM", DECODER), hf("helium",
       "HeliumForCausalLM", DECODER), hf("exaone4", "Exaone4ForCausalLM", DECODER, sliding_window=8), hf("gpt_oss",
       "GptOssForCausalLM", DECODER, sliding_window=8, **MIXTURE), hf("diffllama", "DiffLlamaForCausalLM", DECODER),
    hf("seed_oss", "SeedOssForCausalLM", DECODER), hf("ministral", "MinistralForCausalLM", DECODER, sliding_window=8),
)  # fmt: skip
SEQ2SEQ_MODELS = (
    hf("t5", "T5ForConditionalGeneration", T5, both_ids), hf("mt5", "MT5ForConditionalGeneration", T5, both_ids,
       feed_forward_proj="gated-gelu"), hf("bart", "BartModel", SEQ2SEQ, both_ids), hf("marian", "MarianModel", SEQ2SEQ,
       both_ids), hf("pegasus", "PegasusModel", SEQ2SEQ, both_ids), hf("m2m_100", "M2M100Model", SEQ2SEQ, both_ids),
    hf("whisper", "WhisperModel", SEQ2SEQ, with_encoder(FEATURES), num_mel_bins=8, max_source_positions=32,
       max_target_positions=64), hf("moonshine", "MoonshineModel", SEQ2SEQ, with_encoder(Input("input_values",
       ("batch", 4096))), hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2,
       decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4),
)  # fmt: skip
VISION_MODELS = (
    hf("vit", "ViTModel", VISION, image()), hf("deit", "DeiTModel", VISION, image()), hf("beit", "BeitModel", VISION,
       image(), use_relative_position_bias=True), hf("dinov2", "Dinov2Model", VISION, image()), hf("dinov3",
       "DINOv3ViTModel", VISION, image(), config="DINOv3ViTConfig"), hf("ijepa", "IJepaModel", VISION, image()),
    hf("swin", "SwinModel", STAGES, image(64)), hf("swinv2", "Swinv2Model", STAGES, image(64), eager=False),
    hf("clip_vision", "CLIPVisionModel", VISION, image(), projection_dim=16), hf("clip_text", "CLIPTextModel", COMMON,
       projection_dim=16), hf("siglip", "SiglipVisionModel", VISION, image(), config="SiglipVisionConfig"),
    hf("siglip_text", "SiglipTextModel", COMMON, config="SiglipTextConfig", projection_size=32),
    hf("convnext", "ConvNextModel", {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}, image(), eager=False),
    hf("sam_vision", "SamVisionModel", VISION, image(64), config="SamVisionConfig", image_size=64, mlp_dim=48,
       output_channels=16, window_size=4, global_attn_indexes=[1], eager=True),
    hf("vitdet", "VitDetModel", VISION, image(64), image_size=64, use_relative_position_embeddings=True,
       window_block_indices=[0], window_size=4, eager=False),
    hf("segformer", "SegformerModel", {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16],
       "num_attention_heads": [1, 2, 2, 4]}, image(64), eager=False), hf("pvt_v2", "PvtV2Model", {
       "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4], "image_size": 64},
       image(64), eager=False), hf("cvt", "CvtModel", {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 4],
       "depth": [1, 1, 1]}, image(64), eager=False), hf("mobilevit", "MobileViTModel", {"hidden_sizes": [16, 16, 16],
       "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 16], "image_size": 64}, image(64), eager=False),
    hf("yolos", "YolosModel", VISION, image(), image_size=[32, 32]),
    hf("hiera", "HieraModel", {"embed_dim": 8, "depths": [1, 1, 1, 1],
       "num_heads": [1, 2, 4, 8], "image_size": [64, 64]}, image(64), eager=False),
    hf("dpt", "DPTModel", VISION, image()), hf("mlcd", "MLCDVisionModel", VISION, image(),
       config="MLCDVisionConfig"), hf("levit", "LevitModel", {"image_size": 64, "hidden_sizes": [16, 32, 32],
       "num_attention_heads": [2, 4, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, image(64), eager=False),
)  # fmt: skip
AUDIO_MODELS = (
    hf("wav2vec2", "Wav2Vec2Model", AUDIO, floats("input_values", "batch", 2000)), hf("hubert", "HubertModel", AUDIO,
       floats("input_values", "batch", 2000)), hf("wavlm", "WavLMModel", AUDIO, floats("input_values", "batch", 2000),
       eager=False), hf("wav2vec2_conformer", "Wav2Vec2ConformerModel", AUDIO, floats("input_values", "batch", 2000),
       position_embeddings_type="rotary", eager=False), hf("ast", "ASTModel", VISION, floats("input_values", "batch",
       64, 32), max_length=64, num_mel_bins=32), hf("wav2vec2_bert", "Wav2Vec2BertModel", COMMON, floats(
       "input_features", "batch", 24, 160), eager=False),
)  # fmt: skip
TIMM = (
    timm("xcit_nano_12_p8_224", img_size=64, depth=2), timm("eva02_tiny_patch14_224", 56, img_size=56, depth=2),
    timm("vit_tiny_patch16_224", img_size=64, depth=2), timm("vit_small_patch16_rope_224", img_size=64, depth=2),
    timm("vit_small_patch16_rope_mixed_224", img_size=64, depth=2), timm("swin_tiny_patch4_window7_224", img_size=64,
         depths=(2, 2), num_heads=(3, 6), window_size=4), timm("swinv2_tiny_window8_256", img_size=64, depths=(2, 2),
         num_heads=(3, 6), window_size=4), timm("edgenext_xx_small"), timm("cait_xxs24_224", img_size=64, depth=2),
    timm("pit_ti_224", 224), timm("convit_tiny", img_size=64, depth=2), timm("mvitv2_tiny", 224), timm("davit_tiny", 64,
         depths=(1, 1, 1, 1)), timm("twins_svt_small", 64, img_size=64, depths=(1, 1, 1, 1)),
    timm("maxvit_rmlp_pico_rw_256", 64, img_size=64), timm("coatnet_nano_rw_224", 64, img_size=64),
    timm("beit_base_patch16_224", img_size=64, depth=2),
    timm("levit_128s", 224), timm("mixer_s32_224", 64, img_size=64), timm("convnextv2_atto"),
    timm("mobilenetv4_hybrid_medium"), timm("efficientvit_b0"), timm("volo_d1_224", 64, img_size=64),
    timm("deit3_small_patch16_224", img_size=64, depth=2), timm("tiny_vit_5m_224", 224), timm("resnet18"),
    timm("efficientnet_b0"), timm("poolformer_s12"), timm("fastvit_t8"),
)  # fmt: skip
TORCHVISION = (
    torchvision("swin_t"), torchvision("swin_v2_t"), torchvision("vit_b_16", image_size=64),
    torchvision("convnext_tiny"), torchvision("mobilenet_v3_small"), torchvision("resnet18"),
    torchvision("maxvit_t", 224), torchvision("efficientnet_v2_s"),
)  # fmt: skip
SAMPLE = Input("sample", ("batch", 4, 16, 16))
STEP = Input("timestep", ("batch",), values=(0, 999))
WORDS = Input("encoder_hidden_states", ("batch", 8, 32))
BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
DIFFUSERS = (
    diffusers("UNet2DConditionModel", several(SAMPLE, STEP, WORDS), sample_size=16, cross_attention_dim=32,
              attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **BLOCKS),
    diffusers("AutoencoderKL", several(SAMPLE), latent_channels=4,
              down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **BLOCKS),
    diffusers("DiTTransformer2DModel", several(dataclasses.replace(SAMPLE, name="hidden_states"), STEP,
              Input("class_labels", ("batch",), values=(0, 9))), num_attention_heads=4, attention_head_dim=8,
              in_channels=4, num_layers=2, sample_size=16, num_embeds_ada_norm=10, norm_num_groups=8),
    diffusers("PixArtTransformer2DModel", several(dataclasses.replace(SAMPLE, name="hidden_states"), WORDS, STEP),
              num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=16,
              cross_attention_dim=32, caption_channels=32, norm_num_groups=8),
    diffusers("SD3Transformer2DModel", several(dataclasses.replace(SAMPLE, name="hidden_states"), WORDS,
              Input("pooled_projections", ("batch", 16)), STEP), sample_size=16, in_channels=4, out_channels=4,
              num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32,
              pooled_projection_dim=16, caption_projection_dim=32, pos_embed_max_size=16),
    diffusers("FluxTransformer2DModel", several(Input("hidden_states", ("batch", 16, 16)), WORDS,
              Input("pooled_projections", ("batch", 16)), Input("timestep", ("batch",)), Input("img_ids", (16, 3)),
              Input("txt_ids", (8, 3))), in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
              num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6)),
)  # fmt: skip


def encoder(norm_first: bool) -> nn.Module:
    """torch.nn.TransformerEncoder of two layers."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, activation="gelu", batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder() -> nn.Module:
    """torch.nn.TransformerDecoder of two layers, batch second."""
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48), 2)


TORCH = (
    # TorchScript traces the lengths of nn.MultiheadAttention as numbers.
    torch_module("TransformerEncoder", lambda: encoder(False), Input("src", ("batch", 16, 32))),
    torch_module("TransformerEncoder_norm_first", lambda: encoder(True), Input("src", ("batch", 16, 32))),
    torch_module("TransformerDecoder", decoder, Input("tgt", (16, "batch", 32)), Input("memory", (9, "batch", 32))),
)
SUBJECTS = (
    *ENCODERS, *DECODERS, *SEQ2SEQ_MODELS, *VISION_MODELS, *AUDIO_MODELS, *TIMM, *TORCHVISION, *DIFFUSERS, *TORCH,
)  # fmt: skip
