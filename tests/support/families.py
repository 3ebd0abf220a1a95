"""The families of models that are tested, each with a tiny config; docs/models.md is written from this table.

Windows have 12 tokens and chunks 16, so that rows of some dozens of tokens leave them. Embeddings are not tied where a
tied random model would repeat its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PretrainedConfig

VOCABULARY = 260  # the 256 bytes, then <bos>, <eos>, <pad>, <sep>
BOS, EOS, PAD = 256, 257, 258
WINDOW, CHUNK = 12, 16
WHOLE = "attention, MLP, norms"  # a layer all of whose parts are replaced

_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.3,  # far from 0, so that the likeliest token is likeliest by a margin
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16}
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_key_value_heads": 6,
}  # fmt: skip  # arguments in groups
_LLAMA4 = {
    "head_dim": 16, "num_hidden_layers": 4, "attention_chunk_size": CHUNK, "num_local_experts": 4,
    "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 1, 0], "layer_types": [*["chunked_attention"] * 3, "full_attention"], "floor_scale": 8,
}  # fmt: skip  # arguments in groups
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
}  # fmt: skip  # arguments in groups
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip  # arguments in groups
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 16,
}
_IMAGES: dict[str, Any] = {
    "image_token_id": 259,
    "video_token_id": 255,
    "vision_start_token_id": 254,
    "vision_end_token_id": 253,
}


@dataclass(frozen=True, slots=True)
class Known:
    """A published model of a family: what its pages hold."""

    name: str
    layers: int
    heads: int  # of keys and values
    width: int  # of a head as pages hold it
    windows: int = 0  # layers that read a window or a chunk only


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models; `config` makes its tiny config."""

    models: str
    config: Callable[[], PretrainedConfig]
    known: Known | None = None
    tested: str = ""  # beside what is tested in every family
    fused: str = WHOLE  # parts of the tiny model that the processor's kernels replace
    norms_add_one: bool = False
    seed: int = 0  # of weights whose greedy answers have no tie

    @property
    def one_loop(self) -> bool:
        """Whether one compiled loop runs all layers on a processor."""
        return self.fused == WHOLE and "experts" not in self.tested


@dataclass(frozen=True, slots=True)
class Refused:
    """A family of models that is refused by its config or its modules; `config` makes a tiny config."""

    models: str
    config: Callable[[], PretrainedConfig]
    refusal: str  # what follows "model ... uses"


def _make(kind: str, *without: str, **fields: Any) -> Callable[[], PretrainedConfig]:
    """Return what makes a config of transformers' class, with the tiny sizes but for those that it has not."""
    sizes = {name: value for name, value in _TINY.items() if name not in without}
    return lambda: getattr(transformers, kind)(**{**sizes, **fields})


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=64)
_LONG = _rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[2.0, 2.3, 2.6, 2.9],
    original_max_position_embeddings=512,
)
_SECTIONS: dict[str, Any] = {"mrope_section": [1, 1, 2]}

TABLE: dict[str, Family] = {
    "llama": Family(
        "Llama 2",
        _make("LlamaConfig", head_dim=8, tie_word_embeddings=True),
        Known("Llama-2-7B", 32, 32, 128),
    ),
    "llama3": Family(
        "Llama 3",
        _make("LlamaConfig", head_dim=8, rope_parameters=_LLAMA3),
        Known("Llama-3.1-8B", 32, 8, 128),
        "rope of type llama3",
    ),
    "llama4": Family(
        "Llama 4",
        _make("Llama4TextConfig", "num_hidden_layers", **_LLAMA4),
        Known("Llama-4-Scout", 48, 8, 128, windows=36),
        "chunks, NoPE layers, queries scaled by position, experts",
        fused="MLP, norms",
    ),
    "llama4_images": Family(
        "Llama 4 with images",
        lambda: transformers.Llama4Config(
            text_config=TABLE["llama4"].config().to_dict(),
            vision_config={**_VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        ),
        tested="text alone",
        fused="MLP, norms",
    ),
    "qwen2": Family(
        "Qwen 2, Qwen 2.5",
        _make("Qwen2Config"),
        Known("Qwen2.5-7B", 28, 4, 128),
    ),
    "qwen2_window": Family(
        "Qwen 2 with windows",
        _make("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        tested="windows in layers from the second on",
    ),
    "qwen2_moe": Family(
        "Qwen 2 MoE",
        _make("Qwen2MoeConfig", **_EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=24),
        Known("Qwen2-57B-A14B", 28, 4, 128),
        "experts, a shared expert",
    ),
    "qwen2_vl": Family(
        "Qwen 2 VL",
        lambda: transformers.Qwen2VLConfig(
            text_config={**_TINY, "rope_parameters": _rope("default", **_SECTIONS)},
            vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2},
            **_IMAGES,
        ),
        tested="text alone",
    ),
    "qwen2_5_vl": Family(
        "Qwen 2.5 VL",
        lambda: transformers.Qwen2_5_VLConfig(
            text_config={**_TINY, "rope_parameters": _rope("default", **_SECTIONS)},
            vision_config=_QWEN_VISION,
            **_IMAGES,
        ),
        tested="text alone",
    ),
    "qwen3": Family(
        "Qwen 3",
        _make("Qwen3Config", head_dim=16),
        Known("Qwen3-8B", 36, 8, 128),
        "norms of queries and keys",
    ),
    "qwen3_moe": Family(
        "Qwen 3 MoE",
        _make("Qwen3MoeConfig", head_dim=16, **_EXPERTS, moe_intermediate_size=16, decoder_sparse_step=2),
        Known("Qwen3-30B-A3B", 48, 4, 128),
        "experts in every second layer",
        fused="attention, MLP in 2 of 3 layers, norms",
    ),
    "qwen3_vl": Family(
        "Qwen 3 VL",
        lambda: transformers.Qwen3VLConfig(
            text_config={**_TINY, "head_dim": 16, "rope_parameters": _rope("default", mrope_section=[2, 3, 3])},
            vision_config={**_QWEN_VISION, "deepstack_visual_indexes": [0]},
            **_IMAGES,
        ),
        tested="text alone",
    ),
    "mistral": Family(
        "Mistral",
        _make("MistralConfig", head_dim=16, sliding_window=WINDOW),
        Known("Mistral-7B-v0.1", 32, 8, 128, windows=32),
        "windows",
    ),
    "mistral3": Family(
        "Mistral 3 with images",
        lambda: transformers.Mistral3Config(
            text_config=_make("MistralConfig", head_dim=16)().to_dict(),
            vision_config={"model_type": "pixtral", **_VISION},
            image_token_index=259,
        ),
        tested="text alone",
    ),
    "ministral": Family(
        "Ministral",
        _make("MinistralConfig", head_dim=16, sliding_window=WINDOW, layer_types=_MIXED),
        Known("Ministral-8B", 36, 8, 128),
        "alternating windows",
    ),
    "ministral3": Family(
        "Ministral 3",
        _make("Ministral3Config", head_dim=16),
        tested="rope of type yarn, queries scaled by position",
        fused="MLP, norms",
    ),
    "mixtral": Family(
        "Mixtral",
        _make("MixtralConfig", **_LOCAL),
        Known("Mixtral-8x7B", 32, 8, 128),
        "experts",
        fused="attention, norms",
    ),
    "gemma": Family(
        "Gemma",
        _make("GemmaConfig", head_dim=16),
        Known("Gemma-7B", 28, 16, 256),
        norms_add_one=True,
    ),
    "gemma2": Family(
        "Gemma 2",
        _make(
            "Gemma2Config",
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=20.0,
        ),
        Known("Gemma-2-9B", 42, 8, 256, windows=21),
        "alternating windows, softcaps",
        norms_add_one=True,
    ),
    "gemma3": Family(
        "Gemma 3",
        _make("Gemma3TextConfig", head_dim=16, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=16),
        Known("Gemma-3-12B", 48, 8, 256, windows=40),
        "alternating windows, two ropes",
        norms_add_one=True,
    ),
    "gemma3_images": Family(
        "Gemma 3 with images",
        lambda: transformers.Gemma3Config(
            text_config=TABLE["gemma3"].config(),
            vision_config=_VISION,
            mm_tokens_per_image=4,
            image_token_index=259,
            boi_token_index=254,
            eoi_token_index=255,
            tie_word_embeddings=False,
        ),
        tested="text alone",
        norms_add_one=True,
    ),
    "gemma3n": Family(
        "Gemma 3n",
        _make(
            "Gemma3nTextConfig",
            "num_hidden_layers",
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            altup_num_inputs=2,
            laurel_rank=4,
            activation_sparsity_pattern=None,
        ),
        Known("Gemma-3n-E4B", 35, 2, 256, windows=28),
        "alternating windows, layers that share keys and values (each keeps its own copy)",
        fused="MLP, norms",
    ),
    "gemma4": Family(
        "Gemma 4",
        _make("Gemma4TextConfig", **_GEMMA4),
        tested="alternating windows, heads of two sizes",
        fused="MLP, norms",
    ),
    "phi": Family(
        "Phi 2",
        _make("PhiConfig"),
        Known("Phi-2", 32, 32, 80),
        "partial rope",
        fused="none",
    ),
    "phi3": Family(
        "Phi 3, Phi 4",
        _make("Phi3Config", sliding_window=WINDOW),
        Known("Phi-4", 40, 10, 128),
        "windows",
    ),
    "phi3_long": Family(
        "Phi 3 with long contexts, Phi 4 mini",
        _make(
            "Phi3Config",
            "hidden_size",
            hidden_size=64,
            num_attention_heads=4,
            partial_rotary_factor=0.5,
            original_max_position_embeddings=512,
            rope_parameters=_LONG,
        ),
        Known("Phi-4-mini", 32, 8, 128),
        "rope of type longrope within the original context, partial rope",
    ),
    "phimoe": Family(
        "Phi 3.5 MoE",
        _make("PhimoeConfig", **_LOCAL),
        Known("Phi-3.5-MoE", 32, 8, 128),
        "experts",
        fused="attention",
    ),
    "olmo": Family("OLMo", _make("OlmoConfig"), Known("OLMo-7B", 32, 32, 128), fused="attention, MLP"),
    "olmo2": Family(
        "OLMo 2",
        _make("Olmo2Config"),
        Known("OLMo-2-7B", 32, 32, 128),
        "norms of all queries together",
    ),
    "olmo3": Family(
        "OLMo 3",
        _make("Olmo3Config", sliding_window=WINDOW, layer_types=_MIXED),
        Known("OLMo-3-7B", 32, 32, 128, windows=24),
        "alternating windows",
    ),
    "olmoe": Family(
        "OLMoE",
        _make("OlmoeConfig", **_EXPERTS),
        Known("OLMoE-1B-7B", 16, 16, 128),
        "experts",
        fused="attention, norms",
    ),
    "granite": Family(
        "Granite",
        _make(
            "GraniteConfig",
            attention_multiplier=0.2,
            residual_multiplier=0.5,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
        ),
        Known("Granite-3.3-8B", 40, 8, 128),
        "multipliers",
    ),
    "granitemoe": Family(
        "Granite MoE",
        _make("GraniteMoeConfig", **_LOCAL),
        Known("Granite-3.0-3B-A800M", 32, 8, 64),
        "experts",
        fused="attention, norms",
    ),
    "granitemoeshared": Family(
        "Granite MoE with a shared expert",
        _make("GraniteMoeSharedConfig", **_LOCAL, shared_intermediate_size=16),
        tested="experts, a shared expert",
        fused="attention, norms",
    ),
    "granitemoehybrid": Family(
        "Granite 4 without Mamba layers",
        _make(
            "GraniteMoeHybridConfig",
            **_LOCAL,
            shared_intermediate_size=16,
            layer_types=["attention"] * 3,
            mamba_n_heads=12,
        ),
        tested="no rope at all, experts",
        fused="attention, norms",
    ),
    "smollm3": Family(
        "SmolLM3",
        _make("SmolLM3Config", no_rope_layers=[1, 0, 1]),
        Known("SmolLM3-3B", 36, 4, 128),
        "NoPE layers",
    ),
    "gpt_oss": Family(
        "gpt-oss",
        _make(
            "GptOssConfig",
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            **_LOCAL,
            rope_parameters=_rope("yarn", factor=8.0, truncate=False, original_max_position_embeddings=64),
        ),
        Known("gpt-oss-20b", 24, 8, 64, windows=12),
        "sinks, alternating windows, rope of type yarn, experts (MXFP4 is dequantised)",
        fused="attention, norms",
    ),
    "deepseek_v2": Family(
        "DeepSeek V2",
        _make("DeepseekV2Config", "num_key_value_heads", **_LATENT, **_ROUTED, **_GROUPS),
        Known("DeepSeek-V2-Lite", 27, 16, 192),
        "values narrower than keys, experts",
        fused="MLP, norms",
    ),
    "deepseek_v3": Family(
        "DeepSeek V3, R1",
        _make("DeepseekV3Config", "num_key_value_heads", **_LATENT, **_ROUTED, **_GROUPS),
        Known("DeepSeek-V3", 61, 128, 192),
        "values narrower than keys, experts in groups",
        fused="MLP, norms",
        seed=1,
    ),
    "minicpm3": Family(
        "MiniCPM3",
        _make("MiniCPM3Config", "num_key_value_heads", **_LATENT),
        Known("MiniCPM3-4B", 62, 40, 96),
        "values narrower than keys",
        fused="MLP, norms",
    ),
    "glm": Family(
        "GLM-4 (2024)",
        _make("GlmConfig", head_dim=16),
        Known("GLM-4-9B", 40, 2, 128),
        "partial rope",
        fused="MLP, norms",
    ),
    "glm4": Family(
        "GLM-4",
        _make("Glm4Config", head_dim=16),
        Known("GLM-4-9B-0414", 40, 2, 128),
        "partial rope",
        fused="MLP, norms",
    ),
    "glm4_moe": Family(
        "GLM-4.5, GLM-4.6",
        _make("Glm4MoeConfig", head_dim=16, **_ROUTED, first_k_dense_replace=1),
        Known("GLM-4.5-Air", 46, 8, 128),
        "partial rope, experts",
    ),
    "cohere": Family("Command R", _make("CohereConfig"), Known("Command-R-08-2024", 40, 8, 128), fused="MLP"),
    "cohere2": Family(
        "Command R7B, Command A",
        _make("Cohere2Config", sliding_window=WINDOW, layer_types=_MIXED),
        Known("Command-R7B", 32, 8, 128, windows=24),
        "alternating windows, NoPE layers",
        fused="attention in 1 of 3 layers, MLP",
    ),
    "starcoder2": Family(
        "StarCoder 2",
        _make("Starcoder2Config", sliding_window=WINDOW),
        Known("StarCoder2-7B", 32, 4, 128, windows=32),
        "windows",
        fused="attention",
    ),
    "hunyuan": Family(
        "Hunyuan",
        _make("HunYuanDenseV1Config", head_dim=16),
        Known("Hunyuan-7B", 32, 8, 128),
        "norms behind the rope",
        fused="MLP, norms",
    ),
    "hunyuan_moe": Family(
        "Hunyuan MoE",
        _make("HunYuanMoEV1Config", head_dim=16, num_experts=4, moe_topk=2),
        tested="experts",
        fused="MLP, norms",
    ),
    "ernie4_5": Family(
        "Ernie 4.5", _make("Ernie4_5Config", head_dim=16), Known("ERNIE-4.5-0.3B", 18, 2, 128), fused="MLP, norms"
    ),
    "ernie4_5_moe": Family(
        "Ernie 4.5 MoE",
        _make(
            "Ernie4_5_MoeConfig",
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=16,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=2,
        ),
        Known("ERNIE-4.5-21B-A3B", 28, 4, 128),
        "experts",
        fused="MLP, norms",
    ),
    "exaone4": Family(
        "EXAONE 4",
        _make("Exaone4Config", sliding_window=WINDOW, layer_types=_MIXED),
        Known("EXAONE-4.0-32B", 64, 8, 128, windows=48),
        "alternating windows, NoPE layers",
    ),
    "seed_oss": Family("Seed-OSS", _make("SeedOssConfig", head_dim=16), Known("Seed-OSS-36B", 64, 8, 128)),
    "apertus": Family(
        "Apertus", _make("ApertusConfig"), Known("Apertus-8B", 32, 8, 128), "xIELU", fused="attention, norms"
    ),
    "minimax_m2": Family(
        "MiniMax M2",
        _make("MiniMaxM2Config", head_dim=16, **_LOCAL),
        Known("MiniMax-M2", 62, 8, 128),
        "norms of all queries together, experts",
        fused="attention, norms",
    ),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia",
        _make("GPTNeoXConfig", "num_key_value_heads"),
        Known("GPT-NeoX-20B", 44, 64, 96),
        "partial rope",
        fused="none",
    ),
    "gpt2": Family(
        "GPT-2",
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=48,
            n_layer=3,
            n_head=6,
            n_positions=512,
            bos_token_id=BOS,
            eos_token_id=EOS,
            initializer_range=0.3,
            tie_word_embeddings=False,
        ),
        Known("GPT-2", 12, 12, 64),
        "learned positions",
        fused="none",
    ),
    "opt": Family(
        "OPT",
        lambda: transformers.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            ffn_dim=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            max_position_embeddings=512,
            word_embed_proj_dim=48,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            init_std=0.3,
            tie_word_embeddings=False,
        ),
        Known("OPT-6.7B", 32, 32, 128),
        "learned positions",
        fused="none",
    ),
    "linear": Family("rope of type linear", _make("LlamaConfig", rope_parameters=_rope("linear", factor=4.0))),
    "dynamic": Family("rope of type dynamic", _make("LlamaConfig", rope_parameters=_rope("dynamic", factor=2.0))),
    "yarn": Family("rope of type yarn", _make("LlamaConfig", rope_parameters=_YARN)),
    "proportional": Family(
        "rope of type proportional",
        _make("LlamaConfig", rope_parameters=_rope("proportional", partial_rotary_factor=0.5)),
    ),
}

_OTHER = "take another model, or transformers itself for this one"
_CLASS = "architectures are causal language models of transformers with pluggable attention"
_LAYERS = "layers are full_attention, sliding_attention, chunked_attention"
_SOFTMAX = "attention is causal softmax, with windows, chunks, softcap and sinks"

REFUSED: dict[str, Refused] = {
    "qwen3_next": Refused(
        "Qwen 3 Next, Qwen 3.5",
        _make("Qwen3NextConfig", head_dim=16, **_EXPERTS, layer_types=["linear_attention", *["full_attention"] * 2]),
        f"layers of type 'linear_attention', which is not supported: {_LAYERS}; {_OTHER}",
    ),
    "granite4": Refused(
        "Granite 4 with Mamba layers",
        _make(
            "GraniteMoeHybridConfig",
            **_LOCAL,
            shared_intermediate_size=16,
            layer_types=["mamba", *["attention"] * 2],
            mamba_n_heads=12,
        ),
        f"layers of type 'linear_attention', which is not supported: {_LAYERS}; {_OTHER}",
    ),
    "lfm2": Refused(
        "LFM 2",
        _make("Lfm2Config", layer_types=["conv", "full_attention", "full_attention"]),
        f"layers of type 'conv', which is not supported: {_LAYERS}; {_OTHER}",
    ),
    "nemotron": Refused(
        "Nemotron 3, 4",
        _make("NemotronConfig"),
        "the architecture 'nemotron', which is not supported: its layers must hand on the arguments of attention that "
        f"they do not know; {_OTHER}",
    ),
    "falcon": Refused(
        "Falcon",
        lambda: transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        f"the architecture 'falcon', which is not supported: {_CLASS}; {_OTHER}",
    ),
    "bloom": Refused(
        "BLOOM",
        lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        f"the architecture 'bloom', which is not supported: {_CLASS}; {_OTHER}",
    ),
    "stablelm": Refused(
        "StableLM",
        _make("StableLmConfig"),
        f"the architecture 'stablelm', which is not supported: {_CLASS}; {_OTHER}",
    ),
    "diffllama": Refused(
        "DiffLlama",
        _make("DiffLlamaConfig"),
        "layers that attend twice, which is not supported: each layer must attend once, as its layer_idx; " + _OTHER,
    ),
    "doge": Refused(
        "Doge",
        _make("DogeConfig"),
        f"attention with a mask of its own, which is not supported: {_SOFTMAX}; {_OTHER}",
    ),
    "t5": Refused(
        "T5 and other encoder-decoders",
        lambda: transformers.T5Config(num_layers=1),
        f"an encoder and a decoder, which is not supported: models are decoders; {_OTHER}",
    ),
}
