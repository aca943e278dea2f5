"""Strategies: one file per name, each a pure function from the shape of the stack to a Plan."""
