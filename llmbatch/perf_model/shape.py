"""What a model costs by its shape: parameters, attention width, KV bytes; read off a transformers config, or by name.

Configs are read duck-typed, since model families name and omit fields as they like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from llmbatch.errors import ModelError, ParameterError

# Decoder families whose feed-forward has two matrices, not the gated three.
UNGATED: Final = frozenset(
    {"apertus", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2"}
)

# Names of a field in one family's configs and another's.
_HIDDEN: Final = ("hidden_size", "n_embd")
_LAYERS: Final = ("num_hidden_layers", "n_layer")
_BY_LAYER: Final = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")  # may be lists
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def read_field(config: object, *names: str, default: Any = None) -> Any:
    """Return the first of the named fields that the config has and that is not None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def count_sparse_layers(config: object, layers: int) -> int:
    """Count how many layers route to experts."""
    routing = read_field(config, "moe_layers")  # Llama 4 lists them
    if routing is not None:
        return len(routing)
    dense = set(read_field(config, "mlp_only_layers", default=()))
    dense.update(range(int(read_field(config, "first_k_dense_replace", default=0))))
    every = int(read_field(config, "decoder_sparse_step", default=1))
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % every == 0)


def read_windows(config: object, layers: int) -> tuple[int, ...]:
    """Return the tokens that each layer looks back, [layers]; 0: all."""
    window = read_field(config, "sliding_window", default=0)
    if not read_field(config, "use_sliding_window", default=True):
        window = 0
    types = read_field(config, "layer_types")
    if types is None:
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in types)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The cost of a model: parameters, attention width and KV bytes."""

    params: float  # active per computed token
    head_params: float = 0.0  # further ones per sampled token
    params_total: float
    weight_bytes: float
    layers: int
    hidden_size: int
    attention_width: float  # query heads x head size; the mean of key and value sizes where they differ
    kv_bytes_per_token: float  # all layers
    windows: tuple[int, ...]  # [layers] tokens a layer looks back; 0: all
    vocabulary: int
    experts: int = 0  # of a layer that routes to them; 0: every token passes all matrices
    experts_chosen: int = 0  # by a token
    expert_bytes: float = 0.0  # of `weight_bytes`, of all layers' experts
    expert_params: float = 0.0  # of `params_total`, of all layers' experts
    bytes_around: float = 0.0  # of `weight_bytes`, of what is not a matrix of a layer: embeddings, head, norms
    head_bytes: float = 0.0  # of the LM head, or of the embedding that it is tied to

    def __post_init__(self) -> None:
        if len(self.windows) != self.layers:
            raise ParameterError(f"windows must be one for each of {self.layers} layers, got {len(self.windows)}")

    @classmethod
    def from_config(cls, config: object, dtype_bytes: float, layer_bytes: float | None = None) -> ModelShape:
        """Read the shape off a transformers config (its `text_config` if it has one), duck-typed.

        `params` are the matrices that every token passes: projections, feed-forward, and with experts the router, the
        shared and the chosen ones. `dtype_bytes` is the size of a number of weights and KV, and `layer_bytes` of one in
        the layers' matrices, if it is another. Raises `ModelError` if a needed field is missing.
        """
        text = getattr(config, "text_config", None) or config
        hidden, layers, vocabulary = _need(text, *_HIDDEN), _need(text, *_LAYERS), _need(text, "vocab_size")
        each = configs_of_layers(text)
        attention, width, kv_width = (_mean(numbers) for numbers in zip(*map(_count_attention, each), strict=True))
        sparse, dense, routed = (_mean(numbers) for numbers in zip(*map(_count_feed_forward, each), strict=True))
        experts = int(read_field(text, *_EXPERTS, default=0))
        routing = count_sparse_layers(text, layers) if experts else 0
        chosen = _need(text, "num_experts_per_tok", "top_k_experts") if experts else 0
        apart = routing * experts * routed  # in experts
        always = layers * attention + (layers - routing) * dense + routing * sparse
        embedding = vocabulary * hidden
        text_tied = read_field(text, "tie_word_embeddings", default=True)
        tied = bool(read_field(config, "tie_word_embeddings", default=text_tied))  # that of all decides, where both say
        rest = embedding * (1 if tied else 2) + (2 * layers + 1) * hidden
        size = layer_bytes or dtype_bytes
        return cls(
            params=float(always + routing * chosen * routed),
            head_params=float(embedding),
            params_total=float(always + apart + rest),
            weight_bytes=(always + apart) * size + rest * dtype_bytes,
            layers=layers,
            hidden_size=hidden,
            attention_width=width,
            kv_bytes_per_token=kv_width * layers * dtype_bytes,
            windows=read_windows(text, layers),
            vocabulary=vocabulary,
            experts=experts,
            experts_chosen=chosen,
            expert_bytes=apart * size,
            expert_params=float(apart),
            bytes_around=rest * dtype_bytes,
            head_bytes=embedding * dtype_bytes,
        )


def configs_of_layers(config: Any) -> list[_Layer]:
    """List the config of each layer: transformers keeps one for each, or lists in one, where layers differ."""
    layers = _need(config, *_LAYERS)
    own = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * layers
    return [_Layer(each, number) for number, each in enumerate(own)]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's own config: where the model's has a list with an element a layer, it has the layer's."""

    config: object
    number: int

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.config, name)
        return value[self.number] if isinstance(value, list | tuple) and name in _BY_LAYER else value


def _mean(numbers: Sequence[float]) -> float:
    """Return the mean over layers, which is exact where they are alike."""
    return numbers[0] if len(set(numbers)) == 1 else sum(numbers) / len(numbers)


def _need(config: object, *names: str) -> int:
    """Return the first of the named fields that the config has. Raises `ModelError` if it has none of them."""
    value = read_field(config, *names)
    if value is None:
        name = read_field(config, "model_type", default="the model")
        raise ModelError(f"a model's config must give {names[0]}, but that of {name} does not")
    return int(value)


def _count_attention(config: object) -> tuple[int, float, float]:
    """Count a layer's parameters of projections, its attention width, and the numbers of KV of a token."""
    hidden, heads = _need(config, *_HIDDEN), _need(config, "num_attention_heads", "n_head")
    latent = read_field(config, "kv_lora_rank")
    if latent is None:
        kv_heads = int(read_field(config, "num_key_value_heads", default=heads))
        head = int(read_field(config, "head_dim", default=hidden // heads))
        return hidden * heads * head * 2 + hidden * 2 * kv_heads * head, float(heads * head), 2.0 * kv_heads * head
    # Multi-head latent attention: keys and values are read from one latent vector and a rotary part.
    rope, plain, value = (_need(config, field) for field in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query, queries = read_field(config, "q_lora_rank"), heads * (rope + plain)
    params = hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
    params += hidden * query + query * queries if query else hidden * queries
    return params, heads * (rope + plain + value) / 2, float(latent + rope)


def _count_feed_forward(config: object) -> tuple[int, int, int]:
    """Count what every token passes in a layer that routes and in one that does not, and an expert's parameters."""
    hidden = _need(config, *_HIDDEN)
    matrices = 2 if read_field(config, "model_type", default="") in UNGATED else 3
    inner = int(read_field(config, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden))
    expert = matrices * hidden * int(read_field(config, "moe_intermediate_size", default=inner))
    inner = int(read_field(config, "intermediate_size_mlp", default=inner))  # Llama 4: of layers that do not route
    shared = matrices * hidden * int(read_field(config, "shared_expert_intermediate_size", default=0))
    always = 1 if read_field(config, "moe_layers") is not None else 0  # Llama 4 shares one expert, and does not say so
    shared += expert * int(read_field(config, "n_shared_experts", default=always))
    router = hidden * int(read_field(config, *_EXPERTS, default=0))
    return shared + router, matrices * hidden * inner, expert


def _named(params: float, layers: int, heads: int, kv_heads: int, head: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        params=params,
        params_total=params,
        weight_bytes=2 * params,
        layers=layers,
        hidden_size=heads * head,
        attention_width=float(heads * head),
        kv_bytes_per_token=2.0 * kv_heads * head * layers * 2,
        windows=(0,) * layers,
        vocabulary=vocabulary,
    )


def _mixture(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int, experts: int, chosen: int,
    *, layer_bytes: float = 2.0, **more: int,
) -> ModelShape:  # fmt: skip  # arguments in groups
    config = SimpleNamespace(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, vocab_size=vocabulary, num_experts=experts, num_experts_per_tok=chosen,
        tie_word_embeddings=False, **more,
    )  # fmt: skip  # arguments in groups
    return ModelShape.from_config(config, 2.0, layer_bytes)


# DeepSeek-V3's attention and experts, which Kimi-K2 has too.
_DEEPSEEK: Final = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_shared_experts": 1, "moe_intermediate_size": 2048,
}  # fmt: skip  # a table

# Models of the papers, in 2-byte weights and KV; matrices of DeepSeek-R1 and Kimi-K2 have 1 byte a number, as they are
# published.
SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3-8b": _named(8.03e9, 32, 32, 8, 128, 128256),
        "llama-3-70b": _named(70.6e9, 80, 64, 8, 128, 128256),
        "llama-2-7b": _named(6.74e9, 32, 32, 32, 128, 32000),
        "qwen-2.5-7b": _named(7.62e9, 28, 28, 4, 128, 152064),
        "qwen-2.5-72b": _named(72.7e9, 80, 64, 8, 128, 152064),
        "deepseek-67b": _named(67.4e9, 95, 64, 8, 128, 102400),
        "mistral-7b": _named(7.25e9, 32, 32, 8, 128, 32768),
        "opt-13b": _named(12.85e9, 40, 40, 40, 128, 50272),
        "smollm2-135m": _named(134.5e6, 30, 9, 3, 64, 49152),
        "mixtral-8x7b": _mixture(4096, 32, 32, 8, 14336, 32000, 8, 2),
        "mixtral-8x22b": _mixture(6144, 56, 48, 8, 16384, 32768, 8, 2),
        "qwen3-30b-a3b": _mixture(2048, 48, 32, 4, 6144, 151936, 128, 8, head_dim=128, moe_intermediate_size=768),
        "qwen3-235b-a22b": _mixture(4096, 94, 64, 4, 12288, 151936, 128, 8, head_dim=128, moe_intermediate_size=1536),
        "deepseek-r1": _mixture(
            7168, 61, 128, 128, 18432, 129280, 256, 8, layer_bytes=1.0, first_k_dense_replace=3, **_DEEPSEEK
        ),
        "kimi-k2": _mixture(
            7168, 61, 64, 64, 18432, 163840, 384, 8, layer_bytes=1.0, first_k_dense_replace=1, **_DEEPSEEK
        ),
    }
)


def find_shape(name: str) -> ModelShape:
    """Find the shape of that name (see `SHAPES`), in any case. Raises `ParameterError` for an unknown one.

    >>> find_shape("Llama-3-8B").kv_bytes_per_token
    131072.0
    """
    found = SHAPES.get(name.lower())
    if found is None:
        raise ParameterError(f"model_shape must be one of {', '.join(SHAPES)}, got {name!r}")
    return found
