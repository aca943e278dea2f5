"""Devices: one file each; the only code that knows how a device allocates and keeps time."""
