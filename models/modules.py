"""How the torch modules are built: classes of transformers by name, and the few modules written here."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import transformers
from architecture import Builder, Config
from torch import nn
from transformers.cache_utils import DynamicLayer

NAMES = {
    "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "hidden": "hidden_size", "intermediate": "intermediate_size", "vocab": "vocab_size",
    "positions": "max_position_embeddings", "image": "image_size", "patch": "patch_size", "classes": "num_labels",
    "depths": "depths", "widths": "hidden_sizes", "stem": "embedding_size",
}  # fmt: skip
GPT2_NAMES = NAMES | {
    "layers": "n_layer", "heads": "n_head", "hidden": "n_embd", "intermediate": "n_inner", "positions": "n_positions",
}  # fmt: skip
T5_NAMES = NAMES | {
    "layers": "num_layers", "heads": "num_heads", "hidden": "d_model", "intermediate": "d_ff", "head_dim": "d_kv",
}  # fmt: skip
MAMBA_NAMES = NAMES | {"states": "state_size", "rank": "time_step_rank", "steps": ""}
MAMBA2_NAMES = NAMES | {"heads": "num_heads", "groups": "n_groups", "states": "state_size", "chunk": "chunk_size"}
SWIN_NAMES = NAMES | {"stem": "embed_dim", "stage_heads": "num_heads", "window": "window_size"}


def from_transformers(model: str, config: str, names: Mapping[str, str] = NAMES, **fixed: object) -> Builder:
    """A builder for a class of transformers; `names` translates our config keys, `fixed` is passed on as it is."""

    def build(numbers: Config, attention: str) -> nn.Module:
        translated = {names[key]: value for key, value in numbers.items() if names[key]}
        if attention:
            translated["attn_implementation"] = attention
        options = {"use_cache": False} | translated | fixed
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


class WithCache(nn.Module):
    """A decoder of up to four layers whose past keys and values are plain inputs and outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        key0: torch.Tensor,
        value0: torch.Tensor,
        key1: torch.Tensor | None = None,
        value1: torch.Tensor | None = None,
        key2: torch.Tensor | None = None,
        value2: torch.Tensor | None = None,
        key3: torch.Tensor | None = None,
        value3: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Keys and values are [batch, kv_heads, past, head_dim]; returns the logits and the grown keys and values."""
        cache = transformers.DynamicCache()
        for key, value in ((key0, value0), (key1, value1), (key2, value2), (key3, value3)):
            if key is not None:
                cache.layers.append(DynamicLayer())
                cache.layers[-1].lazy_initialization(key, value)
                cache.layers[-1].keys, cache.layers[-1].values = key, value  # update() would copy them
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return (result.logits, *(state for layer in cache.layers for state in (layer.keys, layer.values)))


class WithStaticCache(nn.Module):
    """The same decoder with a cache of fixed size, in which a step writes its rows in place: for torch alone."""

    def __init__(self, model: WithCache, states: Sequence[torch.Tensor], new: int) -> None:
        """`states` are the pasts, as inputs of `model`; there is room for `new` rows more."""
        super().__init__()
        self.model, self.past = model.model, states[0].shape[2]
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=-(-(self.past + new) // 8) * 8)
        self.rows = self.past + new
        for layer, key, value in zip(self.cache.layers, states[::2], states[1::2], strict=True):
            layer.lazy_initialization(key, value)
            layer.keys[:, :, : self.past], layer.values[:, :, : self.past] = key, value

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The logits; each call is the same step."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.past)
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        result = self.model(**given, past_key_values=self.cache, use_cache=True)
        return (result.logits,)

    def states(self) -> list[torch.Tensor]:
        """Keys and values as the last call left them, with the pasts in front."""
        return [x[:, :, : self.rows] for layer in self.cache.layers for x in (layer.keys, layer.values)]


def llama_with_cache(config: Config, attention: str) -> nn.Module:
    """LlamaForCausalLM with its cache as inputs and outputs."""
    return WithCache(from_transformers("LlamaForCausalLM", "LlamaConfig")(config, attention))


def whisper_encoder(config: Config, attention: str) -> nn.Module:
    """The encoder half of Whisper."""
    names = {
        "layers": "encoder_layers", "heads": "encoder_attention_heads", "hidden": "d_model",
        "intermediate": "encoder_ffn_dim", "positions": "max_source_positions", "mel_bins": "num_mel_bins",
    }  # fmt: skip
    tokens = {
        "vocab_size": 48,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    return from_transformers("WhisperModel", "WhisperConfig", names, **tokens)(config, attention).get_encoder()


def qwen3_next(config: Config, _attention: str) -> nn.Module:
    """Layers of Qwen3-Next with linear attention alone; the exporter unrolls a loop over the tokens of a chunk."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    layers, rule = config["layers"], modeling.torch_chunk_gated_delta_rule
    modeling.torch_chunk_gated_delta_rule = functools.partial(rule, chunk_size=config["chunk"])
    names = NAMES | {
        "heads": "linear_num_value_heads", "kv_heads": "linear_num_key_heads", "key_size": "linear_key_head_dim",
        "value_size": "linear_value_head_dim", "chunk": "", "steps": "",
    }  # fmt: skip
    fixed = {"layer_types": ["linear_attention"] * layers, "num_experts": 0, "mlp_only_layers": [*range(layers)]}
    build = from_transformers(
        "Qwen3NextModel", "Qwen3NextConfig", names, num_attention_heads=2, num_key_value_heads=2, head_dim=8, **fixed
    )
    return build(config, "")


def transformer_encoder(config: Config, _attention: str) -> nn.Module:
    """torch.nn.TransformerEncoder with GELU."""
    layer = nn.TransformerEncoderLayer(
        config["hidden"], config["heads"], config["intermediate"], activation="gelu", batch_first=True
    )
    return nn.TransformerEncoder(layer, config["layers"], enable_nested_tensor=False)
