"""Options that are one of a few names; the command line offers them without importing what acts on them."""

from __future__ import annotations

from typing import Literal, get_args

from llmbatch.policies import POLICIES as POLICIES
from llmbatch.policies import Policy as Policy

DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "triton", "flash-attn", "varlen"]
OverlapName = Literal["auto", "sequential", "interleaved", "partitioned"]
LoadFormat = Literal["auto", "dummy"]
EngineName = Literal["torch", "simulated"]
OnError = Literal["column", "raise"]
ChangedRows = Literal["refuse", "answer"]

ATTENTION: tuple[AttentionName, ...] = get_args(AttentionName)
OVERLAP: tuple[OverlapName, ...] = get_args(OverlapName)
DTYPES: tuple[DType, ...] = get_args(DType)
LOAD_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
CHANGED_ROWS: tuple[ChangedRows, ...] = get_args(ChangedRows)
ON_ERROR: tuple[OnError, ...] = get_args(OnError)
COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")  # of Parquet
