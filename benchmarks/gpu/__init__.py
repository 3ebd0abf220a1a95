"""The engine on a GPU; `python benchmarks/gpu`."""
