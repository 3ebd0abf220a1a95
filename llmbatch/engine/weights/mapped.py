"""The weights in a model's files as tensors whose memory is the file's, so that the system can let go of them.

Weights of another type than is computed in are converted one by one, into a file that is mapped in turn. Experts lie
in files one by one, and transformers would join them in memory: here a mixture gets tensors of zeros that take no
memory in their place, and each expert is read from its file when it is packed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open

from llmbatch.engine.weights.block_file import writing_to
from llmbatch.engine.weights.weight_files import weight_files
from llmbatch.errors import ModelError

_PART: Final = 1 << 22  # numbers that are converted at once
_EXPERT: Final = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
_NUMBER: Final = re.compile(r"layers\.(\d+)\.")
# Names of the gate's, the other input's and the output's matrix of an expert, as families have them.
_PARTS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ROLES: Final = {name: role for names in _PARTS for role, name in enumerate(names)}


class Expert(NamedTuple):
    """The matrices of an expert, and the bias of each, if it has such."""

    gate: torch.Tensor  # [inner, hidden]
    up: torch.Tensor  # likewise
    down: torch.Tensor  # [hidden, inner]
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)


def unreadable(folder: str, error: SafetensorError) -> ModelError:
    """Make the error of a model whose files are cut, or hold something else."""
    return ModelError(
        f"the weights in model folder {folder!r} must be whole, and a .safetensors file there cannot be read "
        f"({error}): copy or download it again"
    )


class MappedWeights:
    """The weights in a folder, in the type that is computed in."""

    def __init__(self, folder: Path, dtype: torch.dtype, scratch: Path) -> None:
        """Open the files. What must be converted is written to a file in `scratch`, which has no name there.

        Raises ModelError where the folder has no .safetensors files, or one that cannot be read.
        """
        files = weight_files(folder)
        if not files:
            raise ModelError(
                f"model folder {str(folder)!r} must hold .safetensors files where not all weights stay in memory: "
                "convert its weights, or take weights='resident' (--weights resident)"
            )
        self._dtype, self._scratch = dtype, scratch
        self._experts: dict[int, dict[tuple[int, int], torch.Tensor]] = {}  # by layer; by expert and role
        self.tensors: dict[str, torch.Tensor] = {}  # by the names of files; experts joined, as zeros
        for file in files:
            try:
                self._open(file)
            except SafetensorError as error:
                raise unreadable(str(folder), error) from error

    @property
    def has_experts(self) -> bool:
        """Whether experts lie apart."""
        return bool(self._experts)

    def expert(self, layer: int, expert: int) -> Expert:
        """Return the matrices of an expert."""
        gate, up, down = (self._experts[layer][expert, role].to(self._dtype) for role in range(3))
        return Expert(gate, up, down)

    def _open(self, file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_tensor(name)
                found = _EXPERT.fullmatch(name)
                if found is None or found["part"] not in _ROLES:
                    self.tensors[name] = self._converted(tensor)
                    continue
                number, role = _NUMBER.search(name), _ROLES[found["part"]]
                layer = self._experts.setdefault(int(number[1]) if number else 0, {})
                layer[int(found["expert"]), role] = tensor
                self._join(found["layer"], role, tensor, 1 + max(expert for expert, _ in layer))

    def _join(self, layer: str, role: int, tensor: torch.Tensor, count: int) -> None:
        """Let a layer's joined experts be zeros."""
        rows, columns = tensor.shape
        name, shape = ("down_proj", (rows, columns)) if role == 2 else ("gate_up_proj", (2 * rows, columns))
        before = self.tensors.get(f"{layer}.{name}")
        count = max(count, 0 if before is None else len(before))
        self.tensors[f"{layer}.{name}"] = torch.zeros((), dtype=self._dtype).expand(count, *shape)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        size = tensor.numel() * self._dtype.itemsize
        if size == 0:
            return tensor.to(self._dtype)
        with writing_to(self._scratch, "weights that are converted"):
            self._scratch.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._scratch) as file:  # its name goes, and its bytes stay mapped
                for rows in _in_parts(tensor.reshape(-1)):
                    file.write(rows.to(self._dtype).view(torch.uint8).numpy().data)
                file.flush()
                storage = torch.UntypedStorage.from_file(file.name, shared=False, nbytes=size)
        converted: Any = torch.empty(0, dtype=self._dtype)
        return cast(torch.Tensor, converted.set_(storage, 0, tensor.shape))


def _in_parts(values: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, len(values), _PART):
        yield values[start : start + _PART]
