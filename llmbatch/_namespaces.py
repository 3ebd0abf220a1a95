"""Registers `df.llm` with Polars and pandas and a model with lm-evaluation-harness, and imports none of them.

Where one of them is there already it is done at once. For the others a finder goes before all others of
`sys.meta_path`. It finds nothing itself: it lets the others find the library, and registers when that has been run.

The command `lm_eval` does not import llmbatch, and has no entry points. It does import torch, which loads those of
the group "torch.backends": ours is `loaded`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

# In `llmbatch.operators.namespaces`. The harness takes its own models to be registered where there is one at all.
_REGISTERS: Final = {
    "polars": "register_polars",
    "pandas": "register_pandas",
    "lm_eval.models": "register_harness_model",
}


class NamespaceRegistrar(MetaPathFinder):
    """A finder that waits for libraries to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that other finders have for a library that is waited for."""
        if fullname not in _REGISTERS:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, fullname)
        return spec


def watch_libraries() -> None:
    """Register with the libraries that are imported, and with the others as soon as they are."""
    for name in _REGISTERS:
        if name in sys.modules:
            _register(name)
    if not any(isinstance(finder, NamespaceRegistrar) for finder in sys.meta_path):
        sys.meta_path.insert(0, NamespaceRegistrar())


def loaded() -> None:
    """Do nothing: to find this function, torch has imported llmbatch, and that is enough."""


def _run_after(loader: Any, name: str) -> None:
    """Have a loader, which is that of one module, register after it has executed it."""
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        _register(name)

    loader.exec_module = execute_and_register


def _register(name: str) -> None:
    getattr(import_module("llmbatch.operators.namespaces"), _REGISTERS[name])()
