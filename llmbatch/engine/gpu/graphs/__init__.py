"""Records small steps as CUDA graphs before a job, and replays them.

Must not import the engine.
Start reading at `steps`.
"""

__all__ = ["mixed", "recorder", "steps"]
