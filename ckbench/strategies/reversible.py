"""reversible: nothing is kept between blocks; their inputs are rebuilt from their outputs."""

from dataclasses import dataclass

from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape

TOLERANCES = {"fp32": 1e-3, "tf32": 3e-2, "bf16": 1e-1, "fp16": 3e-2}
"""Largest relative difference of a gradient from none's, by ``train.precision``, that rounding explains.

What is rebuilt is rounded otherwise than what was dropped. Measured on a CPU after two AdamW steps (learning rate 1e-3,
24 blocks, gpt, llama and vit): up to 2.8e-4 in fp32, 2.6e-2 in bf16, 1e-2 in fp16; two attention kernels under none
differ as much (1.7e-4, 3.7e-2, 1.1e-2). Each bound is three to four times that. tf32 was not measured: it rounds the
factors of products to as many bits as fp16. Pure short types are refused: bf16-pure was off by 0.23 there.
"""


@dataclass(frozen=True, kw_only=True)
class Reversible:
    """Keep the stack's output alone. Kept: 2·b + h; peak about 2·b + max(h, a + t); every block runs once more.

    Needs blocks of two coupled streams (``model.residual: reversible``), hence 2·b. Sources: Gomez et al. 2017 (RevNet,
    arXiv 1707.04585); Kitaev et al. 2020 (Reformer, arXiv 2001.04451).
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cover the whole stack with one region that inverts. Raises PlanError where its blocks cannot."""
        if not stack.is_invertible:
            raise PlanError("reversible needs model.residual: reversible; these blocks cannot rebuild their inputs")
        if stack.precision not in TOLERANCES:
            short = stack.precision.removesuffix("-pure")
            raise PlanError(
                f"reversible needs streams in fp32: with {stack.precision} every block rounds them, and what is "
                f"rebuilt is further off with each; write train.precision: {short}"
            )
        region = Region(start=0, stop=stack.n_layers, mode="invert")
        return Plan(n_layers=stack.n_layers, regions=(region,), tolerance=TOLERANCES[stack.precision])


PLUGIN = Reversible
