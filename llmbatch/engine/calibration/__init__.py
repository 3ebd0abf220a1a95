"""Measures a device: its ceilings, its memory, and the seconds of steps under each execution.

Must not import what plans.
Start reading at `calibrate`.
"""

__all__ = ["calibrate", "device_cost", "memory_profile", "microbenchmarks", "processor_rates", "store"]
