"""From a memory budget to the fastest plan that fits it."""
