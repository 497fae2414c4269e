"""What does a decoding round cost in the loop on the device and in the host's, next to its two programs' own time?

Expected: on the device a round is its verify and its draft and nothing else, within 5%; in the host's loop it pays for two
dispatches, two waits and the scheduling as well, which shows the more the smaller the model is.

    python experiments/decoding_loops.py --pair qwen3-8b     # seeded weights at the published size, on a GPU
    python experiments/decoding_loops.py --pair builtin
    python experiments/decoding_loops.py --draw              # redraw the figure from the rows

The programs' time is the slope between 20 and 40 trips of a loop on the device around each of them. A round on the device is
a waited call of 128 rounds over 128 (calls grow: 8, 16, 32, 64, 128), in the host's loop the slope between generations of 17
and 113 tokens; all around the same live context, medians. Seeded weights accept no draft: every round emits one token.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import lax

from jax_dflash import target as targets
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import TargetConfig, parse_draft_config, parse_target_config
from jax_dflash.decoder import Decoder
from jax_dflash.device_loop import DeviceLoop
from jax_dflash.drafter import pack as pack_draft
from jax_dflash.names import draft_tensors, target_tensors
from jax_dflash.numerics import COMPILER_OPTIONS, as_dtype
from jax_dflash.sampling_params import SamplingParams

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent
PACKAGE = ROOT.parent / "jax_dflash" / "assets"
ROWS, FIGURE = ROOT / "results" / "decoding-loops.jsonl", ROOT / "figures" / "decoding-loops.png"
SHORT, LONG = 17, 113
ROUNDS = 128
# Qwen/Qwen3-8B's published config.json.
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


def seeded(shapes: dict[str, tuple[int, ...]], dtype: jnp.dtype, seed: int) -> dict[str, jax.Array]:
    """Weights of scale 0.02, norms 1, made on the device."""

    def make(key, shape):
        return jnp.ones(shape, dtype) if len(shape) == 1 else 0.02 * jax.random.normal(key, shape, dtype)

    keys = jax.random.split(jax.random.key(seed), len(shapes))
    make = jax.jit(make, static_argnums=1)
    return {name: make(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def decoder(pair: str, dtype: str, num_reqs: int, context: int) -> Decoder:
    """A pair with one bucket."""
    max_model_len = 1024 if pair == "builtin" else context + 2 * ROUNDS

    def sizes(query_len: int) -> dict[str, Any]:
        return {
            "max_num_seqs": num_reqs, "max_model_len": max_model_len, "chunk": 128,
            "max_num_batched_tokens": num_reqs * 128,
            "ladder": BucketLadder([num_reqs * query_len], max_num_seqs=num_reqs, query_lens=query_len),
        }  # fmt: skip

    if pair == "builtin":
        folder = PACKAGE / "builtin"
        return Decoder.load(folder / "drafter", folder / "target", dtype, **sizes(8))
    kind = as_dtype(dtype)
    draft_config = parse_draft_config(json.loads((PACKAGE / "configs" / "qwen3-8b-dflash-b16.json").read_text()))
    target_config: TargetConfig = parse_target_config(QWEN3_8B)
    weights = targets.pack(seeded(target_tensors(target_config), kind, 0), target_config)
    drafter = pack_draft(
        seeded(draft_tensors(draft_config), kind, 1), draft_config, weights.embed_tokens, weights.lm_head
    )
    return Decoder(draft_config, drafter, target_config, weights, **sizes(draft_config.block_size))


def program_ms(loop: DeviceLoop, num_reqs: int, context: int, part: str, repeats: int) -> list[float]:
    """Milliseconds of the verify or the draft alone: slopes between 20 and 40 trips."""
    config, W = loop.config, loop.config.table_width
    requests = loop._requests(num_reqs)
    requests.active[:] = True
    requests.computed[:], requests.num_drafts[:] = context, config.num_speculative_tokens
    fixed = loop._fixed(num_reqs)
    fixed.block_tables[:] = 1 + np.arange(num_reqs * W).reshape(num_reqs, W) % (min(config.num_pages) - 1)
    fixed.request_index[:] = np.arange(num_reqs)  # -1 would be padding, which attends to nothing
    columns = loop._columns(num_reqs)

    def trips(weights, state, columns, fixed, num_trips):
        verified = loop.verify(weights, state, columns, fixed)
        V = loop.runner.limits.vocab_size

        # Each trip reads what the one before it made, so that nothing can be moved out of the loop or left out.
        def verify(_, state):
            got = loop.verify(weights, state, columns, fixed)
            requests = state.requests._replace(drafts=got.tokens[:, 1:], last_token=got.last)
            return state._replace(target_pool=got.target_pool, requests=requests)

        def draft(_, state):
            last = state.requests.drafts[:, :1]
            features = verified.features + jnp.sum(last).astype(verified.features.dtype) * 1e-20
            tokens = (verified.tokens + last) % V
            new, drafts = loop.draft(
                weights, state, verified._replace(features=features, tokens=tokens), columns, fixed
            )
            return state._replace(draft=new, requests=state.requests._replace(drafts=drafts))

        return lax.fori_loop(0, num_trips, {"verify": verify, "draft": draft}[part], state)

    state = loop._state(requests, num_reqs)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (loop.weights, state, columns, fixed, np.int32(0))
    )
    program = jax.jit(trips, donate_argnums=1).lower(*shapes).compile(COMPILER_OPTIONS)
    slopes = []
    for _ in range(repeats + 1):
        seconds = []
        for count in (20, 40):
            start = time.perf_counter()
            state = jax.block_until_ready(program(loop.weights, state, columns, fixed, np.int32(count)))
            seconds.append(time.perf_counter() - start)
        slopes.append((seconds[1] - seconds[0]) / 20 * 1e3)
    loop.runner.pool, loop.engine.state = state.target_pool, state.draft
    return slopes[1:]


def prompts_of(made: Decoder, num_reqs: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, made.target_config.vocab_size, length).tolist() for _ in range(num_reqs)]


def host_round_ms(made: Decoder, num_reqs: int, context: int, repeats: int, **how: Any) -> list[float]:
    """Milliseconds of a round: slopes between a short and a long generation."""
    prompts, slopes = prompts_of(made, num_reqs, context - (SHORT + LONG) // 2), []
    for _ in range(repeats + 1):
        seconds, rounds = [], []
        for count in (SHORT, LONG):
            params = [SamplingParams(max_new_tokens=count, ignore_eos=True)] * num_reqs
            start = time.perf_counter()
            found = made.generate(prompts, params, **how)
            seconds.append(time.perf_counter() - start)
            rounds.append(max(len(g.accepted) for g in found) or count - 1)
        slopes.append((seconds[1] - seconds[0]) / (rounds[1] - rounds[0]) * 1e3)
    return slopes[1:]


def device_round_ms(made: Decoder, num_reqs: int, context: int, repeats: int) -> list[float]:
    """Milliseconds of a round of the longest calls, packing and waiting included."""
    before = sum(2**i for i in range(3, 7))  # rounds of the shorter calls
    prompts = prompts_of(made, num_reqs, max(1, context - before - ROUNDS // 2))
    run, calls = made.device_loop.run, []

    def timed(*args, num_rounds, **kwargs):
        start = time.perf_counter()
        found = run(*args, num_rounds=num_rounds, **kwargs)
        calls.append((max(len(own.emitted) for own in found), time.perf_counter() - start))
        return found

    made.device_loop.run = timed
    longest = []
    for _ in range(repeats + 1):
        # Tokens enough for all calls if nothing is accepted; where something is, the last call is shorter.
        params = [SamplingParams(max_new_tokens=1 + before + ROUNDS, ignore_eos=True)] * num_reqs
        calls.clear()
        made.generate(prompts, params, loop="device")
        rounds, seconds = max(calls)
        longest.append(seconds / rounds * 1e3)
    made.device_loop.run = run
    return longest[1:]


def measure(pair: str, dtype: str, num_reqs: int, context: int, repeats: int) -> dict[str, Any]:
    """The row of one cell."""
    made = decoder(pair, dtype, num_reqs, context)
    start = time.perf_counter()
    made.capture()
    captured = time.perf_counter() - start
    row: dict[str, Any] = {
        "pair": pair, "dtype": dtype, "device": made.device_name, "num_reqs": num_reqs, "context": context,
        "num_speculative_tokens": made.engine.config.num_speculative_tokens, "capture_s": round(captured, 1),
        "jax": jax.__version__, "git": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip(),
    }  # fmt: skip
    timings = {
        "device": device_round_ms(made, num_reqs, context, repeats),
        "host": host_round_ms(made, num_reqs, context, repeats),
        "plain": host_round_ms(made, num_reqs, context, repeats, speculate=False),
    }
    for part in ("verify", "draft"):
        timings[part] = program_ms(made.device_loop, num_reqs, context, part, repeats)
    for name, values in timings.items():
        row[f"{name}_ms"], row[f"{name}_quartiles"] = float(np.median(values)), np.percentile(values, [25, 75]).tolist()
    programs = row["verify_ms"] + row["draft_ms"]
    row["device_over_programs"] = row["device_ms"] / programs
    row["host_share"] = 1 - programs / row["host_ms"]
    return row


def draw(rows: list[dict]) -> None:
    """A bar of programs, device loop and host loop for each cell."""
    figure, axes = plt.subplots(1, len(rows), figsize=(2.6 * len(rows), 3.6), squeeze=False)
    for axis, row in zip(axes[0], rows, strict=True):
        axis.bar(0, row["verify_ms"], 0.6, color="#4477AA", label="verify")
        axis.bar(0, row["draft_ms"], 0.6, bottom=row["verify_ms"], color="#CCBB44", label="draft")
        for i, (name, color) in enumerate((("device", "#228833"), ("host", "#EE6677")), start=1):
            low, high = row[f"{name}_quartiles"]
            spread = [[max(0, row[f"{name}_ms"] - low)], [max(0, high - row[f"{name}_ms"])]]
            axis.bar(i, row[f"{name}_ms"], 0.6, yerr=spread, color=color, error_kw={"lw": 0.8, "capsize": 2})
            axis.text(i, high, f"{row[f'{name}_ms']:.2f}", ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(3), ["programs", "device\nloop", "host\nloop"], fontsize=8)
        axis.margins(y=0.15)
        axis.set_title(
            f"{row['pair']}, {row['dtype']}\n{row['num_reqs']} x {row['context']}, {row['device']}", fontsize=8
        )
    axes[0][0].set_ylabel("ms per decoding round, median")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle("One round of speculative decoding (requests x live context)", fontsize=10)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=["qwen3-8b", "builtin"], default="builtin")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--cells", default="1x256", help="requests x context, for example 1x1024,8x1024")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROWS, help="append the rows here")
    parser.add_argument("--draw", action="store_true", help="only redraw the figure from the rows")
    args = parser.parse_args()
    if not args.draw:
        for cell in args.cells.split(","):
            num_reqs, context = map(int, cell.split("x"))
            row = measure(args.pair, args.dtype, num_reqs, context, args.repeats)
            print(json.dumps(row), file=sys.stderr)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in args.out.read_text().splitlines()]
    if args.out == ROWS:
        draw(rows)
    print(
        json.dumps(
            {
                "job": "decoding_loops",
                "rows": len(rows),
                "worst_device_over_programs": max(row["device_over_programs"] for row in rows),
            }
        )
    )


if __name__ == "__main__":
    main()
