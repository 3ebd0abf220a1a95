"""What the benchmarks against other engines share: `python benchmarks/peer_NAME.py`."""
