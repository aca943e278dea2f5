"""What articles and papers say of activation checkpointing, as data, and a function per claim that judges it."""
