"""The engine: where plans meet tensors. Torch is imported from here down."""
