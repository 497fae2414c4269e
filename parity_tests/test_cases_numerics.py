"""cases.md, numbers: where they are rounded, what they accumulate in, and literal values of the layers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_dflash.config import Geometry, TargetConfig, plain_rope
from jax_dflash.names import draft_tensors, target_tensors
from jax_dflash.numerics import COMPILER_OPTIONS
from parity_tests.engines import CONFIG, jax_programs, make_engine, needs_gpu, one_thread, step_for
from parity_tests.tiny import DRAFT, FRAMEWORKS, GEOMETRY, draft_weights, numpy, random_values, resized
from torch_ref.numerics import pin_numerics, to_device

__all__ = ["one_thread"]


def weight(f, out_in):
    """A matrix `[out, in]` as this framework packs it for `linear`."""
    x = np.asarray(out_in)
    return x.T if f.name == "jax" else x


def assert_exact_products(f, move=lambda x: x):
    """1 + 2^-11 has 11 bits behind the point; TF32 keeps 10 and returns 1.0 or 1.0009765625."""
    exact = 1.00048828125
    a = move(f.floats(np.full((256, 256), exact)))
    identity = move(f.floats(np.eye(256)))
    products = [f.numerics.linear(a, identity)]
    heads = draft_weights(f)._replace(lm_head=identity)
    products.append(f.drafter.compute_logits(heads, resized(vocab_size=256), a[None])[0])
    products.append(f.drafter.combine_hidden_states(heads._replace(fc=identity), a))
    for product in products:
        found = numpy(product.cpu() if isinstance(product, torch.Tensor) else product)
        assert found.shape == (256, 256) and np.all(found == exact)
    # Attention: one key, so that the output is its value; a score of exactly 256 x (1 + 2^-11) for that of another.
    pool = np.zeros((1, 2, 2, 16, 1, 256), np.float32)
    pool[0, 1, 1, 0] = exact
    pool = f.pool(pool.shape, fill=pool)
    if f.name == "torch" and move(a).is_cuda:
        on_device = f.kv_cache.zero_pool(pool.shape, pool.dtype, "cuda")
        on_device.copy_(pool)
        pool = on_device
    q, tables, lens = move(f.floats(np.ones((1, 1, 1, 256)))), move(f.ints([[1]])), move(f.ints([1]))
    for kernel in [{}] if f.name == "jax" else [{"kernel": "dense"}, {"kernel": "sdpa"}]:
        out = f.dense.attention(pool, 0, q, tables, lens, **kernel)
        assert np.all(numpy(out.cpu() if isinstance(out, torch.Tensor) else out) == exact), kernel


def test_float32_products_are_float32(f):
    """C75: TF32, JAX's default on a GPU, in any product; JAX runs this on whatever device it has."""
    assert_exact_products(f)


@pytest.mark.gpu
@needs_gpu
def test_float32_products_are_float32_on_the_gpu():
    """C75: PyTorch left with allow_tf32 by whoever ran before in the process; and that the matrix can tell."""
    f = FRAMEWORKS["torch"]
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        a, b = torch.full((256, 256), 1.00048828125, device="cuda"), torch.eye(256, device="cuda")
        assert not torch.all(a @ b == 1.00048828125), "this GPU has no TF32: the test shows nothing"
        pin_numerics()
        assert_exact_products(f, lambda x: x.cuda())
    finally:
        pin_numerics()


def round_trip(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def test_a_rounding_to_bfloat16_is_kept():
    """C76: XLA drops it on a GPU unless told not to: 1.003 comes back as 1.003 instead of 1.0. The captured programs are
    compiled with the option, and so is the target's."""
    assert COMPILER_OPTIONS["xla_allow_excess_precision"] is False
    for options in (COMPILER_OPTIONS, *(programs.compiler_options for programs in jax_programs().values())):
        assert options["xla_allow_excess_precision"] is False
        kept = jax.jit(lambda x: round_trip(x * 1) + 0, compiler_options=options)
        assert kept(jnp.full(8, 1.003)).tolist() == [1.0] * 8
    loose = jax.jit(lambda x: round_trip(x * 1) + 0, compiler_options={"xla_allow_excess_precision": True})
    if jax.default_backend() == "cpu":
        assert loose(jnp.full(8, 1.003)).tolist() == [1.0] * 8
    f = FRAMEWORKS["torch"]
    stored = f.numerics.store(torch.tensor(1.003), f.numerics.as_dtype("bfloat16"))
    assert f.numerics.to_accum(stored).item() == 1.0


def test_each_layer_rounds_its_output(f):
    """C76, C77: a value that stays wider than bfloat16 between two functions of the forward. 1 + 2^-8 is no bfloat16."""
    odd = f.floats([1.0, 1.0078125, 0.5, 3.0], "bfloat16")
    bits16 = lambda x: np.all(numpy(x) == numpy(x).astype(ml_dtypes.bfloat16).astype(np.float64))  # noqa: E731
    table = f.layers.rope_table(f.ints([3]), plain_rope(replace(GEOMETRY, head_dim=4)), f.numerics.as_dtype("bfloat16"))
    values = {
        "rms_norm": f.layers.rms_norm(odd, odd, 1e-6),
        "rope": f.layers.apply_rope(odd[None, None], table),
        "swiglu": f.layers.swiglu(odd[None]),
        "add": f.layers.add(odd, odd),
        "linear": f.numerics.linear(odd[None], f.floats(weight(f, np.full((3, 4), 1.0078125)), "bfloat16")),
    }
    for name, value in values.items():
        assert str(value.dtype).endswith("bfloat16"), name
        assert bits16(value), name


def test_bfloat16_products_accumulate_in_float32(f):
    """C79: a running sum in bfloat16, which stops at 256 of 1000 ones."""
    running = ml_dtypes.bfloat16(0)
    for _ in range(1000):
        running = ml_dtypes.bfloat16(running + ml_dtypes.bfloat16(1))
    assert running == 256
    ones = f.floats(np.ones((2, 1000)), "bfloat16")
    assert (
        numpy(f.numerics.linear(ones, f.floats(weight(f, np.ones((3, 1000))), "bfloat16"))).tolist() == [[1000] * 3] * 2
    )
    # Logits are not rounded either: 1001 is no bfloat16.
    heads = draft_weights(f, dtype="bfloat16")._replace(lm_head=f.floats(np.ones((5, 1001)), "bfloat16"))
    logits = f.drafter.compute_logits(heads, resized(vocab_size=256), f.floats(np.ones((2, 1001)), "bfloat16"))
    assert numpy(logits).tolist() == [[1001] * 5] * 2
    norm = f.layers.rms_norm(ones, f.floats(np.ones(1000), "bfloat16"), 0.0)
    assert np.all(numpy(norm) == 1)


def test_silu_and_no_gelu(f):
    """C82: gelu, tanh (0.8411920) or erf (0.8413447), or a silu of the wrong half; the two gelus differ by 1.5e-4."""
    found = numpy(f.layers.swiglu(f.floats([[1.0, -2.0, 1.0, 1.0]])))[0]
    np.testing.assert_allclose(found, [0.7310585786, -2 * 0.1192029220], rtol=1e-6)


@pytest.mark.parametrize("theta, angle", [(1e4, 1.0), (1e6, 0.1)])
def test_second_pair_at_position_100(f, theta, angle):
    """C24: a default of 1e6 for a drafter of 1e4, or the reverse."""
    geometry = replace(GEOMETRY, head_dim=4, rope_theta=theta)
    cos, sin = (
        numpy(x)[0, 1] for x in f.layers.rope_table(f.ints([100]), plain_rope(geometry), f.numerics.as_dtype("float32"))
    )
    np.testing.assert_allclose([cos, sin], [np.cos(angle), np.sin(angle)], rtol=2e-6)


@pytest.mark.parametrize("theta, head_dim", [(1e4, 128), (1e6, 128), (1e7, 64), (5e5, 10)])
def test_plain_frequencies(f, theta, head_dim):
    """C21: scaled frequencies for a plain drafter. At position 1 the angle is the frequency theta^(-2j/H)."""
    geometry = replace(GEOMETRY, head_dim=head_dim, rope_theta=theta)
    cos, sin = (
        numpy(x)[0].astype(np.float64)
        for x in f.layers.rope_table(f.ints([1]), plain_rope(geometry), f.numerics.as_dtype("float32"))
    )
    inv_freq = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(sin, np.sin(inv_freq), rtol=4e-7)
    np.testing.assert_allclose(cos, np.cos(inv_freq), rtol=4e-7)


@pytest.mark.parametrize("form", ["default", "yarn", "partial"])
def test_context_and_query_k_are_equal_bit_for_bit(f, form):
    """C23: two code paths for the K norm or RoPE. The rows are whole numbers, whose products are exact in any order, so
    that nothing but the paths can differ; norms before the projection are 1 on rows of mean square 1."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25}
    config = resized(rms_norm_eps=0.0)
    geometry = config.geometry
    rope = replace(plain_rope(geometry), **{"default": {}, "yarn": yarn, "partial": {"rotary_dim": 4}}[form])
    config = replace(config, layers=tuple(replace(layer, rope=rope) for layer in config.layers))
    values = {n: np.sign(v) if v.ndim == 2 else v for n, v in random_values(draft_tensors(config)).items()}
    values["hidden_norm.weight"][:] = 1
    for layer in range(geometry.num_layers):
        values[f"layers.{layer}.input_layernorm.weight"][:] = 1
    weights = f.drafter.pack(f.tree(values), config, *[f.floats(np.zeros((1, geometry.hidden_size)))] * 2)
    x = f.floats(np.sign(np.random.default_rng(1).standard_normal((3, geometry.hidden_size))))

    def context(weights, x, positions):
        return f.drafter.precompute_context_kv(weights, config, x, positions)

    def query(weights, x, positions):
        table = f.layers.rope_table(positions[None], rope, x.dtype)
        attend = lambda pool, q, k, v: ((k[0], v[0]), q)  # noqa: E731
        return [f.layers.decoder_layer(w, geometry, None, x[None], table, attend)[0] for w in weights.layers]

    found = numpy(f.run(context, weights, x, f.ints([5, 5, 5])))
    for layer, (k, v) in enumerate(f.run(query, weights, x, f.ints([5, 5, 5]))):
        np.testing.assert_array_equal(found[layer, 1], numpy(v))
        if f.name == "torch":
            np.testing.assert_array_equal(found[layer, 0], numpy(k))
        else:  # XLA contracts a * cos - b * sin to a fused multiply-add in one of two programs and not in the other
            np.testing.assert_allclose(found[layer, 0], numpy(k), rtol=0, atol=3e-7)


def norm_64(x, w, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def rope_64(x, positions, theta):
    H = x.shape[-1]
    angles = positions[:, None, None] * theta ** -(np.arange(0, H, 2) / H)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def forward_64(values, g, combined, x, start):
    """Context K/V and final hidden states of one block in plain numpy, written from the formulas."""
    w = {name: value.astype(np.float64) for name, value in values.items()}
    N, K, H, eps = g.num_heads, g.num_kv_heads, g.head_dim, g.rms_norm_eps
    context = norm_64(combined, w["hidden_norm.weight"], eps)
    at, block = np.arange(start), start + np.arange(len(x))
    for layer in range(g.num_layers):
        p = f"layers.{layer}."
        q_proj, k_proj, v_proj, o_proj = (w[f"{p}self_attn.{n}_proj.weight"].T for n in "qkvo")
        q_norm, k_norm = (w[f"{p}self_attn.{n}_norm.weight"] for n in "qk")
        y = norm_64(x, w[f"{p}input_layernorm.weight"], eps)
        rows = np.concatenate([context, y])
        k = rope_64(norm_64((rows @ k_proj).reshape(-1, K, H), k_norm, eps), np.concatenate([at, block]), g.rope_theta)
        v = (rows @ v_proj).reshape(-1, K, H)
        q = rope_64(norm_64((y @ q_proj).reshape(-1, N, H), q_norm, eps), block, g.rope_theta)
        heads = []
        for n in range(N):
            scores = np.exp(q[:, n] @ k[:, n // (N // K)].T / np.sqrt(H))
            heads.append(scores / scores.sum(axis=-1, keepdims=True) @ v[:, n // (N // K)])
        x = x + np.concatenate(heads, axis=-1) @ o_proj
        y = norm_64(x, w[f"{p}post_attention_layernorm.weight"], eps)
        gate, up = (y @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}mlp.down_proj.weight"].T
    return norm_64(x, w["norm.weight"], eps)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_one_epsilon_in_every_norm(f, eps):
    """C78: hidden_norm, layer norms, q/k norms or the final norm with an epsilon of their own. One of 0.3 changes all of
    them, and so would any other difference from the formulas, such as C77 or C82."""
    g = replace(CONFIG.geometry, rms_norm_eps=eps)
    config, start, T = replace(CONFIG, geometry=g), 5, 4
    rng = np.random.default_rng(3)
    values = random_values(draft_tensors(config))
    combined, x = (rng.standard_normal((rows, g.hidden_size)).astype(np.float32) for rows in (start, T))
    table = f.floats(np.zeros((1, g.hidden_size)))

    def run(weights, pool, combined, x, ints):
        context_positions, context_slots, positions, slots, tables, seq_lens = ints

        def attend(pool, layer, q, k, v):
            pool = f.kv_cache.store_layer(pool, layer, k[0], v[0], slots)
            return pool, f.dense.attention(pool, layer, q, tables, seq_lens)

        kv = f.drafter.precompute_context_kv(weights, config, combined, context_positions)
        pool = f.kv_cache.store_context(pool, kv, context_slots)
        return f.drafter.query_forward(weights, config, pool, x[None], positions, attend)[1]

    at, block = np.arange(start), start + np.arange(T)
    ints = tuple(map(f.ints, (at, 4 + at, block[None], 4 + block, [[1, 2, 3]], [start + T])))
    weights = f.drafter.pack(f.tree(values), config, table, table)
    args = weights, f.pool(f.kv_cache.pool_shape(g, 4, 4)), f.floats(combined), f.floats(x), ints
    expected = forward_64(values, g, combined.astype(np.float64), x.astype(np.float64), start)
    np.testing.assert_allclose(numpy(f.run(run, *args))[0], expected, atol=1e-4)


def test_every_tap_is_the_output_of_its_layer(f):
    """C01, C02: a tap that is the stream entering its layer ([0, 1, 11, 111]), at any layer, the last one before the final
    norm included. The two conventions must not agree on this target: layer i adds 10^i to the stream."""
    geometry = Geometry(
        hidden_size=1, num_layers=4, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=1, rms_norm_eps=0.0,
        rope_theta=1e4, vocab_size=1, max_position_embeddings=8,
    )  # fmt: skip
    config = TargetConfig(geometry=geometry, tie_word_embeddings=True, dtype="float32")
    values = {name: np.ones(shape, np.float32) for name, shape in target_tensors(config).items()}
    for layer in range(4):
        values[f"model.layers.{layer}.self_attn.o_proj.weight"][:] = 0
        values[f"model.layers.{layer}.mlp.down_proj.weight"][:] = 10**layer / 0.7310585786  # silu(1)
    draft = replace(DRAFT, hidden_state_indices=(1, 2, 3, 4))

    def run(weights, tokens, positions, taps):
        attend = lambda pool, layer, q, k, v: (pool, q)  # noqa: E731
        x = f.target.embed(weights, tokens)
        return f.target.target_forward(weights, config, (), x, positions, attend, taps)[2]

    weights = f.target.pack(f.tree(values), config)
    args = weights, f.ints([[0]]), f.ints([[0]])
    taps, ids = draft.hidden_state_indices, draft.target_layer_ids
    outputs, inputs = (numpy(f.run(lambda *a, t=t: run(*a, t), *args))[0, 0] - 1 for t in (taps, ids))
    np.testing.assert_allclose(outputs, [1, 11, 111, 1111], rtol=1e-6)
    np.testing.assert_allclose(inputs, [0, 1, 11, 111], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_features_of_another_width_are_refused(kind):
    """C06: fc fed with two taps of three, stated as 46 against 69; reshaped or padded it would run."""
    engine = make_engine(kind)
    engine.add_request(0)
    with pytest.raises(
        Exception, match=r"features have shape \[4, 46\], expected \[rows, 69\]: 3 hidden states x width 23"
    ):
        engine.propose(step_for([0], 4), np.zeros((4, 46), np.float32))


def test_every_bfloat16_survives_the_hop():
    """C74: bfloat16 that changes on its way from JAX to PyTorch, NaN payloads aside."""
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(ml_dtypes.bfloat16)
    finite = np.isfinite(values.astype(np.float32))
    moved = to_device(np.asarray(jnp.asarray(values[finite])), torch.bfloat16, "cpu")
    normal = np.abs(values[finite].astype(np.float32)) >= 2.0**-126
    np.testing.assert_array_equal(moved.view(torch.int16).numpy().view(np.uint16)[normal], bits[finite][normal])


def test_the_hop_copies():
    """C74: zero-copy between frameworks: writing into PyTorch's tensor changes an immutable JAX array."""
    a = jnp.zeros(4)
    t = to_device(np.asarray(a), torch.float32, "cpu")
    t[0] = 5
    assert a.tolist() == [0, 0, 0, 0] and t.tolist() == [5, 0, 0, 0]
