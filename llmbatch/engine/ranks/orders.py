"""What all ranks of an engine are told of the model that they share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmbatch.choices import DType, KVDType, LoadFormat
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.model.checkpoints import ModelFiles
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.loader import LoadedModel, changed_files, load_model
from llmbatch.engine.model.platform import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrders:
    """A model, and the pages for its keys and values, as every rank has them."""

    ranks: int
    parent: int  # the process of the first rank
    folder: str
    dtype: DType
    kv_cache_dtype: KVDType
    load_format: LoadFormat
    trust_remote_code: bool
    context_length: int
    files: ModelFiles  # as the first rank has loaded them
    num_pages: int = 0  # known once an engine is built
    window_pages: int = 0
    page_size: int = 0

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, files: ModelFiles) -> RankOrders:
        """Order what the first rank, in this process, was asked for; it has loaded these files."""
        dtype = model.layer_type or str(model.dtype).removeprefix("torch.")
        return cls(
            ranks=config.tensor_parallel,
            parent=os.getpid(),
            folder=model.folder,
            dtype=dtype,  # type: ignore[arg-type]  # torch has names for more types
            kv_cache_dtype=config.kv_cache_dtype,
            load_format=config.load_format,
            trust_remote_code=config.trust_remote_code,
            context_length=model.context_length,
            files=files,
        )

    def with_pages(self, pages: Mapping[str, Any]) -> RankOrders:
        """Return the orders with the pages of an engine, by the names of these fields."""
        return replace(self, **pages)

    def load(self, platform: Platform) -> LoadedModel:
        """Load a rank's share: that of the platform. Raises ModelError where files have changed meanwhile."""
        loaded = load_model(
            self.folder,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            load_format=self.load_format,
            trust_remote_code=self.trust_remote_code,
            context_length=self.context_length,
            platform=platform,
        )
        if loaded.files != self.files:
            raise changed_files(self.folder)
        return loaded
