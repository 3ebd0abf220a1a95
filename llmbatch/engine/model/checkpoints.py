"""The files of a model: a local folder, a GGUF file converted once, or a name on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final

from llmbatch.engine.model.digests import digest, digests, state_of
from llmbatch.errors import ModelError
from llmbatch.system.cache import cache_folder
from llmbatch.system.processes import start_beside

ModelFiles = tuple[tuple[str, list[int]], ...]  # of each its name, and metadata that changes with it

_HUB_SECONDS: Final = 8.0
_METADATA: Final = ["*.json", "*.txt", "*.jinja", "*.model", "*.py"]
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
_MADE_OF: Final = ("config.json", "*.py", "*.index.json", *_WEIGHTS)
# Types of tensors that the package gguf makes float; docs/models.md lists them.
_GGUF_TYPES: Final = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip  # a table


def resolve_model(model: str, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Find the local folder with `model`'s config, weights and tokenizer. Calls `meanwhile` while it is made.

    `model` is a folder, a `.gguf` file or a folder with one (converted once, kept in `cache_folder()`), or the name of
    a model on the hub, taken from the local hub cache if it is complete. Raises ModelError if it is none of these, or
    cannot be fetched (raised within ten seconds), or a GGUF file cannot be converted.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"model must be a folder, a .gguf file or a hub name, got the file {model!r}: name its folder"
            )
        return str(_converted(path, meanwhile))
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return str(_converted(files[0], meanwhile))
        if files:
            names = ", ".join(file.name for file in files)
            raise ModelError(f"model folder {model!r} holds several GGUF files ({names}): name one of them")
        raise ModelError(
            f"model folder {model!r} holds neither config.json nor a .gguf file: name a folder that "
            "save_pretrained wrote"
        )
    if path.suffix == ".gguf":
        raise ModelError(f"model file {model!r} is not there: check its path")
    return _fetched(model)


def has_weights(folder: Path) -> bool:
    """Tell whether a folder holds weights that transformers reads."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def model_digest(folder: str) -> str:
    """Digest the contents of a model's folder: each file by its name and its whole content."""
    files = _files(folder)
    named = zip(files, digests(files, cache_folder()), strict=True)
    listed = "".join(f"{file.name} {content}\n" for file, content in named)
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def files_as_they_are(folder: str) -> ModelFiles:
    """Return the files that a model is made of as they are now; it reads none."""
    made_of = [file for pattern in _MADE_OF for file in sorted(Path(folder).glob(pattern))]
    with contextlib.suppress(FileNotFoundError):  # one has just gone: so they are others than before
        return tuple((file.name, state_of(file)) for file in made_of)
    return ()


def _files(folder: str) -> list[Path]:
    return sorted({file for pattern in (*_METADATA, *_WEIGHTS) for file in Path(folder).glob(pattern)})


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars of its own."""
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _identity(file: Path) -> str:
    """Identify a file's whole content."""
    return digest(file, cache_folder())[:16]


def _converted(file: Path, meanwhile: Callable[[], None]) -> Path:
    target = cache_folder() / "gguf" / f"{file.stem}-{_identity(file)}"
    if target.is_dir():
        return target
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading {file.name} needs the package{'s' * (len(missing) > 1)} {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with start_beside("llmbatch.engine.model.checkpoints", str(file.resolve()), str(target), stdout=PIPE) as process:
        meanwhile()
        output = process.communicate()[0].decode(errors="replace").strip()
    if not target.is_dir():
        raise ModelError(f"GGUF file {str(file)!r} cannot be read: {output or 'its conversion was ended'}")
    return target


def main(source: str, target: str) -> None:
    """Convert a GGUF file, or print why not. One process converts at a time; the others wait, and find it done."""
    file, folder = Path(source), Path(target)
    lock = folder.with_name(f".{folder.name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as work:
            try:
                if not folder.is_dir():
                    _convert(file, Path(work) / "model")
                    os.rename(Path(work) / "model", folder)
            except Exception as error:  # the readers of GGUF raise whatever a broken file leads them to
                sys.stdout.write(str(error))
            finally:
                lock.unlink(missing_ok=True)


def _convert(file: Path, target: Path) -> None:
    """Write a GGUF file as a transformers folder, in bfloat16 if that loses nothing, else in float32.

    Runs in a process of its own. transformers reads all metadata of the file for each of config, weights and tokenizer,
    and makes the map of names again for each module, which takes ten of twelve seconds. Here each is made once.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    with no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):  # one bar knows no switch
        types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(str(file)).tensors}
        if types - set(_GGUF_TYPES):
            raise ModelError(
                f"its tensors of type {', '.join(sorted(types - set(_GGUF_TYPES)))} are not supported: types are "
                f"{', '.join(_GGUF_TYPES)}; take another file of the same model"
            )
        source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        if all(torch.equal(weight.bfloat16().float(), weight) for weight in model.parameters()):
            model = model.bfloat16()
        model.config.quantization_config = None
        del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    assert has_weights(target)
    assert (target / "config.json").is_file()


def _fetched(model: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(model, local_files_only=True))
        if (cached / "config.json").is_file() and has_weights(cached):
            return str(cached)
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise ModelError(
            f"model must be a folder, a .gguf file or a name on the hub, got {model!r}: check its spelling"
        ) from error
    try:
        files = _hub_files(model)
        weights = _WEIGHTS[0] if any(name.endswith(".safetensors") for name in files) else _WEIGHTS[1]
        return snapshot_download(model, allow_patterns=[*_METADATA, weights], etag_timeout=_HUB_SECONDS)
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(
            f"model {model!r} is no folder here and cannot be fetched: {reason.rstrip('.')}: "
            "name a local folder, or try again with a network"
        ) from error


def _hub_files(model: str) -> list[str]:
    """List a hub model's files; TimeoutError if the hub does not answer in time, retries included."""
    from huggingface_hub import HfApi

    answer: list[list[str]] = []
    failure: list[Exception] = []

    def ask() -> None:
        try:
            info = HfApi().model_info(model, timeout=_HUB_SECONDS / 2)
            answer.append([sibling.rfilename for sibling in info.siblings or []])
        except Exception as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError(f"the hub did not answer in {_HUB_SECONDS:.0f} seconds.")
    return answer[0]
