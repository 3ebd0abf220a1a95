"""What a command is given: rows, or lines of an OpenAI batch, which say themselves what is asked; and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmbatch.arguments import Paths, check_names, check_storage_options, flag, paths_of
from llmbatch.choices import OutputFormat
from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.io.reading.dataset import Dataset
from llmbatch.jobs.options import DatasetArgs
from llmbatch.openai.answers import FORM
from llmbatch.openai.requests import BODY, TEXTS, BatchLines
from llmbatch.simulation.splits import Offer, Offered, host_of

_PROMPTS = ("prompt", "template", "messages", "turns")  # of which rows need one


@dataclass(frozen=True, slots=True)
class Command:
    """Options of answers, and the input that they are asked of."""

    options: Options
    paths: list[str]
    source: Dataset
    storage_options: Mapping[str, Any] | None

    @classmethod
    def read(cls, inputs: Paths, given: Mapping[str, Any]) -> Command:
        """Find the input of options such as `DatasetArgs`. Raises InputError.

        With none of prompt, template and messages it must be a batch.
        """
        check_names(given, DatasetArgs.__annotations__)
        rest = {**given}
        storage_options = rest.pop("storage_options", None)
        has_prompts = any(rest.get(name) is not None for name in _PROMPTS)
        options = Options.build(**rest) if has_prompts else Options.of_batch(**rest)
        paths = paths_of(inputs)
        check_storage_options(storage_options)
        kept: dict[str, Any] = {} if has_prompts else {"json_columns": (BODY,), "text_columns": TEXTS}
        source = Dataset.resolve(paths, storage_options, **kept)
        if not has_prompts:
            options.source.check(source.schema)
        return cls(options, paths, source, storage_options)

    @property
    def is_batch(self) -> bool:
        """Whether the input is lines of a batch."""
        return isinstance(self.options.source, BatchLines)

    def form(self, asked: OutputFormat, output: str) -> str | None:
        """Return the form of an output (`LineForm`), or None for rows with columns. Raises ParameterError."""
        as_lines = output.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst"))
        if asked == "openai" and not (self.is_batch and (as_lines or output.endswith(".parquet"))):
            what = "an output that is a folder" if self.is_batch else "rows that are no OpenAI batch"
            raise ParameterError(
                f"output_format must be 'columns' for {what}, got 'openai'", option="output_format", value=asked
            )
        return FORM if asked == "openai" or (asked == "auto" and self.is_batch and as_lines) else None


def offered_of(
    *,
    search: bool = False,
    devices: Mapping[str, int] | None = None,
    price: Mapping[str, float] | None = None,
    device_host: Mapping[str, float] | None = None,
) -> Offered | None:
    """Read what is offered for a search; None where none is asked for. Raises ParameterError."""
    if not flag("search", search):
        for name, value in (("devices", devices), ("price", price), ("device_host", device_host)):
            if value:
                raise ParameterError(f"{name} must be given with search: add search=True (--search)", option=name)
        return None
    if not devices:
        raise ParameterError(
            "devices must be given with search, got none: name them, as in {'h100': 8} (--devices h100:8)",
            option="devices",
        )
    return Offered(Offer.all_of(devices, price), None if device_host is None else host_of(device_host))
