"""Model families: one file each, plain modules that know nothing of checkpointing."""
