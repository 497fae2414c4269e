"""Layers and forwards: literal values in both frameworks, each stage against plain numpy, and JAX against PyTorch."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jax_dflash import cli
from jax_dflash.config import Geometry, TargetConfig, parse_draft_config, plain_rope
from jax_dflash.names import draft_tensors, target_tensors
from parity_tests.tiny import (
    DRAFT,
    FRAMEWORKS,
    GEOMETRY,
    draft_weights,
    forward,
    numpy,
    random_values,
    relative_rmse,
    resized,
)

ROOT = Path(__file__).parents[1]


def test_rms_norm_rounds_once_after_the_weight(f):
    """bfloat16 one ulp off everywhere: a cast before the weight gives [0.93359375, 0.1396484375, ..., -1.1015625]."""
    x = f.floats([0.90234375, 0.09423828125, -0.7421875, -0.921875], "bfloat16")
    weight = f.floats([0.76953125, 1.109375, 0.49609375, 0.89453125], "bfloat16")
    assert numpy(f.layers.rms_norm(x, weight, 1e-6)).tolist() == [0.9296875, 0.140625, -0.494140625, -1.109375]


@pytest.mark.parametrize("eps, expected", [(1e-6, 0.70710678), (1e-5, 0.30151134), (0.0, 1.0)])
def test_rms_norm_epsilon(f, eps, expected):
    """An epsilon of the framework's own, or one added outside the root."""
    y = f.layers.rms_norm(f.floats([1e-3] * 4), f.floats([1.0] * 4), eps)
    np.testing.assert_allclose(numpy(y), [expected] * 4, rtol=1e-6)


def test_rope_is_half_split(f):
    """Interleaved pairs, which give [-1.142640, 1.922076, 2.959851, 4.029800]."""
    geometry = replace(GEOMETRY, head_dim=4, rope_theta=1e4)
    table = f.layers.rope_table(f.ints([1]), plain_rope(geometry), f.numerics.as_dtype("float32"))
    y = f.layers.apply_rope(f.floats([[[1, 2, 3, 4]]]), table)
    np.testing.assert_allclose(numpy(y)[0, 0], [-1.984111, 1.959901, 2.462378, 4.019800], atol=1e-6)


def test_rope_angles_at_a_far_position(f):
    """Frequencies or angles in bfloat16: at position 40,000 nothing of the angle is left."""
    geometry = replace(GEOMETRY, head_dim=10, rope_theta=1e6)
    cos, sin = f.layers.rope_table(f.ints([40_000]), plain_rope(geometry), f.numerics.as_dtype("bfloat16"))
    angles = (40_000 * np.float32(1e6 ** -(np.arange(0, 10, 2) / 10))).astype(np.float64)
    np.testing.assert_allclose(numpy(cos)[0], np.cos(angles), atol=4e-3)
    np.testing.assert_allclose(numpy(sin)[0], np.sin(angles), atol=4e-3)


def test_swiglu_uses_silu_of_the_first_half(f):
    """GELU, or gate and up exchanged: silu(1) = 0.7310585786."""
    np.testing.assert_allclose(numpy(f.layers.swiglu(f.floats([[1.0, 3.0]]))), [[3 * 0.7310585786]], rtol=1e-6)


def test_residual_add_rounds_once(f):
    """A residual kept, or added, in another precision: 1 + 3 x 2^-9 lies between 1 and 1 + 2^-7, nearer the latter."""
    y = f.layers.add(f.floats([1.0], "bfloat16"), f.floats([3 * 2.0**-9], "bfloat16"))
    assert numpy(y).tolist() == [1.0078125]


def test_logits_stay_in_float32(f):
    """Logits rounded to bfloat16, which ties tokens: 256 + 1 needs nine bits."""
    weights = draft_weights(f, dtype="bfloat16")._replace(lm_head=f.floats([[256.0, 1.0], [1.0, 1.0]], "bfloat16"))
    logits = f.drafter.compute_logits(weights, DRAFT, f.floats([[[1.0, 1.0]]], "bfloat16"))
    assert numpy(logits).tolist() == [[[257.0, 2.0]]]


def test_greedy_takes_the_lowest_id_of_a_tie(f):
    """Drafts that differ between frameworks wherever two logits tie."""
    logits = np.full((3, 4097), -1.0)
    logits[0, [5, 4096]] = logits[1, [0, 1]] = logits[2, [1000, 1001, 3000]] = 2.0
    tokens = f.sampling.greedy(f.floats(logits))
    assert numpy(tokens).tolist() == [5, 0, 1000]
    assert numpy(tokens).dtype == np.int32


def test_context_k_norm_is_per_layer(f):
    """Every layer normalised by layer 0's weight."""
    config = resized(num_layers=2, num_kv_heads=1, head_dim=2, hidden_size=2, rms_norm_eps=0.0)
    project = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)  # from [1, 1], which a norm without epsilon leaves alone
    rows = np.concatenate([project] * 4)
    weights = draft_weights(f, config)._replace(
        hidden_norm=f.floats([1, 1]),
        context_kv=f.floats(rows.T if f.name == "jax" else rows),  # packed as [in, out] in JAX
        context_k_norm=f.floats([[1, 1], [2, 0.5]]),
    )
    kv = f.run(
        lambda w, x, p: f.drafter.precompute_context_kv(w, config, x, p), weights, f.floats([[1, 1]]), f.ints([0])
    )
    np.testing.assert_allclose(numpy(kv)[0, :, 0, 0], [[0.848528, 1.131371], [3, 4]], rtol=1e-6)
    np.testing.assert_allclose(numpy(kv)[1, :, 0, 0], [[1.697056, 0.565685], [3, 4]], rtol=1e-6)


def rms_norm_64(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + GEOMETRY.rms_norm_eps) * weight


def rope_64(x, positions):
    H = GEOMETRY.head_dim
    angles = positions[:, None, None] * GEOMETRY.rope_theta ** -(np.arange(0, H, 2) / H)
    a, b = x[..., : H // 2], x[..., H // 2 :]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def test_fused_context_kv_equals_each_layer_s_own_projections(f):
    """Layers, K and V, or heads out of order in the one product; K through input_layernorm; a norm or rotation on V."""
    values = random_values(draft_tensors(DRAFT))
    rng = np.random.default_rng(5)
    features, positions = rng.standard_normal((5, DRAFT.feature_size)).astype(np.float32), np.array([3, 0, 17, 5, 101])

    def context(weights, features, positions):
        combined = f.drafter.combine_hidden_states(weights, features)
        return f.drafter.precompute_context_kv(weights, DRAFT, combined, positions)

    found = numpy(f.run(context, draft_weights(f), f.floats(features), f.ints(positions)))
    w = {name: value.astype(np.float64) for name, value in values.items()}
    y = rms_norm_64(features.astype(np.float64) @ w["fc.weight"].T, w["hidden_norm.weight"])
    for layer in range(GEOMETRY.num_layers):
        p = f"layers.{layer}.self_attn."
        k, v = ((y @ w[f"{p}{name}_proj.weight"].T).reshape(5, GEOMETRY.num_kv_heads, -1) for name in "kv")
        np.testing.assert_allclose(
            found[layer, 0], rope_64(rms_norm_64(k, w[f"{p}k_norm.weight"]), positions), atol=1e-4
        )
        np.testing.assert_allclose(found[layer, 1], v, atol=1e-5)


def test_context_and_query_rotate_k_alike(f):
    """Two code paths for RoPE or the K norm: the same normalised row must make the same K at the same position."""
    values = random_values(draft_tensors(DRAFT))
    values["hidden_norm.weight"][:] = 1
    for layer in range(GEOMETRY.num_layers):
        values[f"layers.{layer}.input_layernorm.weight"][:] = 1
    weights = f.drafter.pack(f.tree(values), DRAFT, *[f.floats(np.zeros((1, GEOMETRY.hidden_size)))] * 2)
    x, positions = np.random.default_rng(1).standard_normal((3, GEOMETRY.hidden_size)), f.ints([5, 0, 63])

    def both(weights, x, positions):
        context = f.drafter.precompute_context_kv(weights, DRAFT, x, positions)
        table = f.layers.rope_table(positions[None], plain_rope(GEOMETRY), x.dtype)
        attend = lambda pool, q, k, v: ((k, v), q)  # noqa: E731
        kv = [f.layers.decoder_layer(w, GEOMETRY, None, x[None], table, attend)[0] for w in weights.layers]
        return context, kv

    context, kv = f.run(both, weights, f.floats(x), positions)
    for layer, (k, v) in enumerate(kv):
        np.testing.assert_allclose(numpy(context)[layer, 0], numpy(k)[0], atol=2e-6)
        np.testing.assert_allclose(numpy(context)[layer, 1], numpy(v)[0], atol=2e-6)


def test_features_are_hidden_states_after_the_named_layers(f):
    """Taps one layer early ([0, 11]) or late ([11, 1111]): layer i of this target adds 10^i to the stream."""
    geometry = Geometry(
        hidden_size=1, num_layers=4, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=1, rms_norm_eps=0.0,
        rope_theta=1e4, vocab_size=1, max_position_embeddings=8,
    )  # fmt: skip
    config = TargetConfig(geometry=geometry, tie_word_embeddings=True, dtype="float32")
    values = {name: np.ones(shape, np.float32) for name, shape in target_tensors(config).items()}
    for layer in range(4):
        values[f"model.layers.{layer}.self_attn.o_proj.weight"][:] = 0
        values[f"model.layers.{layer}.mlp.down_proj.weight"][:] = 10**layer / 0.7310585786  # silu(1)
    raw = json.loads((cli.ASSETS / "builtin" / "drafter" / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = [0, 2]
    taps = parse_draft_config(raw).hidden_state_indices
    assert taps == (1, 3)

    def run(weights, ids, positions):
        attend = lambda pool, layer, q, k, v: (pool, q)  # noqa: E731
        return f.target.target_forward(weights, config, (), f.target.embed(weights, ids), positions, attend, taps)[2]

    features = f.run(run, f.target.pack(f.tree(values), config), f.ints([[0, 0]]), f.ints([[0, 1]]))
    np.testing.assert_allclose(numpy(features) - 1, [[[1, 111], [1, 111]]], rtol=1e-6)


@pytest.fixture(scope="module")
def forwards():
    """Every stage's value of one batch by dtype and framework."""
    return {dtype: {name: forward(f, dtype) for name, f in FRAMEWORKS.items()} for dtype in ("float32", "bfloat16")}


STAGES = ("combined", "context_kv", "pool", "hidden", "logits", "target_features", "target_hidden", "target_logits")


@pytest.mark.parametrize("stage", STAGES)
def test_jax_equals_torch_in_float32(forwards, stage):
    """A stage that computes something else; rows are compared at the scale of the row."""
    a, b = (forwards["float32"][name][stage] for name in ("jax", "torch"))
    scale = np.sqrt(np.mean(b**2, axis=-1, keepdims=True))
    assert a.shape == b.shape
    assert np.all(np.abs(a - b) <= 1e-5 * scale)


@pytest.mark.parametrize("stage", STAGES)
def test_jax_is_near_torch_in_bfloat16(forwards, stage):
    """A stage that rounds elsewhere, or at all where the other does not; a few roundings of 2^-9 compound to 1%."""
    a, b = (forwards["bfloat16"][name][stage] for name in ("jax", "torch"))
    assert relative_rmse(a, b) < 0.02


def float64_errors() -> dict[str, float]:
    """Relative RMSE of JAX against PyTorch by stage; needs JAX_ENABLE_X64."""
    on_jax, on_torch = (forward(f, "float64") for f in FRAMEWORKS.values())
    return {stage: relative_rmse(on_jax[stage], on_torch[stage]) for stage in STAGES}


def run_python(code: str, **env) -> str:
    """The stdout of a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_jax_equals_torch_in_float64():
    """A wrong epsilon, scale, angle or mask that float32 noise hides, and any cast outside the rounding contract."""
    code = "import json; from parity_tests.test_forward import float64_errors; print(json.dumps(float64_errors()))"
    errors = json.loads(run_python(code, JAX_ENABLE_X64="1").splitlines()[-1])
    assert set(errors) == set(STAGES)
    assert all(error <= 1e-11 for error in errors.values()), errors


def test_pack_and_unpack_are_inverse(f):
    """A tensor lost, cut at the wrong row, or swapped with another of its shape on the way to fused arrays and back."""
    values = random_values(draft_tensors(DRAFT))
    table = f.floats(np.zeros((2, GEOMETRY.hidden_size)))
    back = f.drafter.unpack(f.drafter.pack(f.tree(values), DRAFT, table, table), DRAFT)
    assert set(back) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(numpy(back[name]), value.astype(np.float64), err_msg=name)


def test_pack_for_two_shards():
    """Fused rows that an even split over two devices cuts in the wrong place."""
    f = FRAMEWORKS["jax"]
    config = resized(num_heads=4, num_kv_heads=2, intermediate_size=6)
    values = random_values(draft_tensors(config))
    table = f.floats(np.zeros((2, GEOMETRY.hidden_size)))
    pack = partial(f.drafter.pack, f.tree(values), config, table, table)
    weights = pack(shards=2)
    back = f.drafter.unpack(weights, config, shards=2)
    for name, value in values.items():
        np.testing.assert_array_equal(numpy(back[name]), value.astype(np.float64), err_msg=name)
    q, k, v = (values[f"layers.1.self_attn.{p}_proj.weight"] for p in "qkv")
    gate, up = (values[f"layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    first = np.concatenate([q[:20], k[:10], v[:10]])
    np.testing.assert_array_equal(numpy(weights.layers[1].qkv.T)[:40], first.astype(np.float64))
    np.testing.assert_array_equal(
        numpy(weights.layers[1].gate_up.T)[:6], np.concatenate([gate[:3], up[:3]]).astype(np.float64)
    )


def test_torch_ref_does_not_import_jax():
    """A reference that shares maths, or a process, with what it is the reference of."""
    code = "import sys, torch_ref.drafter, torch_ref.target, torch_ref.inputs, torch_ref.weights, torch_ref.engine; "
    assert run_python(code + "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'flax')])") == "[]\n"
