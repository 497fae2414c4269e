"""How long is one waited draft step of the builtin pair in each framework, bucket by bucket?

Expected: one compiled program per bucket beats PyTorch eager everywhere; a replayed CUDA graph, whose launch costs less
on the host, is ahead of it at this tiny size until the program's own host time is cut.

    python -m jax_dflash compare --device gpu --dtype bfloat16 --out run.json
    python experiments/draft_step_by_bucket.py run.json ...    # appends the rows and redraws the figure
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent
ROWS, FIGURE = ROOT / "results" / "compare.jsonl", ROOT / "figures" / "draft-step-by-bucket.png"
SERIES = (
    ("jax", "jax_ms", "JAX program"),
    ("torch-eager", "torch_eager_ms", "PyTorch eager"),
    ("torch-graph", "torch_graph_ms", "PyTorch CUDA graph"),
)


def key(run: dict) -> tuple:
    """What a run measured: a newer one of the same key takes its place."""
    return run["device"], run["dtype"], run["pair"], run["num_speculative_tokens"], run["max_model_len"]


def draw(runs: list[dict]) -> None:
    """One panel a run: medians with quartiles, all on one scale."""
    figure, axes = plt.subplots(1, len(runs), figsize=(5.2 * len(runs), 3.6), sharey=True, squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        shown = [series for series in SERIES if run["buckets"][0][series[1]] is not None]
        for i, (name, column, label) in enumerate(shown):
            at = [n + (i - (len(shown) - 1) / 2) * 0.26 for n in range(len(run["buckets"]))]
            heights = [row[column] for row in run["buckets"]]
            low = [h - row["spread"][name][0] for h, row in zip(heights, run["buckets"], strict=True)]
            high = [row["spread"][name][1] - h for h, row in zip(heights, run["buckets"], strict=True)]
            axis.bar(at, heights, 0.24, yerr=(low, high), label=label, error_kw={"lw": 0.8, "capsize": 2})
        axis.set_xticks(range(len(run["buckets"])), [str(row["num_reqs"]) for row in run["buckets"]])
        axis.set_xlabel("requests in the bucket")
        axis.set_title(f"{run['device']}, {run['dtype']}", fontsize=10)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0][0].set_ylabel("ms per waited propose(), median")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle("DFlash draft step, builtin pair, 7 drafts a request", fontsize=11)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="*", help="JSON files of compare --out")
    args = parser.parse_args()
    known = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    rows = {key(run): run for run in known + [json.loads(path.read_text()) for path in args.runs]}
    ROWS.write_text("".join(json.dumps(run) + "\n" for run in rows.values()))
    gpu = [run for run in rows.values() if run["buckets"][0]["torch_graph_ms"] is not None]
    draw(sorted(gpu or rows.values(), key=key))
    print(json.dumps({"job": "draft_step_by_bucket", "runs": len(rows), "figure": FIGURE.name}))


if __name__ == "__main__":
    main()
