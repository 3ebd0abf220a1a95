"""Loops that advance a scheduler on an engine: step by step, pipelined, held between two layers, or by the clock.

Must not import what plans, nor anything that makes engines.
Start reading at `step_loop`.
"""

__all__ = ["interrupted_loop", "pipelined_loop", "simulated_loop", "step_loop"]
