"""Peak memory without the device: a training step replayed on tensors that have no data."""
