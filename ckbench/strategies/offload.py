"""offload: keep everything, but on the host; tensors come back one block ahead of their backward."""

from dataclasses import dataclass

from ckbench.plan import Plan, StackShape


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Recompute nothing and move what the blocks keep to the host. Kept on the device: h; peak about max(h, 2·a + t).

    Others say: activation offloading (torchtune), ``torch.autograd.graph.save_on_cpu``. As an option of a checkpointing
    strategy, ``per-block+offload``, it moves what the regions keep (DeepSpeed ``cpu_checkpointing``).
    """

    def plan(self, stack: StackShape) -> Plan:
        """No regions; only the place of what is kept changes."""
        return Plan(n_layers=stack.n_layers, offload=True)


PLUGIN = Offload
