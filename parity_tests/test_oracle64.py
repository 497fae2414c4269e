"""The float64 oracle against literal numbers and second formulas: what judges both frameworks needs a judge of its own."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from parity_tests.harness.oracle64 import Step, attend, load, prepare_inputs, rms_norm, rotate, run, visible_keys
from parity_tests.harness.oracle64_config import Rope, inv_freq, read_config

CONFIG = {
    "hidden_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": None,
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
    "block_size": 4,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 2]},
}
D, N, K, H, F, V, DT, L = 14, 4, 2, 6, 11, 101, 7, 2
PAGES, PAGE = 9, 4
SIZES = {"page_size": PAGE, "max_model_len": 16, "num_speculative_tokens": 3}
F_STEP = {  # fixture F
    "start_position": [4, 0],
    "num_context": [4, 2],
    "num_rejected": [1, 0],
    "num_sampled": [3, 0],
    "last_sampled": [50, 7],
    "next_prefill": [8, 60],
    "request_index": [2, 0],
    "block_tables": [[5, 2, 7, 0], [3, 6, 0, 0]],
}


def make_step(hidden_states=None, **fields):
    """A Step from lists; hidden states are drawn where none are given."""
    fields = F_STEP | fields
    if hidden_states is None:
        hidden_states = np.random.default_rng(1).standard_normal((4, sum(fields["num_context"]), DT))
    return Step(**{name: np.array(value) for name, value in fields.items()}, hidden_states=hidden_states)


def make_tensors():
    """Random weights; norms differ from layer to layer so that a swapped one shows."""
    rng = np.random.default_rng(0)
    shapes = {"fc": (D, 2 * DT), "hidden_norm": (D,), "norm": (D,), "embed_tokens": (V, D), "lm_head": (V, D)}
    for i in range(L):
        attention = {"q_proj": (N * H, D), "k_proj": (K * H, D), "v_proj": (K * H, D), "o_proj": (D, N * H)}
        attention |= {"q_norm": (H,), "k_norm": (H,)}
        mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
        shapes |= {f"layers.{i}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"layers.{i}.mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"layers.{i}.{name}": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {
        f"{name}.weight": rng.uniform(0.5, 1.5, shape)
        if len(shape) == 1
        else rng.standard_normal(shape) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


def make_pool():
    """NaN but for page 5, which holds positions 0..3 of fixture F's first request."""
    pool = np.full((L, 2, PAGES, PAGE, K, H), np.nan)
    pool[:, :, 5] = np.random.default_rng(2).standard_normal((L, 2, PAGE, K, H))
    return pool


def run_f(step=None, *, num_reqs=2, context_rows=6, forced=None, pool=None, config=CONFIG, tensors=None, sizes=SIZES):
    """Fixture F through the oracle, or a variation of it."""
    return run(
        config,
        make_tensors() if tensors is None else tensors,
        make_step() if step is None else step,
        make_pool() if pool is None else pool,
        num_reqs=num_reqs,
        context_rows=context_rows,
        forced=forced,
        **sizes,
    )


def check_ints(got, expected):
    """Literal lists against the int32 taps of the same names."""
    for name, value in expected.items():
        assert got[name].dtype == np.int32, name
        assert got[name].tolist() == value, name


F_INTS = {
    "context_positions": [4, 5, 6, 0, 0, 1],
    "context_slots": [8, 9, 10, -1, 12, 13],
    "input_ids": [50, 99, 99, 99, 60, 99, 99, 99],
    "query_positions": [7, 8, 9, 10, 2, 3, 4, 5],
    "query_slots": [11, 28, 29, 30, 14, 15, 24, 25],
    "query_start_loc": [0, 4, 8],
    "seq_lens": [11, 6],
    "sample_indices": [1, 2, 3, 5, 6, 7],
    "sample_positions": [8, 9, 10, 3, 4, 5],
    "sample_request": [2, 2, 2, 0, 0, 0],
}
F_PADDING = {  # what two more requests and two more context rows append
    "context_positions": [0] * 2,
    "context_slots": [-1] * 2,
    "input_ids": [0] * 8,
    "query_positions": [0] * 8,
    "query_slots": [-1] * 8,
    "query_start_loc": [8, 8],
    "seq_lens": [0, 0],
    "sample_indices": [0] * 6,
    "sample_positions": [0] * 6,
    "sample_request": [-1] * 6,
}


def test_fixture_f():
    """Would catch: any integer that is off for a rejection beside a prefill, or for the padding of a larger bucket."""
    check_ints(run_f(), F_INTS)
    check_ints(run_f(num_reqs=4, context_rows=8), {name: F_INTS[name] + F_PADDING[name] for name in F_INTS})


def test_worked_example():
    """Would catch: an anchor from the wrong field, or positions that start from the last row and not the last valid."""
    fields = {
        "start_position": [6, 0],
        "num_context": [4, 5],
        "num_rejected": [2, 0],
        "num_sampled": [2, 0],
        "last_sampled": [66, 13],
        "next_prefill": [14, 71],
        "request_index": [3, 1],
        "block_tables": [[5, 6, 7, 0, 0, 0, 0, 0], [9, 10, 11, 0, 0, 0, 0, 0]],
    }
    sizes = SIZES | {"max_model_len": 32}
    got = prepare_inputs(make_step(**fields), 500, num_reqs=4, context_rows=9, num_pages=12, **sizes)
    expected = {
        "input_ids": [66, 500, 500, 500, 71, 500, 500, 500] + [0] * 8,
        "query_positions": [8, 9, 10, 11, 5, 6, 7, 8] + [0] * 8,
        "query_start_loc": [0, 4, 8, 8, 8],
        "seq_lens": [12, 9, 0, 0],
        "query_slots": [28, 29, 30, 31, 41, 42, 43, 44] + [-1] * 8,
        "context_positions": [6, 7, 0, 0, 0, 1, 2, 3, 4],
        "context_slots": [26, 27, -1, -1, 36, 37, 38, 39, 40],
        "sample_indices": [1, 2, 3, 5, 6, 7] + [0] * 6,
        "sample_positions": [9, 10, 11, 6, 7, 8] + [0] * 6,
        "sample_request": [3, 3, 3, 1, 1, 1] + [-1] * 6,
    }
    check_ints(got, expected)


ONE = {  # one decoding request, nothing rejected
    "num_rejected": [0],
    "num_sampled": [1],
    "last_sampled": [50],
    "next_prefill": [0],
    "request_index": [0],
}


@pytest.mark.parametrize(
    "start, num_context, table, max_model_len, expected",
    [
        (
            26,
            4,
            [1, 2, 3, 4, 5, 6, 7, 8],
            32,
            {
                "query_positions": [30, 31, 31, 31],
                "query_slots": [34, 35, -1, -1],
                "seq_lens": [32],
                "sample_positions": [31, 32, 33],
            },
        ),
        (
            13,
            2,
            [5, 2, 7, 9],
            16,
            {"query_positions": [15, 15, 15, 15], "query_slots": [39, -1, -1, -1], "seq_lens": [16]},
        ),
        (
            13,
            4,
            [5, 2, 7, 9],
            16,
            {
                "context_positions": [13, 14, 15, 16],
                "context_slots": [37, 38, 39, -1],
                "query_positions": [15] * 4,
                "query_slots": [-1] * 4,
                "seq_lens": [16],
            },
        ),
        (
            6,
            4,
            [5, 0, 7, 9],
            16,
            {"context_slots": [-1, -1, 28, 29], "query_slots": [30, 31, 36, 37], "seq_lens": [14]},
        ),
        (
            10,
            2,
            [5, 2, 7, 0],
            16,
            {"context_slots": [30, 31], "query_slots": [-1] * 4, "query_positions": [12, 13, 14, 15]},
        ),
    ],
    ids=["clamp", "C28", "context past the limit", "evicted page", "null lookahead"],
)
def test_limits(start, num_context, table, max_model_len, expected):
    """Would catch: a clamped page column that aliases into a live page, a clamped sample position, a written null page."""
    step = make_step(start_position=[start], num_context=[num_context], block_tables=[table], **ONE)
    sizes = SIZES | {"max_model_len": max_model_len}
    check_ints(prepare_inputs(step, 99, num_reqs=1, context_rows=num_context, num_pages=10, **sizes), expected)


def test_names_and_order():
    """Would catch: a tap that is missing, renamed or out of order, which a comparer walks to find the first difference."""
    layer = "n1 q k v attn post_attention n2 act out".split()
    expected = ["features", *F_INTS, "combined", "context_norm", "context_k", "context_v", "embeds"]
    expected += [f"layers.{i}.{name}" for i in range(L) for name in layer]
    got = run_f()
    assert list(got) == expected + ["hidden", "logits", "draft_tokens", "pool"]
    assert all(value.dtype in (np.float64, np.int32) for value in got.values())
    assert got["layers.1.q"].shape == (2, 4, N, H) and got["layers.1.k"].shape == (2, 4, K, H)
    assert got["context_v"].shape == (L, 6, K, H) and got["logits"].shape == (2, 3, V)


def test_target_layer_ids():
    """Would catch: C01, an id read as the stream that enters its layer, or as two layers further."""
    states = np.array([0, 1, 11, 111, 1111])[:, None, None] * np.ones((1, 6, DT))
    features = run_f(make_step(states), context_rows=7)["features"]
    assert features[:6].tolist() == [[1] * DT + [111] * DT] * 6
    assert np.isnan(features[6]).all()


def test_k_norm_literal():
    """Would catch: C42, layer 0's K norm used for every layer."""
    small = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "rms_norm_eps": 0}
    tensors = {name: np.ones((2, 2)) if value.ndim > 1 else np.ones(2) for name, value in make_tensors().items()}
    tensors |= {"fc.weight": np.ones((2, 2 * DT)), "embed_tokens.weight": np.ones((V, 2))}
    tensors["lm_head.weight"] = np.ones((V, 2))
    tensors |= {f"layers.{i}.self_attn.k_proj.weight": np.eye(2) for i in range(L)}
    tensors["layers.1.self_attn.k_norm.weight"] = np.array([2, 0.5])
    step = make_step(start_position=[0], num_context=[1], block_tables=[[5, 2, 7, 0]], **ONE)
    got = run_f(
        step,
        config=CONFIG | small,
        tensors=tensors,
        num_reqs=1,
        context_rows=1,
        pool=np.zeros((L, 2, PAGES, PAGE, 1, 2)),
        forced={"context_norm": [[3, 4]]},
    )
    np.testing.assert_allclose(got["context_k"][0, 0, 0], [0.848528, 1.131371], atol=1e-6)
    np.testing.assert_allclose(got["context_k"][1, 0, 0], [1.697056, 0.565685], atol=1e-6)


def test_gqa_order():
    """Would catch: C40, KV heads tiled [10, 20, 10, 20] over the query heads and not repeated."""
    v = np.array([10.0, 20.0])[:, None] * np.ones(H)
    pool = make_pool()
    pool[:, 1, 5] = v
    forced = {"context_v": np.broadcast_to(v, (L, 6, K, H)), "layers.0.v": np.broadcast_to(v, (2, 4, K, H))}
    attn = run_f(pool=pool, forced=forced)["layers.0.attn"]
    np.testing.assert_allclose(attn, np.broadcast_to(np.array([10, 10, 20, 20])[:, None], (2, 4, N, H)), rtol=1e-14)


def test_rope_literal():
    """Would catch: interleaved pairs, a turned sign, theta to the power -j/H (C24: pair 1 of 2 turns by 1 at 100)."""
    got = rotate(np.array([[[1.0, 2.0, 3.0, 5.0]]]), np.array([100]), Rope(inv_freq(1e4, 4)))[0, 0]
    cos, sin, cos1, sin1 = math.cos(100), math.sin(100), math.cos(1), math.sin(1)
    expected = [cos - 3 * sin, 2 * cos1 - 5 * sin1, 3 * cos + sin, 5 * cos1 + 2 * sin1]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_partial_rope_literal():
    """Would catch: pairs taken across the whole head, a tail that is turned or scaled, a scale on the cosine alone."""
    got = rotate(np.array([[[1.0, 2, 3, 5, 7, 11]]]), np.array([100]), Rope(inv_freq(1e4, 4), 1.5))[0, 0]
    cos, sin, cos1, sin1 = math.cos(100), math.sin(100), math.cos(1), math.sin(1)
    expected = [cos - 3 * sin, 2 * cos1 - 5 * sin1, 3 * cos + sin, 5 * cos1 + 2 * sin1]
    np.testing.assert_allclose(got[:4], [1.5 * a for a in expected], rtol=1e-12)
    assert got[4:].tolist() == [7, 11]


def test_rejected_row_poisoned():
    """Would catch: C45, a rejected row that reaches the cache, or NaN in pages nobody owns that reaches a query."""
    states = np.random.default_rng(1).standard_normal((4, 6, DT))
    clean = run_f(make_step(states))
    states[:, 3] = np.nan
    got = run_f(make_step(states))
    live = [0, 1, 2, 4, 5]
    for name, value in got.items():
        if name in ("features", "combined", "context_norm"):
            value, clean[name] = value[live], clean[name][live]
        if name in ("context_k", "context_v"):
            value, clean[name] = value[:, live], clean[name][:, live]
        if name != "pool":
            assert np.isfinite(value).all(), name
        np.testing.assert_array_equal(value, clean[name], err_msg=name)
    rows = got["pool"].reshape(L, 2, -1, K, H)
    for i in range(L):
        np.testing.assert_array_equal(rows[i, 0, 11], got[f"layers.{i}.k"][0, 0])
        np.testing.assert_array_equal(rows[i, 1, 11], got[f"layers.{i}.v"][0, 0])


@pytest.mark.parametrize("order", ["C", "F"])
def test_pool_writes(order):
    """Would catch: PAD that wraps to the last row, a padded request at slot 0, a changed argument, a write lost."""
    before = np.asarray(make_pool(), order=order)
    got = run_f(pool=before, num_reqs=3, context_rows=9)
    np.testing.assert_array_equal(before, make_pool())
    expected = make_pool().reshape(L, 2, -1, K, H)
    for i in range(L):
        for side, name in enumerate("kv"):
            for row, slot in ((0, 8), (1, 9), (2, 10), (4, 12), (5, 13)):
                expected[i, side, slot] = got[f"context_{name}"][i, row]
            for row, slot in enumerate([11, 28, 29, 30, 14, 15, 24, 25]):
                expected[i, side, slot] = got[f"layers.{i}.{name}"][row // 4, row % 4]
    np.testing.assert_array_equal(got["pool"].reshape(L, 2, -1, K, H), expected)


def test_past_the_limit_writes_nothing():
    """Would catch: C28, position 16 written over position 12 of a full table."""
    step = make_step(start_position=[13], num_context=[2], block_tables=[[5, 2, 7, 8]], **ONE)
    before = np.random.default_rng(3).standard_normal((L, 2, PAGES, PAGE, K, H))
    got = run_f(step, pool=before, num_reqs=1, context_rows=2)
    changed = (got["pool"] != before).any(axis=(0, 1, 4, 5)).reshape(-1)
    assert np.flatnonzero(changed).tolist() == [33, 34, 35]
    assert np.isfinite(got["logits"]).all()


CHILDREN = {  # who reads a tap at once; `+` stands for the next layer, or the final norm after the last
    "features": ["combined"],
    "combined": ["context_norm"],
    "context_norm": ["context_k", "context_v"],
    "context_k": ["pool", *(f"layers.{i}.attn" for i in range(L))],
    "context_v": ["pool", *(f"layers.{i}.attn" for i in range(L))],
    "embeds": ["layers.0.n1", "layers.0.post_attention"],
    "hidden": ["logits"],
    "logits": ["draft_tokens"],
}
LAYER_CHILDREN = {
    "n1": "q k v",
    "q": "attn",
    "k": "attn pool",
    "v": "attn pool",
    "attn": "post_attention",
    "post_attention": "n2 out",
    "n2": "act",
    "act": "out",
}
for _i in range(L):
    CHILDREN |= {
        f"layers.{_i}.{name}": [c if c == "pool" else f"layers.{_i}.{c}" for c in children.split()]
        for name, children in LAYER_CHILDREN.items()
    }
    CHILDREN[f"layers.{_i}.out"] = (
        [f"layers.{_i + 1}.n1", f"layers.{_i + 1}.post_attention"] if _i + 1 < L else ["hidden"]
    )


def downstream(name):
    """Every tap that depends on one."""
    return {child for c in CHILDREN.get(name, ()) for child in {c} | downstream(c)}


def test_forcing_all_with_own_values():
    """Would catch: a forced tap used in another place or shape than the computed one."""
    got = run_f()
    again = run_f(forced={name: got[name] for name in CHILDREN})
    for name in got:
        np.testing.assert_array_equal(again[name], got[name], err_msg=name)


@pytest.mark.parametrize("name", CHILDREN)
def test_forcing_one(name):
    """Would catch: a tap not forced for all its readers, recorded as forced, or leaking to what does not read it."""
    plain = run_f()
    # One constant would vanish in the norm that follows most taps.
    forced = run_f(forced={name: np.random.default_rng(4).standard_normal(plain[name].shape)})
    changed = {other for other in plain if not np.array_equal(forced[other], plain[other], equal_nan=True)}
    assert changed | {"draft_tokens"} == downstream(name)  # an argmax may survive


def test_padding_invariance():
    """Would catch: a padded request or context row that reads, writes or shifts anything of a live one."""
    exact, padded = run_f(), run_f(num_reqs=5, context_rows=11)
    for name, value in exact.items():
        live = tuple(slice(size) for size in value.shape)
        if value.dtype == np.int32:
            np.testing.assert_array_equal(padded[name][live], value, err_msg=name)
        else:  # another row count may take another matrix kernel
            np.testing.assert_allclose(padded[name][live], value, rtol=1e-12, atol=1e-12, err_msg=name)


def test_padded_rows_may_be_nan():
    """Would catch: a warning, a write or a mix of rows from what padded rows hold."""
    exact = run_f(num_reqs=3, context_rows=7)
    forced = {}
    for name in CHILDREN:
        forced[name] = exact[name].copy()
        if name.startswith("context_") and name != "context_norm":
            forced[name][:, [3, 6]] = np.nan
        else:
            forced[name][[3, 6] if len(exact[name]) == 7 else 2] = np.nan
    got = run_f(num_reqs=3, context_rows=7, forced=forced)
    np.testing.assert_array_equal(got["pool"], exact["pool"])
    np.testing.assert_array_equal(got["draft_tokens"][:2], exact["draft_tokens"][:2])
    assert (got["layers.0.attn"][2] == 0).all()


def test_attention_second_formula():
    """Would catch: keys of a wrong page or request, a causal mask, a wrong scale; position by position from the taps."""
    got, before = run_f(), make_pool()
    sources = [  # (request, its tap row by position): old pool rows, this step's context, then the block
        [("pool", j) for j in range(4)] + [("context", j) for j in range(3)] + [("block", j) for j in range(4)],
        [("context", 4), ("context", 5)] + [("block", j) for j in range(4)],
    ]
    for i in range(L):
        for r, keys in enumerate(sources):
            where = {
                side: {
                    "pool": before[i, s, 5],
                    "context": got[f"context_{side}"][i],
                    "block": got[f"layers.{i}.{side}"][r],
                }
                for s, side in enumerate("kv")
            }
            for t, h in np.ndindex(4, N):
                q = got[f"layers.{i}.q"][r, t, h]
                e = [math.exp(math.fsum(q * where["k"][name][j][h // 2]) / math.sqrt(H)) for name, j in keys]
                v = np.array([where["v"][name][j][h // 2] for name, j in keys])
                out = [math.fsum(e * v[:, d]) / math.fsum(e) for d in range(H)]
                np.testing.assert_allclose(got[f"layers.{i}.attn"][r, t, h], out, rtol=1e-12, atol=1e-13)


def test_attention_edges():
    """Would catch: a softmax that overflows for want of its maximum, or NaN for a request of no keys."""
    rows = np.full((2, 8, 1, 2), np.nan)
    rows[0, 4:6, 0], rows[1, 4:6, 0] = [[2000, 0], [0, 0]], [[3, 4], [7, 9]]
    tables, lens = np.array([[1, 0], [0, 0]]), np.array([2, 0])
    out = attend(np.ones((2, 1, 1, 2)), rows, tables, lens, 4, causal=False, window=None)
    assert out.tolist() == [[[[3, 4]]], [[[0, 0]]]]


def norm(x, weight):
    """The norm of one row in plain Python."""
    scale = math.sqrt(math.fsum(a * a for a in x) / len(x) + 1e-6)
    return np.array([a / scale * w for a, w in zip(x, weight, strict=True)])


def matvec(weight, x):
    """[out, in] times [in] in plain Python."""
    return np.array([math.fsum(w * a for w, a in zip(row, x, strict=True)) for row in weight])


def turn(head, position):
    """RoPE of one head as products of complex numbers, half-split."""
    z = [
        complex(head[j], head[j + H // 2]) * complex(math.cos(angle), math.sin(angle))
        for j in range(H // 2)
        for angle in [position * 1e4 ** (-2 * j / H)]
    ]
    return np.array([c.real for c in z] + [c.imag for c in z])


def test_each_tap_from_the_one_before():
    """Would catch: a wrong residual, weight or norm: request 0, row 2 (position 9), context row 1 (position 5)."""
    w = {name.removesuffix(".weight"): value for name, value in make_tensors().items()}
    step = make_step()
    got = run_f(step)
    features = np.concatenate([step.hidden_states[1, 1], step.hidden_states[3, 1]])
    expected = {"combined": matvec(w["fc"], features), "embeds": w["embed_tokens"][99]}
    expected["context_norm"] = norm(got["combined"][1], w["hidden_norm"])
    actual = {"combined": got["combined"][1], "embeds": got["embeds"][0, 2], "context_norm": got["context_norm"][1]}
    x = got["embeds"][0, 2]
    for i in range(L):
        at, a = f"layers.{i}.", f"layers.{i}.self_attn."
        tap = {name.removeprefix(at): value[0, 2] for name, value in got.items() if name.startswith(at)}
        q, k = (matvec(w[f"{a}{p}_proj"], tap["n1"]).reshape(-1, H) for p in "qk")
        ck = matvec(w[a + "k_proj"], got["context_norm"][1]).reshape(K, H)
        gate, up = (matvec(w[f"{at}mlp.{p}_proj"], tap["n2"]) for p in ("gate", "up"))
        new = {
            "n1": norm(x, w[at + "input_layernorm"]),
            "q": np.array([turn(norm(head, w[a + "q_norm"]), 9) for head in q]),
            "k": np.array([turn(norm(head, w[a + "k_norm"]), 9) for head in k]),
            "v": matvec(w[a + "v_proj"], tap["n1"]).reshape(K, H),
            "post_attention": x + matvec(w[a + "o_proj"], tap["attn"].reshape(-1)),
            "n2": norm(tap["post_attention"], w[at + "post_attention_layernorm"]),
            "act": np.array([g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]),
            "out": tap["post_attention"] + matvec(w[at + "mlp.down_proj"], tap["act"]),
        }
        expected |= {at + name: value for name, value in new.items()}
        actual |= {at + name: tap[name] for name in new}
        expected[f"context_k {i}"] = np.array([turn(norm(head, w[a + "k_norm"]), 5) for head in ck])
        expected[f"context_v {i}"] = matvec(w[a + "v_proj"], got["context_norm"][1]).reshape(K, H)
        actual |= {f"context_k {i}": got["context_k"][i, 1], f"context_v {i}": got["context_v"][i, 1]}
        x = tap["out"]
    expected["hidden"], actual["hidden"] = norm(x, w["norm"]), got["hidden"][0, 1]
    expected["logits"], actual["logits"] = matvec(w["lm_head"], got["hidden"][0, 1]), got["logits"][0, 1]
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-12, atol=1e-13, err_msg=name)


def test_ties_take_the_first():
    """Would catch: an argmax that returns the last of equal logits."""
    logits = np.zeros((2, 3, V))
    logits[0, 1, [17, 40]] = 2
    assert run_f(forced={"logits": logits})["draft_tokens"].tolist() == [[0, 17, 0], [0, 0, 0]]


def test_rms_norm_eps_inside_the_root():
    """Would catch: eps added after the root."""
    np.testing.assert_allclose(rms_norm(np.array([1.0, 1.0]), np.array([1.0, 2.0]), 3.0), [0.5, 1.0], rtol=1e-15)


def changed(**change):
    """CONFIG with some keys set; a dict adds to dflash_config."""
    nested = change.pop("dflash_config", {})
    return CONFIG | change | {"dflash_config": CONFIG["dflash_config"] | nested}


def speculators(**change):
    """The drafter of CONFIG as a speculators file, with the keys left out that equal the defaults of its class."""
    inner = {key: CONFIG[key] for key in CONFIG if key.endswith(("_size", "_layers", "_heads", "_dim", "_types"))}
    del inner["block_size"]
    return {
        "speculators_model_type": "dflash",
        "block_size": 4,
        "mask_token_id": 99,
        "aux_hidden_state_layer_ids": [1, 3],
        "transformer_layer_config": inner | change,
    }


S, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


def of(config, what):
    """One property of every layer."""
    return [getattr(layer, what) for layer in read_config(config).layers]


def theta_of(config):
    """The base of each layer, from the second pair of a head of 6."""
    return [round(layer.rope.inv_freq[1] ** -3, 3) for layer in read_config(config).layers]


@pytest.mark.parametrize(
    "change, theta",
    [
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e7}, "rope_theta": 1e4}, 1e7),
        ({"rope_scaling": {"rope_theta": 5e5}, "rope_theta": None}, 5e5),
        ({"rope_scaling": {"rope_theta": 5e5}, "rope_theta": 1e4}, 5e5),
        ({"rope_scaling": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, 1e7),
    ],
)
def test_theta_precedence(change, theta):
    """Would catch: C24, a stale flat base that wins, or a table without a base that loses it."""
    assert theta_of(changed(**change)) == [theta] * L
    inner = {key: value for key, value in change.items() if value is not None}
    assert theta_of(speculators(**inner)) == [theta] * L


def test_theta_missing():
    """Would catch: C24, a base that is guessed where z-lab files have none, or 1e6 for a speculators file of 1e4."""
    with pytest.raises(ValueError, match="rope_theta"):
        read_config(changed(rope_theta=None))
    assert theta_of(speculators()) == [1e4] * L
    angles = 100 * read_config(speculators(head_dim=4)).layers[0].rope.inv_freq
    np.testing.assert_allclose(angles, [100, 1], rtol=1e-12)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_by_layer_type(key):
    """Would catch: C25, one table shared by layers of both types, or the sliding one taken for all."""
    tables = {S: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6, **YARN}}
    config = changed(layer_types=[S, FULL], sliding_window=8, **{key: tables})
    assert theta_of(config)[0] == 1e4 and of(config, "rope")[0].scale == 1
    expected = read_config(changed(rope_theta=1e6, rope_scaling=YARN)).layers[1].rope
    np.testing.assert_array_equal(of(config, "rope")[1].inv_freq, expected.inv_freq)
    assert of(config, "rope")[1].scale == expected.scale
    k = run_f(config=config)["layers.1.k"]
    other = run_f(config=changed(layer_types=[S, FULL], sliding_window=8))["layers.1.k"]
    assert np.linalg.norm(k[0, 0]) / np.linalg.norm(other[0, 0]) == pytest.approx(1.4158883083, rel=1e-9)


@pytest.mark.parametrize(
    "change, scale",
    [
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0}, 1.2772588722),
        ({}, 1.4158883083),
        ({"mscale": 2, "mscale_all_dim": 0.5}, (1 + 0.2 * math.log(64)) / (1 + 0.05 * math.log(64))),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.25}, 1.25),
        ({"attention_factor": 0.75}, 0.75),
        ({"factor": 1}, 1.0),
    ],
)
def test_yarn_scale(change, scale):
    """Would catch: C22, mscale ignored where both are given, or an explicit factor overruled."""
    rope = read_config(changed(rope_scaling=YARN | change)).layers[0].rope
    assert rope.scale == pytest.approx(scale, rel=1e-10)


@pytest.mark.parametrize("change", [{}, {"beta_fast": 16, "beta_slow": 2}, {"truncate": False}, {"factor": 3.5}])
@pytest.mark.parametrize("theta, head_dim", [(1e6, 128), (1e4, 64), (1e7, 80)])
def test_yarn_frequencies(theta, head_dim, change):
    """Would catch: a ramp by rotations and not by channel, ends that are swapped or rounded inwards, 2 pi lost."""
    config = changed(rope_theta=theta, head_dim=head_dim, rope_parameters=YARN | change)
    got, p = read_config(config).layers[0].rope.inv_freq, {"beta_fast": 32, "beta_slow": 1} | YARN | change

    def rotations(j):
        return 4096 / (2 * math.pi) / theta ** (2 * j / head_dim)

    ends = []
    for beta in (p["beta_fast"], p["beta_slow"]):  # bisection: rotations fall as j grows
        a, b = 0.0, float(head_dim)
        for _ in range(100):
            a, b = ((a + b) / 2, b) if rotations((a + b) / 2) > beta else (a, (a + b) / 2)
        ends.append(a)
    if p.get("truncate", True):
        ends = [ends[0] // 1, -(-ends[1] // 1)]
    assert 0 < ends[0] < ends[1] < head_dim / 2
    for j in range(head_dim // 2):
        plain = 1 / theta ** (2 * j / head_dim)
        stretched = min(max((j - ends[0]) / (ends[1] - ends[0]), 0), 1)
        expected = plain / p["factor"] if stretched == 1 else plain + stretched * (plain / p["factor"] - plain)
        assert got[j] == pytest.approx(expected, rel=1e-10), j


def test_yarn_edges():
    """Would catch: a division by an empty ramp, or a ramp that starts before the first pair."""
    inv = read_config(changed(rope_scaling=YARN | {"original_max_position_embeddings": 6})).layers[0].rope.inv_freq
    np.testing.assert_allclose(inv, [1, 1e4 ** (-1 / 3) / 64, 1e4 ** (-2 / 3) / 64], rtol=1e-12)


ROPES = {
    "default": {},
    "yarn": {"rope_scaling": YARN},
    "partial": {"partial_rotary_factor": 2 / 3},
    "yarn, partial": {"rope_parameters": YARN | {"partial_rotary_factor": 1 / 3}},
    "by layer type": {
        "layer_types": [S, FULL],
        "sliding_window": 8,
        "rope_parameters": {S: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6, **YARN}},
    },
}


@pytest.mark.parametrize("change", ROPES.values(), ids=ROPES)
def test_context_and_query_keys_agree(change):
    """Would catch: C23, a frequency, a scale or a partial width that only one of the two paths of K knows."""
    x = np.random.default_rng(5).standard_normal((6, D))
    n1 = np.zeros((2, 4, D))
    n1[1, 3] = x[1]  # position 5 is row 1 of the context and row 3 of the second block
    forced = {"context_norm": x} | {f"layers.{i}.n1": n1 for i in range(L)}
    got = run_f(config=changed(**change), forced=forced)
    for i in range(L):
        np.testing.assert_allclose(got["context_k"][i, 1], got[f"layers.{i}.k"][1, 3], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("factor, rotary", [(2 / 3, 4), (1 / 3, 2)])
@pytest.mark.parametrize("inside", [False, True])
def test_partial_rotary_of_a_config(inside, factor, rotary):
    """Would catch: a tail that still turns, frequencies of the full width inside the part that turns, a stale flat key."""
    partial = {"partial_rotary_factor": factor}
    change = {"rope_parameters": partial, "partial_rotary_factor": 1.0} if inside else partial
    w, got = make_tensors(), run_f(config=changed(**change))
    n1 = got["layers.1.n1"][1, 3]  # position 5
    for name, num in (("q", N), ("k", K)):
        heads = matvec(w[f"layers.1.self_attn.{name}_proj.weight"], n1).reshape(num, H)
        for head, turned in zip(heads, got[f"layers.1.{name}"][1, 3], strict=True):
            head = norm(head, w[f"layers.1.self_attn.{name}_norm.weight"])
            np.testing.assert_allclose(turned[rotary:], head[rotary:], rtol=1e-12)
            for j in range(rotary // 2):
                angle = 5 * 1e4 ** (-2 * j / rotary)
                z = complex(head[j], head[j + rotary // 2]) * complex(math.cos(angle), math.sin(angle))
                np.testing.assert_allclose([turned[j], turned[j + rotary // 2]], [z.real, z.imag], rtol=1e-11)


def counts(num_context, causal, window):
    """How many keys each of 4 query rows after num_context keys sees, read off a softmax of equal scores."""
    num_keys = num_context + 4
    rows = np.zeros((2, 12, 1, num_keys))
    rows[1, :num_keys, 0] = np.eye(num_keys)
    q = np.zeros((1, 4, 1, num_keys))
    out = attend(q, rows, np.array([[0, 1, 2]]), np.array([num_keys]), 4, causal=causal, window=window)
    return (out[0, :, 0] > 0).sum(axis=-1).tolist()


def test_visible_counts():
    """Would catch: C32, a window ignored, one-sided, or one key too wide; C33, causality off by one."""
    assert counts(7, True, 4) == [4, 4, 4, 4]
    assert counts(7, False, 4) == [7, 6, 5, 4]
    assert counts(7, False, None) == [11, 11, 11, 11]
    assert counts(7, True, None) == [8, 9, 10, 11]
    assert counts(7, True, 2048) == [8, 9, 10, 11]
    assert counts(7, False, 2048) == [11, 11, 11, 11]
    assert counts(7, False, 1) == counts(7, True, 1) == [1, 1, 1, 1]


@pytest.mark.parametrize("num_keys", [0, 2, 4, 5, 11])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 11, 99])
def test_visible_keys_second_formula(num_keys, causal, window):
    """Would catch: a span that differs from the spec's mask, also where the length limit cuts a block short."""
    d = num_keys - 4
    for i in range(4):
        keys = [j for j in range(num_keys) if not causal or j <= i + d]
        if window is not None:
            keys = [j for j in keys if j >= i + d - (window - 1) and (causal or j <= i + d + (window - 1))]
        assert list(range(*visible_keys(i, 4, num_keys, causal, window))) == keys


@pytest.mark.parametrize("causal, visible", [(True, [4, 4, 4, 4]), (False, [7, 6, 5, 4])])
def test_nan_outside_the_window(causal, visible):
    """Would catch: C32, NaN that reaches a row because another row sees that key, or because no row does."""
    rng = np.random.default_rng(6)
    q, clean = rng.standard_normal((1, 4, 2, 3)), rng.standard_normal((2, 12, 1, 3))
    mask = {"causal": causal, "window": 4}
    args = np.array([[0, 1, 2]]), np.array([11]), 4
    expected = attend(q, clean, *args, **mask)
    for num_bad in range(4, 8):  # positions below are NaN; query row i stands at 7 + i and sees 4 + i and later ones
        rows = clean.copy()
        rows[:, :num_bad] = np.nan
        out = attend(q, rows, *args, **mask)
        np.testing.assert_array_equal(out[0, num_bad - 4 :], expected[0, num_bad - 4 :])
        assert np.isnan(out[0, : num_bad - 4]).all()
    assert counts(7, causal, 4) == visible


def test_window_and_causality_reach_their_layers():
    """Would catch: C32, a window for all layers or none; C35, a causal full layer or a bidirectional causal one."""
    config = changed(layer_types=[S, FULL], sliding_window=4, use_sliding_window=True)
    pool = make_pool()
    pool[0, :, 5] = np.nan  # positions 0..3, outside the window of every query of the first request
    got = run_f(config=config, pool=pool)
    assert all(np.isfinite(got[name]).all() for name in ("layers.0.attn", "layers.1.attn", "logits"))
    pool[1, :, 5] = np.nan
    got = run_f(config=config, pool=pool)
    assert np.isnan(got["layers.1.attn"][0]).all() and np.isfinite(got["layers.1.attn"][1]).all()
    # Rows 2 and 3 swapped: row 1 of the causal layer is the same, row 1 of the full one is not.
    for i, same in ((0, True), (1, False)):
        name = f"layers.{i}.n1"
        n1 = np.random.default_rng(7).standard_normal((2, 4, D))
        one, other = (run_f(config=config, forced={name: n1[:, order]}) for order in ([0, 1, 2, 3], [0, 1, 3, 2]))
        attn = f"layers.{i}.attn"
        assert np.array_equal(one[attn][:, :2], other[attn][:, :2]) == same
        assert not np.array_equal(one[attn][:, 2:], other[attn][:, 2:])


def test_window_at_the_length_limit():
    """Would catch: a window that starts from the position and not from the row: a cut block shifts by what is cut."""
    step = make_step(start_position=[13], num_context=[1], block_tables=[[5, 2, 7, 8]], **ONE)
    config = changed(layer_types=[S, S], sliding_window=3, is_causal=True)  # positions 14 to 17, 16 keys
    pool = np.full((L, 2, PAGES, PAGE, K, H), np.nan)
    pool[:, :, [7, 8]] = 1  # positions 8..15; the last row stands at the last key, so row 0 sees keys 10, 11, 12
    got = run_f(step, config=config, pool=pool, num_reqs=1, context_rows=1)
    assert np.isfinite(got["layers.0.attn"]).all()
    np.testing.assert_allclose(got["layers.0.attn"][0, 0], 1, rtol=1e-14)


SSF = [S, S, FULL]
BASE = {"num_hidden_layers": 3, "layer_types": SSF, "sliding_window": 8}
ALL_SLIDE = {"num_hidden_layers": 3, "layer_types": [S] * 3, "sliding_window": 8}


@pytest.mark.parametrize(
    "config, causal, windows",
    [
        (changed(**BASE), [True, True, False], [8, 8, None]),
        (changed(**BASE, is_causal=False), [False] * 3, [8, 8, None]),
        (changed(**BASE, is_causal=True), [True] * 3, [8, 8, None]),
        (changed(**BASE, dflash_config={"causal": True}), [True] * 3, [8, 8, None]),
        (changed(**BASE, dflash_config={"causal": False}), [False] * 3, [8, 8, None]),
        (changed(**BASE, is_causal=False, dflash_config={"causal": True}), [False] * 3, [8, 8, None]),
        (changed(**BASE, dflash_config={"use_swa": True, "swa_window_size": 5}), [True, True, False], [5, 5, None]),
        (changed(layer_types=None, dflash_config={"use_swa": True, "swa_window_size": 5}), [False] * 2, [5, 5]),
        (changed(layer_types=None, sliding_window=7, dflash_config={"use_swa": True}), [False] * 2, [7, 7]),
        (changed(sliding_window=7, dflash_config={"use_swa": True}), [False] * 2, [7, 7]),
        (changed(layer_types=None), [False] * 2, [None] * 2),
        (changed(**ALL_SLIDE), [True] * 3, [8] * 3),
        (changed(**ALL_SLIDE, model_type="muse_glimmer_assistant"), [False] * 3, [8] * 3),
        (changed(**ALL_SLIDE, model_type="muse_glimmer_assistant", is_causal=True), [True] * 3, [8] * 3),
        (speculators(**BASE), [False] * 3, [8, 8, None]),
        (speculators(**BASE) | {"sliding_window": 6}, [False] * 3, [6, 6, None]),
        (speculators(**BASE) | {"sliding_window_non_causal": True}, [False] * 3, [8, 8, None]),
        (speculators(**BASE) | {"sliding_window_non_causal": None}, [False] * 3, [8, 8, None]),
        (speculators(**BASE) | {"sliding_window_non_causal": False}, [True, True, False], [8, 8, None]),
        (
            speculators(**BASE | {"layer_types": None, "sliding_window": None})
            | {"layer_types": SSF, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0},
            [False] * 3,
            [6, 6, None],
        ),
    ],
)
def test_causality_and_windows(config, causal, windows):
    """Would catch: C33, a default that overrules an explicit value, or one form's rule for another's file."""
    assert of(config, "causal") == causal
    assert of(config, "window") == windows


def test_one_drafter_in_every_form():
    """Would catch: C03, C12, a key read in one form and lost or read with another meaning in the other."""
    types = {"layer_types": [S, FULL], "sliding_window": 4, "rope_theta": 5e5}
    zlab = changed(**types, is_causal=False, dflash_config={"block_size": 4})
    del zlab["block_size"]
    top = {key: value for key, value in changed(**types).items() if key not in ("dflash_config", "attention_bias")}
    muse = top | {"model_type": "muse_glimmer_assistant", "mask_token_id": 99, "target_layer_ids": [0, 2]}
    forms = [zlab, muse, speculators(**types), speculators(**types | {"layer_types": None}) | types]
    forms.append(speculators(**types, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    expected = run_f(config=zlab)
    for form in forms:
        got = run_f(config=form)
        assert list(got) == list(expected)
        for name in got:
            np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def test_defaults_spelled_out_change_nothing():
    """Would catch: a default that differs from what the plain form computes."""
    config = changed(
        **{"hidden_act": None, "layer_types": None, "head_dim": 6, "vocab_size": V, "draft_vocab_size": V},
        **{"target_hidden_size": DT, "is_causal": False, "logit_scale": 1.0, "embed_scale": 1, "sliding_window": None},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000}, "partial_rotary_factor": 1.0},
        dflash_config={"causal": None, "use_swa": False, "attention_sink_bias": False, "sample_from_anchor": False},
    )
    plain, got = run_f(), run_f(config=config)
    for name in plain:
        np.testing.assert_array_equal(got[name], plain[name], err_msg=name)


def test_speculators_defaults():
    """Would catch: hidden / heads for the head width, or another class's defaults, where a file holds only a diff."""
    config = {"speculators_model_type": "dflash", "mask_token_id": 9, "aux_hidden_state_layer_ids": [0, 2]}
    model = read_config(config | {"target_hidden_size": None, "transformer_layer_config": {"rms_norm_eps": None}})
    assert (len(model.layers), model.heads, model.kv_heads, model.head_dim, model.eps) == (32, 32, 32, 128, 1e-6)
    assert model.taps == [0, 2] and model.vocab_size is None and not model.attention_bias
    assert {layer.window for layer in model.layers} == {None} and not any(layer.causal for layer in model.layers)
    np.testing.assert_allclose(model.layers[0].rope.inv_freq[1], 1e4 ** (-1 / 64), rtol=1e-14)


@pytest.mark.parametrize(
    "config, taps",
    [
        (changed(dflash_config={"target_layer_ids": [1, 9, 17]}), [2, 10, 18]),
        (speculators() | {"aux_hidden_state_layer_ids": [2, 10, 18]}, [2, 10, 18]),
        (speculators() | {"aux_hidden_state_layer_ids": [2, 10], "target_layer_ids": [1, 9]}, [2, 10]),
        (changed(dflash_config={"target_layer_ids": None, "layer_ids": [0, 3]}), [0, 3]),
        (changed(target_layer_ids=[1, 3], dflash_config={"target_layer_ids": []}), [2, 4]),
        (changed(eagle_aux_hidden_state_layer_ids=[1, 3]), [1, 3]),
    ],
)
def test_tap_spellings(config, taps):
    """Would catch: C03, a shift that every spelling gets, or none."""
    assert read_config(config).taps == taps


def test_nested_mask_wins():
    """Would catch: C09, the id at the top taken before the nested one, or a pad id for want of any."""
    assert read_config(changed(mask_token_id=9, dflash_config={"mask_token_id": 7})).mask_token_id == 7
    with pytest.raises(ValueError, match="mask_token_id"):
        read_config(changed(pad_token_id=9, dflash_config={"mask_token_id": None}))


def test_biases_by_hand():
    """Would catch: a bias lost from one projection or from the context, or added after the K norm."""
    change = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "rms_norm_eps": 0}
    tensors = {name: np.zeros((2, 2)) if value.ndim > 1 else np.ones(2) for name, value in make_tensors().items()}
    tensors |= {"fc.weight": np.ones((2, 2 * DT)), "embed_tokens.weight": np.tile([10.0, 20.0], (V, 1))}
    tensors["lm_head.weight"] = np.ones((V, 2))
    for i in range(L):
        at = f"layers.{i}.self_attn."
        tensors[at + "k_proj.weight"] = np.eye(2) * 2
        tensors[at + "o_proj.weight"] = np.array([[1.0, 2], [3, 4]])
        biases = {"q": [8, 6], "k": [1, -2], "v": [5, 7 + i], "o": [0.25, 0.5]}
        tensors |= {f"{at}{name}_proj.bias": np.array(bias, float) for name, bias in biases.items()}
    got = run_f(
        make_step(start_position=[0], num_context=[1], block_tables=[[5, 2, 7, 0]], **ONE),
        config=changed(**change, attention_bias=True),
        tensors=tensors,
        num_reqs=1,
        context_rows=1,
        pool=np.zeros((L, 2, PAGES, PAGE, 1, 2)),
        forced={"context_norm": [[1, 3]], "layers.0.n1": np.tile([1.0, 3.0], (1, 4, 1))},
    )
    # K before its norm: 2 * [1, 3] + [1, -2] = [3, 4]; over its rms 5 / sqrt(2); position 0 does not turn.
    np.testing.assert_allclose(got["context_k"][:, 0, 0], [[0.848528, 1.131371]] * 2, atol=1e-6)
    assert got["context_v"][:, 0, 0].tolist() == [[5, 7], [5, 8]]
    turned = np.array([0.848528 + 1.131371j]) * np.exp(1j)
    np.testing.assert_allclose(got["layers.0.k"][0, 0, 0], [turned[0].real, turned[0].imag], atol=1e-6)
    turned = np.array([1.131371 + 0.848528j]) * np.exp(1j)  # Q before its norm: [8, 6]
    np.testing.assert_allclose(got["layers.0.q"][0, 0, 0], [turned[0].real, turned[0].imag], atol=1e-6)
    # All values are [5, 7], so attention gives it back; o_proj: [5 + 14, 15 + 28] + [0.25, 0.5].
    np.testing.assert_allclose(got["layers.0.post_attention"][0], [[29.25, 63.5]] * 4, rtol=1e-14)
    np.testing.assert_allclose(got["layers.1.post_attention"][0], [[29.25 + 21.25, 63.5 + 47.5]] * 4, rtol=1e-14)


def head_case(rows, d2t=None, **change):
    """Logits [B, T - 1, V'] and tokens of a head whose row i gives rows[i] for every query."""
    tensors = make_tensors() | {"lm_head.weight": np.outer(rows, np.eye(D)[0])}
    if d2t is not None:
        tensors["d2t"] = np.array(d2t)
    hidden = np.zeros((2, 3, D)) + np.eye(D)[0]
    got = run_f(config=changed(**change), tensors=tensors, forced={"hidden": hidden})
    return got["logits"], got["draft_tokens"]


def test_reduced_vocabulary():
    """Would catch: C08, offsets read as ids (4), a reduced id that is not mapped (1), zeros in columns without a row."""
    for change in ({}, {"vocab_size": 8, "draft_vocab_size": 3}):
        logits, tokens = head_case([0.1, 0.9, 0.3], [2, 4, 5], **change)
        assert logits.shape == (2, 3, 8 if change else V) and tokens.tolist() == [[5] * 3] * 2
        assert logits[0, 0, [2, 5, 7]].tolist() == [0.1, 0.9, 0.3]
        assert np.isneginf(np.delete(logits, [2, 5, 7], axis=-1)).all()
    logits, tokens = head_case([-0.1, -0.9, -0.3], [2, 4, 5], logit_scale=2.0)
    assert logits[0, 0, [2, 5, 7]].tolist() == [-0.2, -1.8, -0.6] and (tokens == 2).all()


def test_padded_vocabulary():
    """Would catch: C07, a target head cut to the drafter's smaller vocabulary, or a padding row of zeros that wins."""
    logits, tokens = head_case([-3, -2, -5, -4, -6, -7, -8, -1], vocab_size=8, draft_vocab_size=6)
    assert logits[0, 0].tolist() == [-3, -2, -5, -4, -6, -7, -8, -1] and (tokens == 7).all()
    logits, tokens = head_case([-3, -2, -5, -4, -6, -7, -8, -9, -1, -3, *[0] * 6], vocab_size=10)
    assert logits.shape[-1] == 16 and (tokens == 8).all() and np.isneginf(logits[..., 10:]).all()


@pytest.mark.parametrize(
    "rows, d2t, change",
    [
        (3, None, {"vocab_size": 8}),
        (3, None, {"vocab_size": 8, "draft_vocab_size": 3}),
        (3, [2, 4], {}),
        (3, [2, 4, 5], {"draft_vocab_size": 4}),
        (3, [2, 1, 5], {}),
        (3, [2, 4, 6], {"vocab_size": 8}),
        (3, [-1, 4, 5], {}),
        (3, [0.5, 4, 5], {}),
        (8, [0] * 6, {"vocab_size": 8, "draft_vocab_size": 6}),
    ],
)
def test_vocabulary_errors(rows, d2t, change):
    """Would catch: a map that is missing, of another length, doubled or outside, applied all the same."""
    with pytest.raises(ValueError, match="d2t"):
        head_case(np.ones(rows), d2t, **change)


@pytest.mark.parametrize("key", ["embed_scale", "embedding_scale", "input_embedding_scale", "dflash_config"])
def test_scales(key):
    """Would catch: a scale that is ignored, misses the mask rows, or falls on the hidden rows and not on the logits."""
    plain = run_f()
    scale = {"input_embedding_scale": 3.5} if key == "dflash_config" else 3.5
    got = run_f(config=changed(**{key: scale, "logit_scale": 0.25}), forced={"hidden": plain["hidden"]})
    np.testing.assert_array_equal(got["embeds"], plain["embeds"] * 3.5)
    np.testing.assert_array_equal(got["logits"], plain["logits"] * 0.25)


@pytest.mark.parametrize(
    "config, key",
    [
        (changed(layer_types=[FULL, S]), "sliding_window"),
        (changed(layer_types=[FULL, S], sliding_window=0), "sliding_window"),
        (changed(layer_types=[FULL, S], sliding_window=4, use_sliding_window=False), "use_sliding_window"),
        (changed(layer_types=None, sliding_window=4, use_sliding_window=True), "use_sliding_window"),
        (changed(layer_types=[FULL]), "layer_types"),
        (changed(layer_types=[FULL, "chunked_attention"]), "layer_types"),
        (changed(rope_scaling={"rope_type": "yarn"}), "factor"),
        (changed(rope_scaling={"rope_type": "yarn", "factor": 4}), "original_max_position_embeddings"),
        (changed(rope_scaling=YARN | {"factor": 0.5}), "factor"),
        (
            changed(head_dim=64, rope_scaling=YARN | {"original_max_position_embeddings": 1}),
            "original_max_position_embeddings",
        ),
        (changed(rope_scaling=YARN | {"mscale": 1}), "mscale_all_dim"),
        (changed(rope_scaling=YARN | {"attn_factor": 1}), "attn_factor"),
        (changed(rope_scaling={"rope_type": "llama3", "factor": 8}), "llama3"),
        (changed(rope_scaling={"type": "linear", "factor": 8}), "linear"),
        (changed(rope_scaling={"factor": 8}), "factor"),
        (changed(rope_scaling=YARN, rope_parameters={"rope_type": "default"}), "rope_type"),
        (changed(rope_parameters={"mrope_section": [1, 1, 1]}), "mrope_section"),
        (changed(rope_parameters={S: {"rope_theta": 1e4}}), FULL),
        (changed(rope_parameters={FULL: {"rope_theta": 1e4}, "rope_theta": 1e4}), "rope_theta"),
        (changed(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (changed(rope_theta=None), "rope_theta"),
        (changed(rope_local_base_freq=1e4), "rope_local_base_freq"),
        (changed(is_neox_style=False), "is_neox_style"),
        (changed(hidden_act="gelu"), "hidden_act"),
        (changed(attention_bias="yes"), "attention_bias"),
        (changed(num_key_value_heads=3), "num_key_value_heads"),
        (changed(hidden_size=None), "hidden_size"),
        (changed(sliding_window_non_causal=True), "sliding_window_non_causal"),
        (changed(sample_from_anchor=True), "sample_from_anchor"),
        (changed(quantization_config={"bits": 4}), "quantization_config"),
        (changed(embed_scale=2, dflash_config={"input_embedding_scale": 3}), "embed_scale"),
        (changed(dflash_config={"mask_token_id": None}), "mask_token_id"),
        (changed(dflash_config={"target_layer_ids": None}), "target_layer_ids"),
        (changed(dflash_config={"target_layer_ids": [1, 1]}), "target_layer_ids"),
        (changed(dflash_config={"target_layer_ids": [0, -1]}), "target_layer_ids"),
        (changed(dflash_config={"target_layer_ids": [0, 3]}), "target_layer_ids"),
        (changed(dflash_config={"target_layer_ids": [0]}), "target_layer_ids"),
        (changed(target_layer_ids=[1, 3]), "target_layer_ids"),
        (changed(dflash_config={"mask_token_id": 200}), "vocabulary"),
        (changed(dflash_config={"sample_from_anchor": True}), "dflash_config.sample_from_anchor"),
        (changed(dflash_config={"attention_sink_bias": True}), "attention_sink_bias"),
        (changed(dflash_config={"conv_kernel_size": 2}), "conv_kernel_size"),
        (changed(dflash_config={"selector_top_k": 16}), "selector_top_k"),
        (speculators() | {"speculators_model_type": "eagle3"}, "speculators_model_type"),
        (speculators(model_type="llama"), "model_type"),
        (speculators() | {"sample_from_anchor": True}, "sample_from_anchor"),
        (speculators() | {"is_causal": True}, "is_causal"),
        (speculators() | {"aux_hidden_state_layer_ids": None}, "target_layer_ids"),
    ],
)
def test_config_errors(config, key):
    """Would catch: a feature this oracle lacks that is passed over in silence, so that it judges another model."""
    with pytest.raises(ValueError, match=key):
        run_f(config=config)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"forced": {"pool": 0}}, "pool"),
        ({"forced": {"seq_lens": 0}}, "seq_lens"),
        ({"forced": {"layers.2.q": 0}}, r"layers\.2\.q"),
        ({"forced": {"hidden": np.zeros(3)}}, "hidden"),
        ({"num_reqs": 1}, "num_reqs=1"),
        ({"context_rows": 5}, "context_rows=5"),
        ({"pool": np.zeros((L, 2, PAGES, PAGE, K, H + 1))}, "pool"),
        ({"tensors": {k: v for k, v in make_tensors().items() if k != "norm.weight"}}, r"norm\.weight"),
        ({"tensors": make_tensors() | {"layers.0.self_attn.q_proj.bias": np.ones(N * H)}}, r"q_proj\.bias"),
        ({"step": make_step(num_rejected=[4, 0])}, "request 0"),
        ({"step": make_step(block_tables=[[5, 2], [3, 6]])}, r"block_tables\[0\]"),
        ({"step": make_step(block_tables=[[5, 2, 7, 0], [3, 9, 0, 0]])}, r"block_tables\[1\]"),
        ({"step": make_step(np.zeros((4, 5, DT)))}, "hidden_states"),
        ({"config": CONFIG | {"target_hidden_size": 8}}, "target_hidden_size=8"),
        ({"config": CONFIG | {"attention_bias": True}}, r"q_proj\.bias"),
        ({"tensors": make_tensors() | {"t2d": np.ones(V)}}, "t2d"),
    ],
)
def test_argument_errors(arguments, match):
    """Would catch: a misspelt forced name that forces nothing, or an input that indexes from the end of an array."""
    with pytest.raises(ValueError, match=match):
        run_f(**arguments)


SAVED = {np.dtype(ml_dtypes.bfloat16): "BF16"} | {
    np.dtype(code): name for code, name in (("f2", "F16"), ("f4", "F32"), ("f8", "F64"), ("i4", "I32"), ("i8", "I64"))
}


def save(path, arrays):
    """A safetensors file, byte by byte: its numpy front end cannot write bf16 in every version."""
    header, data = {}, b""
    for name, value in arrays.items():
        offsets = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": SAVED[value.dtype], "shape": value.shape, "data_offsets": offsets}
        data += value.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_load_round_trip(tmp_path):
    """Would catch: a bf16 file read as f16 or rounded on the way, a shape lost, a second file left out."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    values = np.array([[1, -2.5, 3.0e-3], [65504, 0, 1 / 3]])
    arrays = {name: values.astype(dtype) for dtype, name in SAVED.items() if name[0] != "I"}
    save(tmp_path / "a.safetensors", {"BF16": arrays["BF16"]})
    save(tmp_path / "b.safetensors", {name: arrays[name] for name in ("F32", "F64", "F16")})
    config, tensors = load(tmp_path)
    assert config == CONFIG and set(tensors) == set(arrays)
    for name, value in tensors.items():
        assert value.dtype == np.float64 and value.shape == (2, 3)
        assert value.tolist() == [[float(a) for a in row] for row in arrays[name]], name
    assert tensors["BF16"][1, 2] == 0.333984375


def test_load_d2t(tmp_path):
    """Would catch: the one tensor of integers refused."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save(tmp_path / "a.safetensors", {"d2t": np.array([2, 4, 5])})
    assert load(tmp_path)[1]["d2t"].tolist() == [2, 4, 5]


@pytest.mark.parametrize(
    "fault, match",
    [
        ("no config", r"config\.json"),
        ("bad config", r"config\.json"),
        ("config is a list", r"config\.json"),
        ("no tensors", r"safetensors"),
        ("truncated", r"a\.safetensors"),
        ("integers", r"a\.safetensors: norm\.weight"),
        ("twice", r"b\.safetensors: norm\.weight"),
    ],
)
def test_load_errors(tmp_path, fault, match):
    """Would catch: a fault of a checkpoint that is reported without the file or the key, or not at all."""
    text = {"bad config": "{", "config is a list": "[]"}.get(fault, json.dumps(CONFIG))
    if fault != "no config":
        (tmp_path / "config.json").write_text(text)
    weight = {"norm.weight": np.ones(3, np.int32 if fault == "integers" else np.float32)}
    if fault != "no tensors":
        save(tmp_path / "a.safetensors", weight)
    if fault == "twice":
        save(tmp_path / "b.safetensors", weight)
    if fault == "truncated":
        (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match=match):
        load(tmp_path)
