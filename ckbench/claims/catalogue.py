"""The claims, in the order they are shown, and the judging of all of them."""

from dataclasses import dataclass

from ckbench.claims import attention, cost, depth, size, training
from ckbench.claims.base import Claim, Undecided, Verdict
from ckbench.claims.evidence import Evidence, NotMeasured

CHEN = "Chen et al. 2016, arXiv 1604.06174"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
TUTORIALS = "tutorials that measure eight encoder layers"
ARTICLES = "articles on memory in training, without a measurement"

CLAIMS = (
    Claim(
        name="linear-without",
        text="Without checkpointing activations take O(N·L) memory",
        source=CHEN,
        formula="bytes = a + b·L, proportional to N tokens",
        studies=("memory_laws", "attention_scores"),
        judge=depth.linear_without,
    ),
    Claim(
        name="root-with-segments",
        text="With √L segments activations take O(N·√L) memory",
        source=CHEN,
        formula="bytes = a + b·√L at squares of L",
        studies=("memory_laws",),
        judge=depth.root_with_segments,
    ),
    Claim(
        name="third-more",
        text="Full recomputation costs about 33 % more compute",
        source=f"{CHEN}; every introduction since",
        formula="(F + B + F) / (F + B) with B = 2F, F and B the FLOPs of forward and backward",
        studies=("recompute_cost",),
        judge=cost.third_more,
    ),
    Claim(
        name="peak-three-to-five",
        text="Checkpointing makes the peak of eight layers of d 512, batch 4, seq 256 3 to 5 times lower",
        source=TUTORIALS,
        formula="peak of none / peak of per-block in 3..5",
        studies=("encoder_8x512",),
        judge=cost.peak_three_to_five,
    ),
    Claim(
        name="at-1.2-to-1.4-times-the-time",
        text="Those eight layers take 1.2 to 1.4 times the step time with checkpointing",
        source=TUTORIALS,
        formula="step time of per-block / step time of none, 95 % interval within 1.2..1.4",
        studies=("encoder_time",),
        judge=cost.time_of_that,
    ),
    Claim(
        name="ffn-only-half",
        text="FFN-only checkpointing gives about half of the savings and half of the overhead of per-block",
        source=TUTORIALS,
        formula="(none - ffn-only) / (none - per-block) in peak bytes, and the same of extra FLOPs, in 0.4..0.6",
        studies=("encoder_8x512", "encoder_time"),
        judge=cost.half_with_ffn,
    ),
    Claim(
        name="fewer-segments-save-less",
        text="Fewer segments save less memory",
        source=TUTORIALS,
        formula="peak of segments:N falls with N = 1, 2, 4, 8",
        studies=("encoder_8x512",),
        judge=cost.fewer_save_less,
    ),
    Claim(
        name="fewer-segments-cost-less",
        text="Fewer segments cost less compute",
        source=TUTORIALS,
        formula="FLOPs of segments:N rise with N = 1, 2, 4, 8",
        studies=("encoder_8x512",),
        judge=cost.fewer_cost_less,
    ),
    Claim(
        name="one-segment-saves-nothing",
        text="One segment over the whole stack saves nothing",
        source=TUTORIALS,
        formula="1 - peak of segments:1 / peak of none at most 5 %",
        studies=("encoder_8x512", "big_head"),
        judge=cost.one_saves_nothing,
    ),
    Claim(
        name="full-keeps-constant",
        text="Full recomputation keeps O(1) memory at 100 % extra forward",
        source=ARTICLES,
        formula="bytes of one region over the stack do not grow with L; (B' - B) / F = 1",
        studies=("memory_laws", "recompute_cost"),
        judge=depth.constant_with_full,
    ),
    Claim(
        name="scores-dominate",
        text="Attention scores dominate activations (eager attention)",
        source=KORTHIKANTI,
        formula="kept bytes of a token = c₀ + c₁·s; dominate: c₁·s above half, s > c₀/c₁",
        studies=("attention_scores",),
        judge=attention.scores_dominate,
    ),
    Claim(
        name="scores-gone-with-flash",
        text="Attention scores no longer dominate with flash attention",
        source="Dao et al. 2022, arXiv 2205.14135",
        formula="kept bytes of a token do not grow with s",
        studies=("attention_scores",),
        judge=attention.scores_gone_with_flash,
    ),
    Claim(
        name="stack-of-150-gb",
        text="A stack of 96 layers, d 12288, batch 32, seq 2048 holds about 150 GB of activations",
        source=ARTICLES,
        formula="96 times what one more layer keeps, the difference of two depths",
        studies=("gpt3_layer",),
        judge=size.stack_of_150_gb,
    ),
    Claim(
        name="more-than-a-terabyte",
        text="A model of 175B parameters needs more than a terabyte of activations per replica",
        source=ARTICLES,
        formula="96 times what one more layer keeps for one sequence, times the sequences of a micro-batch",
        studies=("gpt3_layer",),
        judge=size.more_than_a_terabyte,
    ),
    Claim(
        name="mixed-precision-halves",
        text="Mixed precision halves activations, weights and gradients",
        source=ARTICLES,
        formula="bytes under bf16 / bytes under fp32 = 0.5, each of the three",
        studies=("mixed_precision",),
        judge=training.mixed_halves,
    ),
    Claim(
        name="accumulation-changes-nothing",
        text="Gradient accumulation leaves the activation peak of a micro-batch unchanged",
        source=ARTICLES,
        formula="activation bytes with 4 micro-batches / with 1 = 1",
        studies=("micro_batches",),
        judge=training.accumulation_changes_nothing,
    ),
    Claim(
        name="nested-is-lower",
        text="Nested checkpointing buys more memory",
        source=CHEN,
        formula="activations at the peak: (L/K + K - 1)·b + a under nested:K, L·b + a under per-block",
        studies=("memory_laws",),
        judge=depth.nested_is_lower,
    ),
    Claim(
        name="larger-models",
        text="Checkpointing lets 3 to 10 times larger models fit",
        source=ARTICLES,
        formula="most layers that fit 24 GiB under per-block / under none, by estimates",
        studies=("larger_models",),
        judge=size.larger_models,
    ),
    Claim(
        name="offload-beats-recompute",
        text="Offload instead of recomputation wins when the link is fast",
        source="DeepSpeed and torchtune documentation",
        formula="bytes moved / link rate < FLOPs recomputed / compute rate",
        studies=("offload_or_recompute",),
        judge=training.offload_beats_recompute,
    ),
    Claim(
        name="reversible-keeps-constant",
        text="Reversible layers keep O(1) activations",
        source="Gomez et al. 2017, arXiv 1707.04585; Kitaev et al. 2020, arXiv 2001.04451",
        formula="kept bytes and activations at the peak do not grow with L",
        studies=("reversible_depth",),
        judge=depth.constant_with_reversible,
    ),
    Claim(
        name="korthikanti-layer",
        text="A layer keeps sbh(34 + 5as/h) bytes",
        source=KORTHIKANTI,
        formula="s·b·h·(34 + 5·a·s/h): s tokens, b sequences, h width, a heads, 2-byte types, dropout",
        studies=("gpt3_layer", "gpt22b_layer"),
        judge=size.korthikanti,
    ),
    Claim(
        name="selective-saves-seventy",
        text="Recomputing the attention core alone saves 70 % of GPT-3's activations (retold: leaves 5 %)",
        source=KORTHIKANTI,
        formula="34 / (34 + 5as/h) = 34/114 is left of a layer",
        studies=("gpt3_layer",),
        judge=attention.selective_saves_seventy,
    ),
    Claim(
        name="selective-costs-little",
        text="Recomputing the attention core alone costs 2.7 % more time at GPT-3's proportions (in the paper: FLOPs)",
        source=KORTHIKANTI,
        formula="FLOPs of core-attn / FLOPs of none - 1 in 2.2..3.2 % at s/h = 1/6",
        studies=("selective_recompute",),
        judge=attention.selective_costs_little,
    ),
)
STUDIES = tuple(dict.fromkeys(name for claim in CLAIMS for name in claim.studies))
"""Every study that a claim names, once: configs/articles/NAME.yaml."""
ESTIMATED = ("gpt3_layer", "gpt22b_layer")
"""Studies that are estimated for CUDA and not run: their models fit no card."""
SEARCHED = ("larger_models",)
"""Studies in which the deepest model that fits is searched for by estimates."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim and what the figures of one device say of it."""

    claim: Claim
    verdict: Verdict


def judge(evidence: Evidence, claims: tuple[Claim, ...] = CLAIMS) -> list[Judged]:
    """Judge every claim by what is there."""
    judged = []
    for claim in claims:
        try:
            verdict = claim.judge(evidence)
        except NotMeasured as error:
            verdict = Verdict(outcome="not measured here", reason=f"{error}.")
        except Undecided as error:
            verdict = Verdict(outcome="undecided", reason=f"{error}.")
        judged.append(Judged(claim=claim, verdict=verdict))
    return judged
