"""Which shapes let the builtin pair decode faster with speculation than without on two CPU cores?

Random weights, float32, one request of 300 live tokens. Speculation can win only if (verify + draft) / plain step stays
well below the accepted length: at most 2.2 is wanted. Expected: a deep narrow target and a drafter of one or two layers,
since a step's cost on a CPU is mostly per layer, not per row.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from jax_dflash import drafter as drafters
from jax_dflash import target as targets
from jax_dflash.batch import TargetStep
from jax_dflash.config import DraftConfig, Geometry, TargetConfig, plain_layers
from jax_dflash.decoding import DecoderSizes
from jax_dflash.engine import DraftEngine
from jax_dflash.target_batch import TargetBatch
from jax_dflash.target_runner import TargetRunner

LIVE, MAX_LEN = 300, 1024
SHAPES = [  # hidden, target layers, MLP, draft layers, block
    (192, 14, 384, 2, 8),
    (192, 14, 384, 2, 16),
    (192, 14, 384, 1, 8),
    (192, 10, 512, 2, 8),
    (192, 16, 320, 2, 8),
    (192, 16, 320, 1, 8),
]


def median_ms(call, repeats: int = 40) -> float:
    """Median of waited calls in milliseconds, after three warm ones."""
    seconds = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[3:])) * 1e3


def time_shape(hidden: int, layers: int, mlp: int, draft_layers: int, block: int) -> dict:
    """One row: plain step, verify and draft of a pair of this shape."""
    size = {
        "hidden_size": hidden, "num_heads": hidden // 32, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": mlp,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": 264, "max_position_embeddings": 2048,
    }  # fmt: skip
    taps = tuple(int(i) for i in np.linspace(1, layers - 3, 5).round())
    target_config = TargetConfig(
        geometry=Geometry(num_layers=layers, **size), tie_word_embeddings=True, dtype="float32"
    )
    geometry = Geometry(num_layers=draft_layers, **size)
    config = DraftConfig(
        geometry=geometry, layers=plain_layers(geometry), block_size=block, mask_token_id=257,
        hidden_state_indices=tuple(i + 1 for i in taps), target_hidden_size=hidden, dtype="float32",
    )  # fmt: skip
    target = targets.pack_target(
        targets.Target(target_config, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")), target_config
    )
    drafter = drafters.Drafter(config, rngs=nnx.Rngs(1), dtype=jnp.dtype("float32"))
    weights = drafters.pack_drafter(drafter, config, target.embed_tokens, target.lm_head)

    runner = TargetRunner(
        target_config,
        target,
        taps=config.hidden_state_indices,
        num_speculative_tokens=block - 1,
        max_num_seqs=1,
        max_model_len=MAX_LEN,
        num_pages=DecoderSizes.num_pages(1, MAX_LEN, page_size=16),
        widths=(1, block),
    )
    runner.capture(progress=False)

    def target_ms(rows: int) -> float:
        tables = 1 + np.arange(runner.limits.table_width)[None]
        batch = TargetBatch(tokens=[[1] * rows], start=[LIVE], num_drafts=[rows - 1], block_tables=tables)
        return median_ms(lambda: runner.run(batch))

    plain, verify = target_ms(1), target_ms(block)

    engine = DraftEngine(config, weights, max_num_seqs=1, max_model_len=MAX_LEN, external_pages=True)
    engine.capture(progress=False)
    engine.add_request(0)
    one = np.ones(1, np.int32)
    step = TargetStep(
        request_ids=[0], num_context=one * block, num_rejected=one * (block - 1), num_sampled=one, last_sampled=one,
        next_prefill=one * 0, start_position=one * LIVE, block_tables=1 + np.arange(MAX_LEN // 16)[None],
    )  # fmt: skip
    features = jax.device_put(np.ones((block, config.feature_size), np.float32))
    draft = median_ms(lambda: engine.propose(step, features))
    return {
        "hidden": hidden, "layers": layers, "mlp": mlp, "draft_layers": draft_layers, "block": block,
        "plain_ms": round(plain, 3), "verify_ms": round(verify, 3), "draft_ms": round(draft, 3),
        "ratio": round((verify + draft) / plain, 3),
    }  # fmt: skip


def main() -> None:
    rows = [time_shape(*shape) for shape in track(SHAPES, "Timing shapes", disable=not sys.stderr.isatty())]
    out = Path(__file__).parent / "results" / "builtin-pair-shapes.jsonl"
    with out.open("a") as file:
        for row in rows:
            file.write(json.dumps({"jax": jax.__version__, "device": "two CPU cores"} | row) + "\n")
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()))
    best = min(rows, key=lambda row: row["ratio"])
    print(json.dumps({"job": "builtin_pair_shapes", "rows": len(rows), "best": best}))


if __name__ == "__main__":
    main()
