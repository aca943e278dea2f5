"""Keep optimizer state and master weights on the host and update there (ZeRO-Offload, arXiv 2101.06840)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ckbench.engine.host_store import HostStore


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer over the device's parameters whose work is done by another one, over copies in host memory.

    Master weights are fp32 whatever type the device computes in. The device keeps parameters and gradients. As the
    parameters registered here are the device's, gradient scaling unscales and checks their gradients there, and
    does not call ``step`` where it skips.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        super().__init__(list(parameters), {})
        self.store = HostStore(device)
        self._device = device
        self._parameters = list(parameters)
        self._masters = [self.store.copy_of(p, torch.float32) for p in parameters]
        self._gradients = [self.store.empty_like(p, torch.float32) for p in parameters]
        self._in_transit = [None if p.dtype == torch.float32 else self.store.empty_like(p) for p in parameters]
        """Room in the device's own type, because only copies that do not convert run without waiting."""
        self._inner = make(self._masters)
        self._stored: set[int] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Fetch the gradients, update the masters, send them back."""
        self._fetch_gradients()
        self._update()
        self._send_weights()

    def _fetch_gradients(self) -> None:
        for parameter, gradient, transit in self._triples(self._gradients):
            if parameter.grad is not None:
                (gradient if transit is None else transit).copy_(parameter.grad, non_blocking=True)
        if self._device.type == "cuda":
            # This also waits for the weights sent last, so the masters may be written again.
            torch.cuda.current_stream(self._device).synchronize()
        for i, (parameter, gradient, transit) in enumerate(self._triples(self._gradients)):
            if transit is not None and parameter.grad is not None:
                gradient.copy_(transit)
            self._masters[i].grad = None if parameter.grad is None else gradient

    def _update(self) -> None:
        """Update all masters; those without state yet one by one, so that each one's new state moves to the store
        before the next one's is made by PyTorch's allocator."""
        fresh = [master for master in self._masters if master.grad is not None and id(master) not in self._stored]
        gradients = [master.grad for master in self._masters]
        if fresh:
            for master in self._masters:
                master.grad = None
            for master, gradient in zip(self._masters, gradients, strict=True):
                if gradient is not None and id(master) not in self._stored:
                    master.grad = gradient
                    self._inner.step()
                    master.grad = None
                    self._store_state(master)
            known = [all(master is not other for other in fresh) for master in self._masters]
            for master, gradient, had_state in zip(self._masters, gradients, known, strict=True):
                master.grad = gradient if had_state else None
        if any(master.grad is not None for master in self._masters):
            self._inner.step()

    def _store_state(self, master: Tensor) -> None:
        state = self._inner.state[master]
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = self.store.copy_of(value)
        self._stored.add(id(master))

    def _send_weights(self) -> None:
        for parameter, master, transit in self._triples(self._masters):
            if parameter.grad is None:
                continue
            if transit is not None:
                transit.copy_(master)
            parameter.copy_(master if transit is None else transit, non_blocking=True)

    def _triples(self, on_host: Sequence[Tensor]) -> "zip[tuple[Tensor, Tensor, Tensor | None]]":
        return zip(self._parameters, on_host, self._in_transit, strict=True)
