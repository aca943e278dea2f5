"""Imported once by the fork server: what every trial needs, so that a fork starts warm. Touches no device."""

import scipy.stats
import torch
import torch._dynamo  # the optimizer imports it at its first step, which would cost each trial a second
import torch.profiler
import torch.utils.checkpoint
import torch.utils.flop_counter

import ckbench.devices.cpu
import ckbench.engine.parity
import ckbench.engine.worker
import ckbench.models.bert
import ckbench.models.gpt
import ckbench.models.llama
import ckbench.models.vit
from ckbench import host

host.code_id()  # remembered, so that every fork names the code the server has loaded

__all__ = ["ckbench", "scipy", "torch"]
