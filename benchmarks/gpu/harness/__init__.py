"""What the parts of the benchmark share: a device with its model, and pictures of what was measured."""
