"""The public architectures that export.py writes: how each is built, what it reads, which variants are exported."""

from __future__ import annotations

import dataclasses

from architecture import Architecture, Config, Input, Variant
from convolutional import densenet, detector, efficientnet, mobilenet_v3, mobilenet_v3_large, unet, vae_decoder
from modules import (
    GPT2_NAMES,
    MAMBA2_NAMES,
    MAMBA_NAMES,
    NAMES,
    SWIN_NAMES,
    T5_NAMES,
    from_transformers,
    llama_with_cache,
    qwen3_next,
    transformer_encoder,
    whisper_encoder,
)


def text(config: Config) -> tuple[Input, ...]:
    """Token ids with a padding mask."""
    return (
        Input("input_ids", ("batch", "seq"), values=(0, config["vocab"] - 1)),
        Input("attention_mask", ("batch", "seq"), values=(0, 1), prefix_mask=True),
    )


def text_with_cache(config: Config) -> tuple[Input, ...]:
    """New token ids, the mask over past and new tokens, and the keys and values of the past."""
    state = ("batch", config["kv_heads"], "past", config["head_dim"])
    return (
        Input("input_ids", ("batch", "seq"), values=(0, config["vocab"] - 1)),
        Input("attention_mask", ("batch", "past + seq"), values=(0, 1), prefix_mask=True),
        *(
            Input(f"past_key_values.{layer}.{part}", state, arg=f"{part}{layer}")
            for layer in range(config["layers"])
            for part in ("key", "value")
        ),
    )


def ids(config: Config) -> tuple[Input, ...]:
    """Token ids alone."""
    return (Input("input_ids", ("batch", "seq"), values=(0, config["vocab"] - 1)),)


def steps(config: Config) -> tuple[Input, ...]:
    """Token ids; exporters unroll loops over them, so that their number is fixed."""
    return (Input("input_ids", ("batch", config["steps"]), values=(0, config["vocab"] - 1)),)


def image(config: Config) -> tuple[Input, ...]:
    """A batch of square RGB images of fixed size."""
    return (Input("pixel_values", ("batch", 3, config["image"], config["image"])),)


def plain_image(config: Config) -> tuple[Input, ...]:
    """The same for a torch.nn.Sequential, whose parameter has another name."""
    return (Input("pixel_values", ("batch", 3, config["image"], config["image"]), arg="input"),)


def features(config: Config) -> tuple[Input, ...]:
    """A batch of sequences of vectors."""
    return (Input("src", ("batch", "seq", config["hidden"])),)


def noise(config: Config) -> tuple[Input, ...]:
    """Noisy latents, sinusoids of the time step, and the vectors of a prompt."""
    return (
        *latents(config),
        Input("time", ("batch", config["widths"][0])),
        Input("context", ("batch", config["words"], config["context"])),
    )


def latents(config: Config) -> tuple[Input, ...]:
    """A batch of square latents of fixed size."""
    return (Input("sample", ("batch", config["latents"], config["side"], config["side"])),)


def plain_latents(config: Config) -> tuple[Input, ...]:
    """The same for a torch.nn.Sequential."""
    return tuple(dataclasses.replace(each, arg="input") for each in latents(config))


def spectrogram(config: Config) -> tuple[Input, ...]:
    """Log-mel frames, two for every position."""
    return (Input("input_features", ("batch", config["mel_bins"], 2 * config["positions"])),)


TEXT = ({"batch": 2, "seq": 7}, {"batch": 3, "seq": 12})
CACHED_TEXT = ({"batch": 2, "past": 5, "seq": 3}, {"batch": 3, "past": 9, "seq": 1})
IMAGE = ({"batch": 2}, {"batch": 3})
HIDDEN = (("last_hidden_state", ("batch", "seq")),)
POOLED = (("last_hidden_state", ("batch", "seq")), ("pooler_output", ("batch",)))
LOGITS = (("logits", ("batch", "seq")),)
PRESENT = tuple((f"present.{n}.{part}", ("batch",)) for n in range(4) for part in ("key", "value"))
IMAGE_HIDDEN = (("last_hidden_state", ("batch",)),)
IMAGE_POOLED = (("last_hidden_state", ("batch",)), ("pooler_output", ("batch",)))
CLASSES = (("logits", ("batch",)),)

EVERY_WAY = tuple(
    Variant(
        exporter,
        exporter,
        opset,
        attention,
        dtype,
        numbered_names=(exporter == "ts" and (attention, dtype) != ("sdpa", "fp32")),
    )
    for exporter, opset in (("dynamo", None), ("ts", 17))
    for attention in ("sdpa", "eager")
    for dtype in ("fp32", "fp16")
)
DYNAMO, TS = Variant("dynamo", "dynamo", None, "sdpa"), Variant("ts", "ts", 17, "sdpa", numbered_names=True)
DYNAMO_23 = Variant("dynamo23", "dynamo", 23, "sdpa")
DYNAMO_PLAIN, TS_PLAIN = Variant("dynamo", "dynamo", None), Variant("ts", "ts", 17, numbered_names=True)
DYNAMO_BN = Variant("dynamo_bn", "dynamo", None, keep_batch_norm=True)
TS_BN = Variant("ts13_bn", "ts", 13, keep_batch_norm=True)
HALF, HALF_BN = dataclasses.replace(DYNAMO_PLAIN, dtype="fp16"), dataclasses.replace(DYNAMO_BN, dtype="fp16")
HALF_EAGER = dataclasses.replace(HALF, attention="eager")
CONVOLUTIONS = (DYNAMO_PLAIN, DYNAMO_BN, TS_BN, HALF_BN)

BERT = {"layers": 2, "heads": 3, "hidden": 24, "intermediate": 32, "vocab": 64, "positions": 32}
LLAMA = BERT | {"heads": 4, "kv_heads": 2, "head_dim": 8}
VIT = {"layers": 2, "heads": 3, "hidden": 24, "intermediate": 32, "image": 32, "patch": 8}
SMALL_BERT = {"layers": 2, "heads": 2, "hidden": 16, "intermediate": 24, "vocab": 48, "positions": 32}
SMALL_LLAMA = SMALL_BERT | {"kv_heads": 1, "head_dim": 8}
BERT_BASE = {"layers": 12, "heads": 12, "hidden": 768, "intermediate": 3072, "vocab": 30522, "positions": 512}
VIT_BASE = {"layers": 12, "heads": 12, "hidden": 768, "intermediate": 3072, "image": 224, "patch": 16}
CLIP_BASE = BERT_BASE | {"heads": 8, "hidden": 512, "intermediate": 2048, "vocab": 49408, "positions": 77}
DINOV2_BASE = {"layers": 12, "heads": 12, "hidden": 768, "ratio": 4, "image": 224, "patch": 14}
T5_BASE = {key: value for key, value in BERT_BASE.items() if key != "positions"} | {"head_dim": 64, "vocab": 32128}
WHISPER_SMALL = {"layers": 12, "heads": 12, "hidden": 768, "intermediate": 3072, "positions": 1500, "mel_bins": 80}
SWIN_TINY = {"depths": [2, 2, 6, 2], "stage_heads": [3, 6, 12, 24], "stem": 96, "window": 7, "image": 224, "patch": 4}
LLAMA_BLOCKS = {"layers": 4, "heads": 32, "kv_heads": 8, "head_dim": 64, "hidden": 2048, "intermediate": 8192,
                "vocab": 32000, "positions": 2048}  # fmt: skip
PYTHIA_BLOCKS = {"layers": 4, "heads": 16, "hidden": 2048, "intermediate": 8192, "vocab": 50304, "positions": 2048}

bert = Architecture(
    "bert",
    from_transformers("BertModel", "BertConfig"),
    text,
    POOLED,
    BERT,
    EVERY_WAY,
    TEXT,
    full=BERT_BASE,
    metadata={"task": "feature-extraction", "max_length": "32"},
)
gpt2 = Architecture(
    "gpt2",
    from_transformers("GPT2LMHeadModel", "GPT2Config", GPT2_NAMES),
    text,
    LOGITS,
    BERT,
    EVERY_WAY,
    TEXT,
    full=BERT_BASE | {"vocab": 50257, "positions": 1024},
)
vit = Architecture(
    "vit",
    from_transformers("ViTModel", "ViTConfig"),
    image,
    IMAGE_POOLED,
    VIT,
    EVERY_WAY,
    IMAGE,
    full=VIT_BASE,
    metadata={"task": "image-feature-extraction", "preprocessing": '{"mean": 0.5, "std": 0.5, "layout": "NCHW"}'},
)
llama = Architecture(
    "llama",
    from_transformers("LlamaForCausalLM", "LlamaConfig"),
    text,
    LOGITS,
    LLAMA,
    EVERY_WAY,
    TEXT,
    full=LLAMA_BLOCKS,
)
resnet50 = Architecture(
    "resnet50",
    from_transformers("ResNetForImageClassification", "ResNetConfig", layer_type="bottleneck"),
    image,
    CLASSES,
    {"depths": [3, 4, 6, 3], "widths": [8, 8, 16, 16], "stem": 4, "classes": 10, "image": 32},
    CONVOLUTIONS,
    IMAGE,
    full={"depths": [3, 4, 6, 3], "widths": [256, 512, 1024, 2048], "stem": 64, "classes": 1000, "image": 224},
)
mobilenetv3 = Architecture(
    "mobilenetv3",
    mobilenet_v3,
    plain_image,
    CLASSES,
    {"width_percent": 5, "classes": 10, "image": 32},
    CONVOLUTIONS,
    IMAGE,
    gain=1.5,
    full={"width_percent": 100, "classes": 1000, "image": 224},
)
mamba = Architecture(
    "mamba",
    from_transformers("MambaModel", "MambaConfig", MAMBA_NAMES),
    steps,
    (("last_hidden_state", ("batch",)),),
    {"layers": 2, "hidden": 16, "states": 4, "rank": 2, "vocab": 48, "steps": 12},
    (DYNAMO_PLAIN, TS_PLAIN),
    IMAGE,
)
mamba2 = Architecture(
    "mamba2",
    from_transformers("Mamba2Model", "Mamba2Config", MAMBA2_NAMES),
    ids,
    (("last_hidden_state", ("batch", "seq")),),
    {"layers": 2, "hidden": 16, "heads": 4, "head_dim": 8, "groups": 2, "states": 6, "chunk": 4, "vocab": 48},
    (DYNAMO_PLAIN,),
)
qwen3_next_layers = Architecture(
    "qwen3_next",
    qwen3_next,
    steps,
    (("last_hidden_state", ("batch",)),),
    {"layers": 1, "hidden": 16, "intermediate": 16, "heads": 4, "kv_heads": 2, "key_size": 8, "value_size": 6,
     "chunk": 8, "vocab": 48, "steps": 19},
    (DYNAMO_PLAIN,),
    IMAGE,
    redrawn=False,
)  # fmt: skip
llama_kvcache = Architecture(
    "llama_kvcache",
    llama_with_cache,
    text_with_cache,
    LOGITS + PRESENT[: 2 * SMALL_LLAMA["layers"]],
    SMALL_LLAMA,
    (DYNAMO, TS, dataclasses.replace(DYNAMO_23, only_batch=1), dataclasses.replace(DYNAMO, dtype="fp16")),
    CACHED_TEXT,
)
llama_decode = Architecture(  # for benchmarks: the decoder above with the blocks of `llama`
    "llama_decode",
    llama_with_cache,
    text_with_cache,
    LOGITS + PRESENT,
    SMALL_LLAMA | {"layers": 4},
    (),
    CACHED_TEXT,
    full=LLAMA_BLOCKS | {"positions": 8192},
)


convnext = Architecture(
    "convnext",
    from_transformers("ConvNextModel", "ConvNextConfig"),
    image,
    IMAGE_POOLED,
    {"depths": [1, 1, 2, 1], "widths": [4, 4, 8, 8], "image": 32},
    (DYNAMO_PLAIN, TS_PLAIN),
    IMAGE,
    full={"depths": [3, 3, 9, 3], "widths": [96, 192, 384, 768], "image": 224},
)
CONVOLUTIONAL = (
    Architecture(
        "mobilenetv3_large",
        mobilenet_v3_large,
        plain_image,
        CLASSES,
        {"width_percent": 4, "classes": 10, "image": 64},
        (),  # for benchmarks only: the small one has the same operators
        IMAGE,
        full={"width_percent": 100, "classes": 1000, "image": 224},
        calibrated=True,
        gain=1.25,
    ),
    Architecture(
        "efficientnet",
        efficientnet,
        plain_image,
        CLASSES,
        {"width_percent": 4, "classes": 10, "image": 64},
        (Variant("dynamo23_bn", "dynamo", 23, keep_batch_norm=True),),
        IMAGE,
        full={"width_percent": 100, "classes": 1000, "image": 224},
        calibrated=True,
        gain=1.4,
    ),
    Architecture(
        "densenet",
        densenet,
        plain_image,
        CLASSES,
        {"depths": [2, 3, 2], "growth": 4, "classes": 10, "image": 32},
        (HALF_BN, TS_BN),
        IMAGE,
        full={"depths": [6, 12, 24, 16], "growth": 32, "classes": 1000, "image": 224},
        calibrated=True,
        gain=1.4,
    ),
    Architecture(
        "detector",
        detector,
        image,
        (("boxes", ("batch",)), ("scores", ("batch",))),
        {"widths": [4, 8, 8, 8, 8], "depths": [1, 1, 1, 1], "classes": 4, "bins": 4, "image": 64},
        (Variant("ts11_bn", "ts", 11, keep_batch_norm=True, numbered_names=True),),
        IMAGE,
        full={"widths": [32, 64, 128, 256, 512], "depths": [1, 2, 2, 1], "classes": 80, "bins": 16, "image": 640},
        calibrated=True,
        gain=1.35,
    ),
    Architecture(
        "unet",
        unet,
        noise,
        (("noise", ("batch",)),),
        {"latents": 4, "side": 8, "widths": [8, 8], "groups": 2, "head_dim": 4, "words": 5, "context": 6},
        (HALF, TS_PLAIN),
        IMAGE,
        full={"latents": 4, "side": 64, "widths": [320, 640], "groups": 32, "head_dim": 64, "words": 77,
              "context": 1024},
    ),
    Architecture(
        "vae_decoder",
        vae_decoder,
        plain_latents,
        (("image", ("batch",)),),
        {"latents": 4, "side": 4, "widths": [8, 8, 4, 4], "groups": 2, "depth": 2},
        (HALF, Variant("dynamo23", "dynamo", 23)),
        IMAGE,
        full={"latents": 4, "side": 64, "widths": [512, 512, 256, 128], "groups": 32, "depth": 3},
    ),
)  # fmt: skip


def decoder(name: str, model: str, config: str, numbers: Config, *more: Variant, **fixed: object) -> Architecture:
    """A causal language model of transformers, small."""
    build = from_transformers(model, config, **fixed)
    return Architecture(name, build, text, LOGITS, numbers, (DYNAMO, *more), TEXT)


t5_encoder = Architecture(
    "t5_encoder",
    from_transformers("T5EncoderModel", "T5Config", T5_NAMES),
    text,
    HIDDEN,
    {key: value for key, value in SMALL_LLAMA.items() if key not in ("positions", "kv_heads")},
    (dataclasses.replace(DYNAMO, attention="eager"), dataclasses.replace(TS, attention="eager")),
    TEXT,
)


def deberta(buckets: int, config: Config, variant: Variant, full: Config | None = None) -> Architecture:
    """Return version 3 of DeBERTa, with so many buckets of relative positions."""
    build = from_transformers(
        "DebertaV2Model",
        "DebertaV2Config",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=buckets,
        max_relative_positions=-1,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        type_vocab_size=0,
    )
    return Architecture("deberta", build, text, HIDDEN, config, (variant,), TEXT, full)


ARCHITECTURES = [
    bert,
    gpt2,
    vit,
    llama,
    resnet50,
    mobilenetv3,
    llama_kvcache,
    llama_decode,
    mamba,
    mamba2,
    dataclasses.replace(  # TorchScript fixes the number of tokens
        mamba2,
        build=from_transformers("Mamba2Model", "Mamba2Config", MAMBA2_NAMES | {"steps": ""}),
        inputs=steps,
        outputs=IMAGE_HIDDEN,
        config=mamba2.config | {"steps": 14},
        variants=(TS_PLAIN,),
        sizes=IMAGE,
    ),
    qwen3_next_layers,
    # Further spellings of the same graphs, smaller still.
    dataclasses.replace(
        bert,
        config=SMALL_BERT,
        variants=(
            DYNAMO_23,
            Variant("ts14", "ts", 14, "sdpa", numbered_names=True),
            Variant("ts13", "ts", 13, "eager", numbered_names=True),
        ),
    ),
    dataclasses.replace(llama, config=SMALL_LLAMA, variants=(dataclasses.replace(DYNAMO_23, only_batch=1),)),
    t5_encoder,
    # With larger weights its softmax is so sharp that half precision is 6 to 12 % off, by every engine.
    dataclasses.replace(t5_encoder, config={}, full=T5_BASE, gain=0.7),
    dataclasses.replace(t5_encoder, variants=(HALF_EAGER,), gain=0.7),
    deberta(8, SMALL_BERT, HALF_EAGER),
    deberta(256, {}, dataclasses.replace(DYNAMO, attention="eager"), full=BERT_BASE | {"vocab": 128100}),
    decoder("qwen3", "Qwen3ForCausalLM", "Qwen3Config", SMALL_LLAMA, TS),
    decoder(
        "phi3",
        "Phi3ForCausalLM",
        "Phi3Config",
        {k: v for k, v in SMALL_LLAMA.items() if k != "head_dim"},
        TS,
        pad_token_id=0,
    ),
    dataclasses.replace(decoder("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL_BERT, TS), full=PYTHIA_BLOCKS),
    decoder("gemma", "GemmaForCausalLM", "GemmaConfig", SMALL_LLAMA),
    Architecture(
        "clip_text",
        from_transformers("CLIPTextModel", "CLIPTextConfig", eos_token_id=2),
        text,
        POOLED,
        SMALL_BERT,
        (DYNAMO, TS),
        TEXT,
        full=CLIP_BASE,
    ),
    Architecture(  # for benchmarks only: the operators are those of `vit`
        "dinov2",
        from_transformers("Dinov2Model", "Dinov2Config", NAMES | {"ratio": "mlp_ratio"}),
        image,
        IMAGE_POOLED,
        {},
        (),
        IMAGE,
        full=DINOV2_BASE,
    ),
    Architecture(
        "transformer_encoder",
        transformer_encoder,
        features,
        (("output", ("batch", "seq")),),
        {"layers": 2, "heads": 2, "hidden": 16, "intermediate": 24},
        (DYNAMO_PLAIN, dataclasses.replace(TS_PLAIN, only_batch=2)),
        TEXT,
    ),
    Architecture(
        "swin",
        from_transformers("SwinModel", "SwinConfig", SWIN_NAMES),
        image,
        IMAGE_POOLED,
        {"depths": [2, 2], "stage_heads": [1, 2], "stem": 8, "window": 4, "image": 16, "patch": 2},
        (dataclasses.replace(DYNAMO, attention="eager"),),
        IMAGE,
        full=SWIN_TINY,
    ),
    convnext,
    dataclasses.replace(  # LayerNormalization over so few channels as above is too sensitive for float16
        convnext, config={"depths": [1, 1, 2, 1], "widths": [8, 8, 16, 16], "image": 32}, variants=(HALF,), full=None
    ),
    *CONVOLUTIONAL,
    Architecture(
        "whisper_encoder",
        whisper_encoder,
        spectrogram,
        IMAGE_HIDDEN,
        {"layers": 2, "heads": 2, "hidden": 16, "intermediate": 24, "positions": 16, "mel_bins": 8},
        (DYNAMO, TS),
        IMAGE,
        full=WHISPER_SMALL,
    ),
]
