"""What `compare` prints for a person: its table and the lines under it."""

from typing import Any

from rich import box
from rich.table import Table

from jax_dflash.lockstep import SIGMAS


def table(result: dict[str, Any]) -> Table:
    """The result as a person reads it; 80 columns are enough."""
    graphs = any(row["torch_graph_ms"] for row in result["buckets"])
    title = f"DFlash draft step, {result['pair']} pair, {result['dtype']}, {result['device']}"
    caption = "milliseconds of one waited propose(), medians; eager and graph are PyTorch"
    view = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    headings = [
        "requests",
        "equal",
        "error",
        "JAX ms",
        "eager ms",
        "eager/JAX",
        *(["graph ms", "graph/JAX"] if graphs else []),
    ]
    for heading in headings:
        view.add_column(heading, justify="right")
    for row in result["buckets"]:
        jax_ms, eager_ms, graph_ms = row["jax_ms"], row["torch_eager_ms"], row["torch_graph_ms"]
        cells = [
            str(row["num_reqs"]),
            f"{row['tokens_equal']}/{row['tokens_compared']}",
            f"{row['max_error']:.0e}" if row["tokens_compared"] else "-",
            f"{jax_ms:.3f}",
            f"{eager_ms:.3f}",
            f"{eager_ms / jax_ms:.2f}x",
        ]
        view.add_row(*cells, *([f"{graph_ms:.3f}", f"{graph_ms / jax_ms:.2f}x"] if graphs else []))
    return view


def summary(result: dict[str, Any]) -> list[str]:
    """The lines under the table."""
    compared, equal = result["tokens_compared"], result["tokens_equal"]
    lines = [
        f"accepted length {result['tau']:.2f} tokens per target step (mean of requests {result['tau_request_mean']:.2f}; "
        f"PyTorch's drafts {result['tau_torch']:.2f}), K={result['num_speculative_tokens']}",
        f"{equal} of {compared} draft tokens equal ({result['fused_equal']} with PyTorch's fused attention), "
        f"{result['undecidable']} undecidable (margin within {SIGMAS} sigma); "
        f"worst relative RMS error {result['max_error']:.1e}",
        f"{result['programs']} programs captured, {result['compiles_after_capture']} compilations after capture",
    ]
    return lines + [f"FAULT: {fault}" for fault in result["faults"]]
