"""Is what a decoder writes what plain greedy decoding writes? Over drafts, batches, pages, drafters, loops and frameworks.

`make lossless` (`python -m parity_tests.lossless`) runs the whole grid on the shipped pair, 32 prompts of 1 to 400 tokens
and 200 tokens each, hours on two cores; rows go to a file, and a run that was stopped goes on where it was. The tests run
a part of it.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_dflash import excerpts
from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder
from jax_dflash.cli import ASSETS
from jax_dflash.decoding import Generation, accepted_length
from jax_dflash.sampling_params import SamplingParams

PAIR = ASSETS / "builtin"
RESULTS = Path(__file__).parents[1] / "experiments" / "results" / "lossless.jsonl"
KS, PAGE_SIZES, BATCHES = (1, 3, 7, 15), (4, 16), tuple(range(1, 9))
DRAFTERS = ("trained", "untrained", "perfect")
WAYS = (("jax", "host"), ("jax", "device"), ("torch", "host"))
LENGTHS = (1, 7, 33, 64, 100, 170, 255, 400)
BUCKETS = (1, 4, 8)  # few programs, and padding in most batches


class Cell(NamedTuple):
    """One run of the grid."""

    framework: str
    loop: str
    K: int
    page_size: int
    drafter: str
    batch: int


def grid() -> list[Cell]:
    """Every cell, those of one decoder together. A drafter that looks texts up lives on the host."""
    return [
        Cell(framework, loop, K, page_size, drafter, batch)
        for K, page_size, (framework, loop), drafter, batch in itertools.product(
            KS, PAGE_SIZES, WAYS, DRAFTERS, BATCHES
        )
        if not (loop == "device" and drafter == "perfect")
    ]


class Perfect:
    """A drafter that looks up how the target itself goes on: each of its drafts is accepted."""

    draft_logits = None

    def __init__(self, texts: list[list[int]], engine: Any):
        self.texts, self.engine, self.context = texts, engine, {}

    def add_request(self, request_id, num_prompt_tokens: int = 0, cached_tokens: int = 0, params=None) -> None:
        self.context[request_id] = 0

    def remove_request(self, request_id) -> None:
        del self.context[request_id]

    def request_index(self, request_id) -> int:
        return -1

    def propose(self, step: TargetStep, features, num_speculative_tokens: int | None = None) -> np.ndarray:
        K = self.engine.config.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        drafts = np.zeros((len(step.request_ids), K), np.int32)
        for i, request_id in enumerate(step.request_ids):
            self.context[request_id] += step.num_context[i] - step.num_rejected[i]
            after = self.texts[request_id][self.context[request_id] + 1 :][:K]
            drafts[i, : len(after)] = after
        return drafts


def decoder(framework: str, K: int, page_size: int, buckets: tuple[int, ...] = BUCKETS):
    """A captured decoder of the shipped pair for batches up to 8, in float32."""
    chunk = max(32, 2 * (K + 1))
    sizes: dict[str, Any] = {
        "num_speculative_tokens": K, "max_num_seqs": 8, "max_model_len": 640, "page_size": page_size,
        "max_num_batched_tokens": 8 * chunk, "chunk": chunk, "allow_long_block": True,
        "ladder": BucketLadder([n * (K + 1) for n in buckets], max_num_seqs=8, query_lens=K + 1),
    }  # fmt: skip
    if framework == "jax":
        from jax_dflash.decoder import LOOPS, Decoder
    else:
        from torch_ref.decoder import LOOPS, Decoder
    made = Decoder.load(PAIR / "drafter", PAIR / "target", **sizes)
    made.capture(loops=LOOPS, progress=False)
    return made


def seeded(weights: Any, seed: int = 0) -> Any:
    """Weights as the given ones were before any training: random, of the same scale; tables of tokens stay the target's."""
    import jax

    rng = np.random.default_rng(seed)

    def draw(x):
        if x.ndim < 2:
            return x
        stored = np.asarray(x)
        values = (rng.standard_normal(x.shape) * np.abs(stored).mean()).astype(stored.dtype)
        return x.new_tensor(values) if hasattr(x, "new_tensor") else jax.device_put(values)

    drawn = jax.tree.map(draw, weights)
    return drawn._replace(embed_tokens=weights.embed_tokens, lm_head=weights.lm_head)


def prompts(count: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Held-out text in these lengths in turn."""
    return excerpts.prompts(PAIR / "target", count, lengths)


def plain(made: Any, asked: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The target's own greedy texts, prompt and continuation."""
    params = [SamplingParams(max_new_tokens=max_new_tokens)] * len(asked)
    return [g.tokens for g in made.generate(asked, params, speculate=False)]


def run(
    made: Any, cell: Cell, trained: Any, asked: list[list[int]], texts: list[list[int]], max_new_tokens: int
) -> list[Generation]:
    """A cell's generations. `trained` are the decoder's own draft weights, which it has again afterwards."""
    params = [SamplingParams(max_new_tokens=max_new_tokens)] * len(texts)
    how: dict[str, Any] = {"loop": cell.loop, "max_num_seqs": cell.batch}
    if cell.drafter == "perfect":
        how["drafter"] = Perfect(texts, made.engine)
    if cell.drafter == "untrained":
        made.engine.set_weights(seeded(trained))
    try:
        return made.generate(asked, params, **how)
    finally:
        made.engine.set_weights(trained)


def draft_weights(made: Any) -> Any:
    return made.engine.weights if hasattr(made.engine, "weights") else made.engine.programs.weights


def main() -> int:
    """Run the cells that the file lacks; exit 1 if a text of any differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--framework", choices=["jax", "torch"], help="only its cells, so that two processes share the work"
    )
    parser.add_argument("--hours", type=float, default=24.0, help="stop after so long, to go on later")
    args = parser.parse_args()
    import torch

    from jax_dflash.programs import num_compiles

    torch.set_num_threads(1)  # tiny steps on few cores
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {Cell(*(row[name] for name in Cell._fields)) for row in known if row["tokens_each"] == args.tokens}
    asked = prompts(args.prompts)
    wanted = [cell for cell in grid() if args.framework in (None, cell.framework)]
    missing, start, made = [cell for cell in wanted if cell not in done], time.monotonic(), None
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar, args.out.open("a") as file:
        task = bar.add_task("cells", total=len(wanted), completed=len(wanted) - len(missing))
        for cell in missing:
            if time.monotonic() - start > args.hours * 3600:
                break
            if made is None or made[0] != (cell.framework, cell.K, cell.page_size):
                now = decoder(cell.framework, cell.K, cell.page_size)
                made = (cell.framework, cell.K, cell.page_size), now, plain(now, asked, args.tokens)
            _, now, texts = made
            compiles, began = num_compiles(), time.perf_counter()
            found = run(now, cell, draft_weights(now), asked, texts, args.tokens)
            row = cell._asdict() | {
                "tokens_each": args.tokens, "prompts": args.prompts, "tau": round(accepted_length(found), 4),
                "equal": sum(g.tokens == text for g, text in zip(found, texts, strict=True)),
                "compiles": num_compiles() - compiles, "seconds": round(time.perf_counter() - began, 2),
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            file.flush()
            known.append(row)
            bar.update(task, advance=1, description=" ".join(map(str, cell)).ljust(36))
    wrong = [row for row in known if row["equal"] != row["prompts"] or row["compiles"]]
    for row in wrong:
        print(f"FAULT: {row}", file=sys.stderr)
    print(json.dumps({"job": "lossless", "ok": not wrong, "cells": len(known), "of": len(grid()), "wrong": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
