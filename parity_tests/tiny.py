"""Small pairs with prime or odd sizes, and the same forward in both frameworks.

`FRAMEWORKS` names the mirrored modules of each, so that one test body runs both: their functions have the same names
and argument order, which is itself part of what the tests hold.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_ref.kv_cache
from jax_dflash.config import DraftConfig, Geometry, TargetConfig, plain_layers
from jax_dflash.names import draft_tensors, target_tensors

GEOMETRY = Geometry(
    hidden_size=23, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=10, intermediate_size=41, rms_norm_eps=1e-6,
    rope_theta=1e4, vocab_size=61, max_position_embeddings=128,
)  # fmt: skip
DRAFT = DraftConfig(
    geometry=GEOMETRY,
    layers=plain_layers(GEOMETRY),
    block_size=7,
    mask_token_id=59,
    hidden_state_indices=(1, 3, 5),
    target_hidden_size=23,
    dtype="float32",
)
# One layer of each kind: a causal window, one to both sides, all keys.
WINDOWED = replace(
    DRAFT,
    layers=tuple(
        replace(layer, window=window, causal=causal)
        for layer, window, causal in zip(DRAFT.layers, (4, 6, None), (True, False, False), strict=True)
    ),
)
TARGET = TargetConfig(
    geometry=replace(GEOMETRY, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=6),
    tie_word_embeddings=False,
    dtype="float32",
)


def resized(**sizes) -> DraftConfig:
    """DRAFT with other sizes of its layers."""
    geometry = replace(GEOMETRY, **sizes)
    return replace(DRAFT, geometry=geometry, layers=plain_layers(geometry))


@dataclass(frozen=True)
class Framework:
    """One side of the pair: its modules by name, and how its arrays are made and read."""

    name: str
    package: str
    array: Callable[..., Any]
    zero_pool: Callable[..., Any]
    run: Callable[..., Any]

    @property
    def dense(self):
        return importlib.import_module(f"{self.package}.attention.dense")

    def __getattr__(self, module: str):
        return importlib.import_module(f"{self.package}.{module}")

    def floats(self, x, dtype: str = "float32"):
        """A numpy array in the framework's dtype of that name; both round float32 to bfloat16 alike."""
        return self.array(np.asarray(x), self.numerics.as_dtype(dtype))

    def ints(self, x):
        return self.array(np.asarray(x, np.int32), None)

    def tree(self, values: dict[str, np.ndarray], dtype: str = "float32") -> dict:
        return {name: self.floats(value, dtype) for name, value in values.items()}

    def pool(self, shape: tuple[int, ...], dtype: str = "float32", fill=None):
        """A zero pool, or one that holds `fill`."""
        pool = self.zero_pool(shape, self.numerics.as_dtype(dtype))
        if fill is None:
            return pool
        if self.name == "jax":
            return jnp.asarray(fill, pool.dtype)
        pool[:] = torch.as_tensor(fill)
        return pool


def numpy(x) -> np.ndarray:
    """Any framework's array as numpy: integers as they are, floats as float64, which holds them all exactly."""
    x = (x.double() if x.is_floating_point() else x).numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
    return x if x.dtype.kind in "iu" else x.astype(np.float64)


def _torch_array(x: np.ndarray, dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(x if x.dtype.kind in "fiu" else x.astype(np.float32))).to(dtype)


def _torch_run(function, *args):
    with torch.no_grad():
        return function(*args)


FRAMEWORKS = {
    "jax": Framework("jax", "jax_dflash", jnp.asarray, jnp.zeros, lambda function, *args: jax.jit(function)(*args)),
    "torch": Framework("torch", "torch_ref", _torch_array, torch_ref.kv_cache.zero_pool, _torch_run),
}


def random_values(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Matrices at a scale that keeps activations near 1, and norms that differ from each other."""
    rng = np.random.default_rng(seed)
    draw = {2: lambda s: rng.standard_normal(s) / np.sqrt(s[1]), 1: lambda s: rng.uniform(0.5, 1.5, s)}
    return {name: draw[len(shape)](shape).astype(np.float32) for name, shape in shapes.items()}


def draft_weights(f: Framework, config: DraftConfig = DRAFT, dtype: str = "float32", seed: int = 0):
    """A drafter's packed weights with an embedding and head of its own. The embedding is small: at scale 1 the mask token
    alone would decide every draft, and drafts would agree whatever the context."""
    g, rng = config.geometry, np.random.default_rng(seed + 1)
    tables = rng.standard_normal((2, g.vocab_size, g.hidden_size)).astype(np.float32)
    tables[0] /= 16
    values = f.tree(random_values(draft_tensors(config), seed), dtype)
    return f.drafter.pack(values, config, *(f.floats(table, dtype) for table in tables))


def forward(f: Framework, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Every stage of draft and target forward over two requests, by name: 5 and 3 context rows, then blocks of 7."""
    rng = np.random.default_rng(7)
    B, T, page, C = 2, DRAFT.block_size, 4, 8
    tables = np.array([[5, 2, 7, 0], [3, 6, 1, 0]], np.int32)
    context_positions = np.array([0, 1, 2, 3, 4, 0, 1, 2], np.int32)
    positions = np.array([5, 3], np.int32)[:, None] + np.arange(T, dtype=np.int32)

    def slots(rows, at):
        return tables[rows, at // page] * page + at % page

    context_slots = slots(np.array([0] * 5 + [1] * 3), context_positions)
    query_slots = slots(np.arange(B)[:, None], positions).reshape(-1)
    seq_lens = positions[:, -1] + 1
    ids = rng.integers(0, GEOMETRY.vocab_size, (B, T))

    def draft(weights, pool, features, ids, ints):
        context_positions, context_slots, positions, query_slots, tables, seq_lens = ints

        def attend(pool, layer, q, k, v):
            pool = f.kv_cache.store_layer(
                pool, layer, k.reshape(B * T, *k.shape[2:]), v.reshape(B * T, *v.shape[2:]), query_slots
            )
            return pool, f.dense.attention(pool, layer, q, tables, seq_lens)

        combined = f.drafter.combine_hidden_states(weights, features)
        kv = f.drafter.precompute_context_kv(weights, DRAFT, combined, context_positions)
        pool = f.kv_cache.store_context(pool, kv, context_slots)
        pool, hidden = f.drafter.query_forward(
            weights, DRAFT, pool, f.drafter.embed(weights, DRAFT, ids), positions, attend
        )
        return {
            "combined": combined,
            "context_kv": kv,
            "hidden": hidden,
            "logits": f.drafter.compute_logits(weights, DRAFT, hidden),
            "pool": pool,
        }

    def target(weights, pool, ids, ints):
        positions, query_slots, tables, seq_lens = ints

        def attend(pool, layer, q, k, v):
            pool = f.kv_cache.store_layer(
                pool, layer, k.reshape(B * T, *k.shape[2:]), v.reshape(B * T, *v.shape[2:]), query_slots
            )
            return pool, f.dense.attention(pool, layer, q, tables, seq_lens, positions)

        taps = DRAFT.hidden_state_indices
        pool, hidden, features = f.target.target_forward(
            weights, TARGET, pool, f.target.embed(weights, ids), positions, attend, taps
        )
        return {
            "target_hidden": hidden,
            "target_features": features,
            "target_logits": f.target.compute_logits(weights, hidden),
        }

    def pool_for(config):
        return f.pool(f.kv_cache.pool_shape(config.geometry, 8, page), dtype)

    features = f.floats(rng.standard_normal((C, DRAFT.feature_size)).astype(np.float32), dtype)
    draft_ints = tuple(map(f.ints, (context_positions, context_slots, positions, query_slots, tables, seq_lens)))
    target_ints = tuple(map(f.ints, (positions, query_slots, tables, seq_lens)))
    taps = f.run(draft, draft_weights(f, dtype=dtype), pool_for(DRAFT), features, f.ints(ids), draft_ints)
    target_weights = f.target.pack(f.tree(random_values(target_tensors(TARGET), 3), dtype), TARGET)
    taps |= f.run(target, target_weights, pool_for(TARGET), f.ints(ids), target_ints)
    return {name: numpy(value) for name, value in taps.items()}


def relative_rmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
