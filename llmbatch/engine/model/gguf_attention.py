"""Reads from a GGUF file what its model's attention needs to know and transformers passes over.

How rope is scaled: metadata name a type, `linear` or `yarn`, and its factor. The tensor `rope_freqs` has a divisor for
each frequency, as Llama 3.1 needs them; a config says that as rope of type longrope whose short and long factors are
these. How many numbers of a head rope turns, where it is not all of them. And the window of Phi 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from llmbatch.engine.model.refusals import unsupported
from llmbatch.errors import ModelError

_SUPPORTED: Final = "rope of GGUF files is scaled as linear or yarn by a factor, or by a tensor rope_freqs"
_WAY_OUT: Final = "take the same model's folder of .safetensors files"
_PARTIAL: Final = ("phi3",)  # types of models whose rope heeds `partial_rotary_factor`
_TURNED: Final = "rope.dimension_count"
_DIVISORS: Final = "rope_freqs.weight"
_OTHERS: Final = ("rope_factors_long.weight", "rope_factors_short.weight")
_WITHOUT_EFFECT: Final = {  # metadata of scaled rope, by what makes no difference; None: whatever they are
    "finetuned": None,
    "original_context_length": None,  # but for yarn
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
}
_YARN: Final = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def read_attention(file: Path, reader: Any, config: PretrainedConfig) -> None:
    """Give the config of a GGUF file's model the rope and the window that the file tells of, if it does.

    Where layers differ, the rope of full attention is read. Raises ModelError where rope is of another kind.
    """
    text: Any = config.get_text_config()
    if text.model_type == "phi3":
        text.sliding_window = _metadata(reader, "attention.sliding_window") or None  # 0 says that it has none
    by_metadata, by_divisors = _by_metadata(file, reader), _by_divisors(file, reader, text)
    if by_metadata and by_divisors:
        raise _refused(file, f"by metadata as {by_metadata['rope_type']}, and by the tensor {_DIVISORS}")
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return
    kinds = {"": parameters} if "rope_theta" in parameters else parameters
    layers = "full_attention" if "full_attention" in kinds else ""
    if kinds[layers]["rope_type"] == "default":  # otherwise transformers knows more of it
        kinds[layers] = {**kinds[layers], **(by_metadata or by_divisors), **_turned(file, reader, text)}
        text.rope_parameters = kinds if layers else kinds[layers]


def _metadata(reader: Any, key: str) -> Any:
    """Read what a file says of its architecture, or None."""
    field = reader.fields.get(f"{reader.fields['general.architecture'].contents()}.{key}")
    return None if field is None else field.contents()


def _turned(file: Path, reader: Any, text: Any) -> dict[str, Any]:
    """Read which part of a head rope turns, as a parameter of a config; empty where transformers knows it."""
    turned = _metadata(reader, _TURNED)
    size = _metadata(reader, "attention.key_length") or text.hidden_size // text.num_attention_heads
    known: Any = GGUF_CONFIG_MAPPING.get(text.model_type, {})
    if turned is None or turned >= size or known.get(_TURNED) is not None:
        return {}
    if text.model_type not in _PARTIAL:
        part = f"rope of a part of each head ({text.model_type}.{_TURNED} = {turned} of {size})"
        raise unsupported(str(file), part, f"such GGUF files are of {', '.join(_PARTIAL)}", _WAY_OUT)
    return {"partial_rotary_factor": turned / size}


def _by_metadata(file: Path, reader: Any) -> dict[str, Any]:
    """Read what metadata say, as parameters of a config; empty where nothing is scaled."""
    begin = f"{reader.fields['general.architecture'].contents()}.rope.scaling."
    given = {key.removeprefix(begin): field.contents() for key, field in reader.fields.items() if key.startswith(begin)}
    kind, factor = given.pop("type", "none"), given.pop("factor", None)
    parameters: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        parameters |= {name: given.pop(key) for key, name in _YARN.items() if key in given}
    for name, value in given.items():
        if name not in _WITHOUT_EFFECT or _WITHOUT_EFFECT[name] not in (None, value):
            raise _refused(file, f"{begin}{name} = {value}")
    if kind not in ("none", "linear", "yarn"):
        raise _refused(file, f"{begin}type = {kind}")
    if kind != "none" and not factor:
        raise _refused(file, f"{begin}type = {kind} without {begin}factor")
    if kind == "yarn" and "original_max_position_embeddings" not in parameters:
        raise _refused(file, f"{begin}type = {kind} without {begin}original_context_length")
    return {} if kind == "none" or factor == 1.0 else parameters


def _by_divisors(file: Path, reader: Any, text: Any) -> dict[str, Any]:
    """Read what tensors say, as parameters of a config; empty where nothing is scaled."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in _OTHERS:
        if name in tensors:
            raise _refused(file, f"the tensor {name}")
    if _DIVISORS not in tensors:
        return {}
    divisors = [float(value) for value in tensors[_DIVISORS].data]
    if all(value == 1.0 for value in divisors):
        return {}
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": text.max_position_embeddings,
    }


def _refused(file: Path, part: str) -> ModelError:
    return unsupported(str(file), f"scaled rope ({part})", _SUPPORTED, _WAY_OUT)
