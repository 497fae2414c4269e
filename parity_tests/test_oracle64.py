"""The float64 oracle against literal numbers and second formulas: what judges both frameworks needs a judge of its own."""

import math

import numpy as np
import pytest

from parity_tests.harness.oracle64 import Step, attend, prepare_inputs, rms_norm, rotate, run
from parity_tests.harness.oracle64_config import Rope, inv_freq

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
