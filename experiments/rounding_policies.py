"""What does each public rounding policy cost a bfloat16 draft, and does a token notice?

Expected: policies that round scores or weights once more err more at attention alone (the parity harness calls them another
policy, not a bug), the error of the last hidden states grows by a tenth or two, and the drafts hardly change: they turn
where the float64 margin is within the noise.

    python experiments/rounding_policies.py     # about a minute on two CPU cores

The policies are planted in the PyTorch reference, whose attention follows the contract; metrics are the harness's own.
Error ratios are over the contract's, against the float64 oracle; each bar is the median of 8 steps of the shipped pair.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import matplotlib
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_dflash.taps import live_part, tap_table
from parity_tests.harness import metrics, runners, standard
from parity_tests.harness.case import environment
from parity_tests.harness.mutations import planted

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent
ROWS, FIGURE = ROOT / "results" / "rounding-policies.jsonl", ROOT / "figures" / "rounding-policies.png"
POLICIES = {  # label -> runner, planted change
    "the contract": ("torch.eager", None),
    "fused attention (SDPA)": ("torch.sdpa", None),
    "weights divided before rounding": ("torch.eager", "weights-divided-first"),
    "scores rounded (HF eager attention)": ("torch.eager", "scores-rounded"),
    "norms round before their weight (HF)": ("torch.eager", "norm-rounds-first"),
    "cos and sin in bfloat16 (vLLM, HF)": ("torch.eager", "cos-sin-rounded"),
    "logits rounded": ("torch.eager", "logits-rounded"),
}
TAPS = ("layers.0.attn", "layers.1.out", "hidden", "logits")
STEPS = 8


def measure() -> list[dict]:
    """One row per policy: median error ratios end to end, and drafts unlike float64's."""
    table = {tap.name: tap for tap in tap_table(2)}
    seen: dict[str, list] = {label: [] for label in POLICIES}
    for step in track(range(STEPS), description="steps", console=Console(stderr=True)):
        case = standard.builtin(3 * step)
        exact, contract = runners.oracle(case), None
        for label, (name, plant) in POLICIES.items():
            with planted(plant, "torch") if plant else nullcontext():
                trace = runners.runner(name)(case, "bfloat16", rerun=False)
            contract = contract or trace
            parts = {
                tap: [live_part(table[tap], t[tap], case.live_reqs, case.live_rows) for t in (trace, contract, exact)]
                for tap in (*TAPS, "draft_tokens")
            }
            ours, _, truth = parts.pop("draft_tokens")
            ratios = {tap: metrics.error_ratio(*arrays) for tap, arrays in parts.items()}
            seen[label].append((ratios, int((ours != truth).sum()), ours.size))
    return [
        {
            "policy": label, "rho": {tap: round(float(np.median([r[tap] for r, _, _ in rows])), 4) for tap in TAPS},
            "drafts": sum(n for _, _, n in rows), "drafts_unlike_float64": sum(d for _, d, _ in rows), "steps": STEPS,
            **environment(),
        }
        for label, rows in seen.items()
    ]  # fmt: skip


def draw(rows: list[dict]) -> None:
    """Ratios by policy, a panel a tap."""
    figure, axes = plt.subplots(1, len(TAPS), figsize=(12, 3.4), sharey=True)
    labels = [
        f"{row['policy']}\n{row['drafts_unlike_float64']} of {row['drafts']} drafts unlike float64's" for row in rows
    ]
    for axis, tap in zip(axes, TAPS, strict=True):
        axis.barh(
            labels, [row["rho"][tap] for row in rows], color=["#888888", *["#0072b2"] * (len(rows) - 1)], height=0.6
        )
        axis.axvline(1, color="black", lw=0.8, ls=":")
        axis.set_title(tap, fontsize=10)
        axis.set_xlabel("error / the contract's error")
        axis.tick_params(axis="y", labelsize=8)
    axes[0].invert_yaxis()
    versions = rows[0]["versions"]
    figure.suptitle(
        f"bfloat16 rounding policies, shipped pair, {STEPS} steps, CPU, torch {versions['torch']}", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    torch.set_num_threads(1)
    rows = measure()
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    view = Table("policy", *TAPS, "drafts unlike float64's", box=None)
    for row in rows:
        view.add_row(
            row["policy"],
            *(f"{row['rho'][tap]:.2f}" for tap in TAPS),
            f"{row['drafts_unlike_float64']} of {row['drafts']}",
        )
    Console(stderr=True).print(view)
    draw(rows)
    print(
        json.dumps({"job": "rounding_policies", "ok": True, "rows": len(rows), "figure": str(FIGURE.relative_to(ROOT))})
    )


if __name__ == "__main__":
    main()
