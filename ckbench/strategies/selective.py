"""selective:POLICY: every block, but for the results of the operations that the policy keeps."""

import re
from dataclasses import dataclass

from ckbench import registry
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape

MATMUL = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""What linear layers and products of matrices come down to, on CPU and CUDA, fp32 and autocast alike."""
ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
"""The fused kernels behind scaled_dot_product_attention. Its math path is plain operations, products among them."""
EVERY_2ND = "every-2nd-matmul"
WORDS = {"matmul": MATMUL, "attention": ATTENTION, EVERY_2ND: MATMUL}
OPERATION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){1,2}(@[1-9]\d{0,5})?")


@dataclass(frozen=True, kw_only=True)
class Selective:
    """Recompute each block, except for kept results. Kept after forward: L·b + those results + h. Block forwards in
    backward: L, of cheap operations only where the dear ones are kept.

    POLICY is matmul, attention, both joined by +, every-2nd-matmul (of two products one after the other the first is
    kept, attention none), or operations by name, joined by + or as a list: ``aten.mm+aten.addmm``. A single call of
    an operation, counted from 1 in the order a block's forward runs them, is ``aten.mm@2``.
    Others say: selective activation checkpointing (SAC), torchtitan per-op.
    """

    policy: str

    def plan(self, stack: StackShape) -> Plan:
        """Cover every block by a region of its own. Raises PlanError for a policy that says nothing."""
        save_ops, save_every = read_policy(self.policy)
        regions = tuple(
            Region(start=i, stop=i + 1, save_ops=save_ops, save_every=save_every) for i in range(stack.n_layers)
        )
        return Plan(n_layers=stack.n_layers, regions=regions)


def read_policy(policy: str) -> tuple[tuple[str, ...], int]:
    """Give the operations a policy keeps, by name and sorted, and of how many results one is kept.

    >>> read_policy("aten.mm+aten.addmm")
    (('aten.addmm', 'aten.mm'), 1)
    >>> read_policy("aten.mm@2+aten.addmm@1")
    (('aten.addmm@1', 'aten.mm@2'), 1)
    """
    words = policy.split("+")
    ops: set[str] = set()
    for word in words:
        if word in WORDS:
            ops.update(WORDS[word])
        elif OPERATION.fullmatch(word):
            ops.add(word)
        else:
            hint = registry.did_you_mean(word, WORDS)
            raise PlanError(f"unknown policy {word!r}{hint} (or name operations, as in aten.mm+aten.addmm@2)")
    if EVERY_2ND in words and len(words) > 1:
        raise PlanError(f"{EVERY_2ND} stands alone: it counts every result that is kept, so nothing can be added to it")
    return tuple(sorted(ops)), 2 if EVERY_2ND in words else 1


PLUGIN = Selective
