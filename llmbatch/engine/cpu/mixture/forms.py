"""How modules of transformers hold their experts: which matrices are where, and what a gate passes through.

Of most, matrices of gates and what they multiply stand one after the other, as linear layers have them. Those of
gpt-oss are turned, gates and what they multiply alternate, and each has a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch.nn import functional

from llmbatch.engine.weights.mapped import Expert
from llmbatch.kernels.spec import CLAMPED, GELU_TANH, SILU

_MATRICES: Final = ("gate_up_proj", "down_proj")
_BIASES: Final = ("gate_up_proj_bias", "down_proj_bias")
_LIMIT: Final = 7.0
_SLOPE: Final = 1.702


class ExpertForm(Protocol):
    """How some modules hold experts."""

    def holds(self, module: Any) -> bool:
        """Tell whether a module holds experts so, by its parameters."""
        ...

    def read(self, module: Any, expert: int) -> Expert:
        """Return an expert, whose matrices may be views."""
        ...

    def gate(self, module: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return what a module makes of sides that meet."""
        ...


class StackedExperts:
    """Matrices [experts, columns, width], the gate's first."""

    def holds(self, module: Any) -> bool:
        """Tell whether a module holds experts so, by its parameters."""
        sizes = _sizes(module, _MATRICES)
        if sizes is None or getattr(module, "act_fn", None) is None:
            return False
        joined, down = sizes
        return joined[1] == 2 * down[2] and joined[2] == down[1]

    def read(self, module: Any, expert: int) -> Expert:
        """Return an expert, whose matrices may be views."""
        gate, up = module.gate_up_proj[expert].chunk(2)
        return Expert(gate, up, module.down_proj[expert])

    def gate(self, module: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return what a module makes of sides that meet."""
        gated = getattr(module, "_apply_gate", None)  # some hold sides to a limit
        out: torch.Tensor = module.act_fn(gate) * up if gated is None else gated(torch.cat((gate, up), -1))
        return out


class AlternatingExperts:
    """Matrices [experts, width, columns], gates in even columns, with biases."""

    def holds(self, module: Any) -> bool:
        """Tell whether a module holds experts so, by its parameters."""
        sizes = _sizes(module, (*_MATRICES, *_BIASES))
        if sizes is None or getattr(module, "_apply_gate", None) is None:
            return False
        joined, down, *_ = sizes
        return joined[2] == 2 * down[1] and joined[1] == down[2]

    def read(self, module: Any, expert: int) -> Expert:
        """Return an expert, whose matrices may be views."""
        both, bias = module.gate_up_proj[expert].T, module.gate_up_proj_bias[expert]
        biases = bias[::2], bias[1::2], module.down_proj_bias[expert]
        return Expert(both[::2], both[1::2], module.down_proj[expert].T, biases)

    def gate(self, module: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return what a module makes of sides that meet."""
        out: torch.Tensor = module._apply_gate(torch.stack((gate, up), -1).flatten(-2))
        return out


FORMS: Final[tuple[ExpertForm, ...]] = (StackedExperts(), AlternatingExperts())


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=_LIMIT)
    return (up.clamp(-_LIMIT, _LIMIT) + 1) * gate * torch.sigmoid(_SLOPE * gate)


_ACTIVATIONS: Final[dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    SILU: lambda gate, up: functional.silu(gate) * up,
    GELU_TANH: lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    CLAMPED: _clamped,
}


def find_form(module: Any) -> tuple[ExpertForm, int] | None:
    """Find how a module holds its experts, and their activation; None if either is unknown."""
    form = next((form for form in FORMS if form.holds(module)), None)
    if form is None:
        return None
    sides = torch.cartesian_prod(*[torch.cat((torch.linspace(-6, 6, 51), torch.tensor([-40.0, 40.0])))] * 2)
    gate, up = sides.unbind(-1)  # far out too, where some are held to a limit
    found = form.gate(module, gate, up)
    for activation, compute in _ACTIVATIONS.items():
        if torch.allclose(found, compute(gate, up), atol=1e-5):
            return form, activation
    return None


def _sizes(module: Any, names: tuple[str, ...]) -> list[torch.Size] | None:
    """Return the shapes of matrices and biases of a module, None if it has other parameters than these."""
    found = dict(module.named_parameters())
    if set(found) != set(names) or any(found[name].ndim != 3 for name in _MATRICES):
        return None
    return [found[name].shape for name in names]
