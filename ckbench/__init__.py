"""ckbench: benchmark activation checkpointing for transformers in PyTorch."""

__version__ = "0.1.0"
