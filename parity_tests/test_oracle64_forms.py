"""oracle64 beyond Qwen3-era drafters: RoPE, windows, causality, vocabularies and files of every published form."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from parity_tests.harness.oracle64 import attend, load, visible_keys
from parity_tests.harness.oracle64_config import read_config
from parity_tests.test_oracle64 import (
    CONFIG,
    DT,
    ONE,
    PAGE,
    PAGES,
    D,
    H,
    K,
    L,
    N,
    V,
    make_pool,
    make_step,
    make_tensors,
    matvec,
    norm,
    run_f,
)


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
