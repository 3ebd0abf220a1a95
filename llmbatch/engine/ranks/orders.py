"""What all ranks of an engine are told: of the model that they share, and then of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from llmbatch.choices import DType, KVDType, LoadFormat
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.model.checkpoints import ModelFiles
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.loader import LoadedModel, changed_files, load_model
from llmbatch.engine.model.platform import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrders:
    """A model, of which every rank loads its share."""

    ranks: int
    folder: str
    dtype: DType
    kv_cache_dtype: KVDType
    load_format: LoadFormat
    trust_remote_code: bool
    context_length: int

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> RankOrders:
        """Order what the first rank, in this process, was asked for."""
        dtype = model.layer_type or str(model.dtype).removeprefix("torch.")
        return cls(
            ranks=config.tensor_parallel,
            folder=model.folder,
            dtype=dtype,  # type: ignore[arg-type]  # torch has names for more types
            kv_cache_dtype=config.kv_cache_dtype,
            load_format=config.load_format,
            trust_remote_code=config.trust_remote_code,
            context_length=model.context_length,
        )

    def load(self, platform: Platform) -> LoadedModel:
        """Load a rank's share: that of the platform."""
        return load_model(
            self.folder,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            load_format=self.load_format,
            trust_remote_code=self.trust_remote_code,
            context_length=self.context_length,
            platform=platform,
        )

    def check_files(self, loaded: LoadedModel, files: ModelFiles) -> None:
        """Raise ModelError where a rank has loaded other files than the first one."""
        if loaded.files != files:
            raise changed_files(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrders:
    """Pages for keys and values as every rank has them, and the files that the first one has loaded."""

    files: ModelFiles
    num_pages: int
    window_pages: int
    page_size: int
