"""How fast graphics cards compute, move bytes in their memory and to the host, by their vendor's data sheets.

All are peaks that no program reaches. What follows from them is a ratio of operations on one card, not a time.
"""

from dataclasses import dataclass

from ckbench.cards import CARDS_MIB, card_name
from ckbench.errors import ConfigError

PCIE_BYTES_PER_S = {3: 15.754e9, 4: 31.508e9, 5: 63.015e9}
"""One direction of 16 lanes: 8, 16, 32 GT/s and 128 of 130 bits (PCI Express base specifications 3.0, 4.0, 5.0)."""


@dataclass(frozen=True, kw_only=True)
class CardSpeed:
    """A card's peaks: dense products, without structured sparsity, sums in fp32."""

    variant: str
    """Which of the cards of this name is meant."""
    fp32_flops_per_s: float
    """Outside of tensor cores."""
    tf32_flops_per_s: float
    """As fp32 where a card has no such arithmetic."""
    short_flops_per_s: float
    """bf16 and fp16 products."""
    memory_bytes_per_s: float
    pcie_generation: int
    source: str
    """Data sheet or white paper of NVIDIA."""

    @property
    def host_bytes_per_s(self) -> float:
        """Give the peak of the link to the host, one way."""
        return PCIE_BYTES_PER_S[self.pcie_generation]

    def flops_per_s(self, dtype: str, precision: str) -> float:
        """Give the peak of products of this tensor type in a step of this precision."""
        if dtype in ("bfloat16", "float16"):
            return self.short_flops_per_s
        return self.tf32_flops_per_s if precision == "tf32" else self.fp32_flops_per_s


def _card(
    variant: str, fp32: float, tf32: float, short: float, gb_per_s: float, pcie_generation: int, source: str
) -> CardSpeed:
    """Make an entry of figures as they are printed: TFLOP/s and GB/s."""
    return CardSpeed(
        variant=variant,
        fp32_flops_per_s=fp32 * 1e12,
        tf32_flops_per_s=tf32 * 1e12,
        short_flops_per_s=short * 1e12,
        memory_bytes_per_s=gb_per_s * 1e9,
        pcie_generation=pcie_generation,
        source=source,
    )


SPEEDS = {
    "T4": _card("fp16 only: it has no bf16 products", 8.1, 8.1, 65, 320, 3, "T4 data sheet"),
    "V100 16GB": _card("SXM2; fp16 only: it has no bf16 products", 15.7, 15.7, 125, 900, 3, "V100 data sheet"),
    "L4": _card("", 30.3, 60, 121, 300, 4, "L4 data sheet, halved where it counts sparsity"),
    "RTX 3090": _card("", 35.6, 35.6, 71, 936, 4, "GA102 white paper 2.1, table 2"),
    "RTX 4090": _card("", 82.6, 82.6, 165.2, 1008, 4, "Ada white paper 2.1, table 2"),
    "RTX 5090": _card("", 104.8, 104.8, 209.5, 1792, 5, "RTX Blackwell white paper 1.1, table 2"),
    "A100 40GB": _card("SXM4", 19.5, 156, 312, 1555, 4, "A100 data sheet"),
    "A40": _card("", 37.4, 74.8, 149.7, 696, 4, "A40 data sheet"),
    "L40S": _card("", 91.6, 183, 362, 864, 4, "L40S data sheet"),
    "RTX A6000": _card("", 38.7, 77.4, 154.8, 768, 4, "GA102 white paper 2.1, appendix A"),
    "A100 80GB": _card("SXM4", 19.5, 156, 312, 2039, 4, "A100 data sheet"),
    "H100 80GB": _card("SXM5", 67, 494.7, 989.4, 3350, 5, "H100 data sheet, halved where it counts sparsity"),
    "H200": _card("SXM5", 67, 494.7, 989.4, 4800, 5, "H200 data sheet, halved where it counts sparsity"),
    "B200": _card("HGX", 75, 1125, 2250, 8000, 5, "HGX B200 data sheet, halved where it counts sparsity"),
}
"""By the names of ``cards.CARDS_MIB``."""


def card_speed(text: str) -> tuple[str, CardSpeed]:
    """Read a card's name and give it as we write it, with its speeds.

    >>> name, speed = card_speed("a100-80gb")
    >>> name, speed.short_flops_per_s, speed.memory_bytes_per_s
    ('A100 80GB', 312000000000000.0, 2039000000000.0)

    Raises ConfigError for what is no card; a size of memory says nothing of speed.
    """
    name = card_name(text)
    if name is None:
        known = ", ".join(CARDS_MIB)
        raise ConfigError(f"times need a card by its name, not {text!r}; have: {known}")
    return name, SPEEDS[name]
