"""The files of a model: a local folder, a GGUF file converted once, or a name on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Final

from llmbatch.engine.model.digests import digest, digests, state_of
from llmbatch.errors import ModelError
from llmbatch.system.cache import cache_folder
from llmbatch.system.processes import start_beside

ModelFiles = tuple[tuple[str, list[int]], ...]  # of each its name, and metadata that changes with it

_HUB_SECONDS: Final = 8.0
_CONVERSION: Final = 3  # of GGUF files: another number where a file gives another folder than before
_METADATA: Final = ["*.json", "*.txt", "*.jinja", "*.model", "*.py"]
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
_MADE_OF: Final = ("config.json", "*.py", "*.index.json", *_WEIGHTS)


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
    target = cache_folder() / "gguf" / f"{file.stem}-{_identity(file)}-{_CONVERSION}"
    if target.is_dir():
        return target
    if find_spec("gguf") is None:
        raise ModelError(f"reading {file.name} needs the package gguf: pip install gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with start_beside("llmbatch.engine.model.gguf_files", str(file), str(target), stdout=PIPE) as process:
        meanwhile()
        output = process.communicate()[0].decode(errors="replace").strip()
    if not target.is_dir():
        raise ModelError(output or f"GGUF file {str(file)!r} cannot be read: its conversion was ended")
    return target


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
