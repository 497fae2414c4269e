"""What published forms compute beside the plain drafter: biases, tables of their own, RoPE, windows, causal layers.

Every form is judged by `reference`, plain numpy written from the formulas, in both frameworks and both of PyTorch's
attention kernels. Numbers C.. are cases met by users.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from jax_dflash.batch import EngineConfig, TargetStep
from jax_dflash.config import DraftConfig, InputError, check_pair, parse_draft_config, parse_target_config
from jax_dflash.names import draft_tensors, vocabulary_tensors
from jax_dflash.request_table import RequestTable
from jax_dflash.taps import Taps
from parity_tests.forms import CONFIGS, REFUSED, SIZES, offsets, shrunk, speculators, tensors, write, zlab
from parity_tests.test_cases_context import run_python
from parity_tests.tiny import FRAMEWORKS, numpy, random_values, relative_rmse

KINDS = [("jax", {}), ("torch", {"attention": "dense"}), ("torch", {"attention": "sdpa"})]
IDS = ["jax", "torch-dense", "torch-sdpa"]
CONTEXT = (13, 6)  # context tokens of two requests, in a bucket of three
K, PAGE, LIMIT = 4, 4, 48


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def frequency(rope, j: int) -> float:
    """Of channel pair j: YaRN (arXiv 2309.00071, section 3.2) blends the plain one with itself over `factor`."""
    plain = rope.theta ** (-2 * j / rope.rotary_dim)
    if rope.type == "default":
        return plain

    def pair(turns):  # the pair that turns so often in the original positions
        return rope.rotary_dim / 2 * math.log(rope.original_max_position_embeddings / turns / math.tau, rope.theta)

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    share = min(max((j - low) / (high - low), 0), 1)
    return plain * (1 - share) + plain / rope.factor * share


def rotated(x, positions, rope):
    half = rope.rotary_dim // 2
    angles = positions[:, None, None] * np.array([frequency(rope, j) for j in range(half)])
    cos, sin = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def reference(config: DraftConfig, values: dict, features: np.ndarray, anchor: int, rows: int) -> dict[str, np.ndarray]:
    """One request's block of `rows` rows behind its context, all of it in float64."""
    g, eps = config.geometry, config.geometry.rms_norm_eps
    w = {name: np.asarray(value, np.float64) for name, value in values.items()}
    C, N, KV, H = len(features), g.num_heads, g.num_kv_heads, g.head_dim
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = w["embed_tokens.weight"][[anchor] + [config.mask_token_id] * (rows - 1)] * config.embedding_scale
    at, block = np.arange(C + rows), C + np.arange(rows)
    stored = []
    for i, layer in enumerate(config.layers):

        def project(x, name, heads, p=f"layers.{i}.self_attn."):
            return (x @ w[f"{p}{name}_proj.weight"].T + w.get(f"{p}{name}_proj.bias", 0)).reshape(len(x), heads, -1)

        y = norm(x, w[f"layers.{i}.input_layernorm.weight"], eps)
        q_norm, k_norm = (w[f"layers.{i}.self_attn.{n}_norm.weight"] for n in "qk")
        q = rotated(norm(project(y, "q", N), q_norm, eps), block, layer.rope)
        every = np.concatenate([context, y])
        k, v = rotated(norm(project(every, "k", KV), k_norm, eps), at, layer.rope), project(every, "v", KV)
        stored.append((k, v))
        distance, window = block[:, None] - at, math.inf if layer.window is None else layer.window
        seen = (distance < window) & (distance > (-1 if layer.causal else -window))
        heads = []
        for n in range(N):
            scores = np.where(seen, np.exp(q[:, n] @ k[:, n // (N // KV)].T / np.sqrt(H)), 0)
            heads.append(scores / scores.sum(axis=-1, keepdims=True) @ v[:, n // (N // KV)])
        x = x + project(np.concatenate(heads, axis=-1), "o", 1)[:, 0]
        y = norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps)
        gate, up = (y @ w[f"layers.{i}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    hidden = norm(x, w["norm.weight"], eps)[1:]
    logits = hidden @ w["lm_head.weight"].T * config.logit_scale
    if "d2t" in w:
        full = np.full((rows - 1, g.vocab_size), -np.inf)
        full[:, np.arange(len(w["d2t"])) + values["d2t"]] = logits
        logits = full
    return {"kv": np.array(stored)[:, :, :C], "hidden": hidden, "logits": logits[:, : g.vocab_size]}


def inputs(config: DraftConfig) -> tuple[list[np.ndarray], list[int]]:
    """Features and anchors of the two requests."""
    rng = np.random.default_rng(11)
    rows = [rng.standard_normal((n, config.feature_size)).astype(np.float32) for n in CONTEXT]
    return rows, [int(i) for i in rng.integers(0, config.geometry.vocab_size, 2)]


def step(f, options: dict, config: DraftConfig, weights, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The taps of one whole draft step of both requests, and its drafts."""
    engine = EngineConfig.make(
        config, max_num_seqs=3, max_model_len=LIMIT, num_speculative_tokens=K, page_size=PAGE, table_width=LIMIT // PAGE
    )
    table, (features, anchors) = RequestTable(engine, external_pages=False), inputs(config)
    for i in range(2):
        table.add(i)
    one = np.ones(2, np.int32)
    columns = table.reserve(
        TargetStep(
            request_ids=[0, 1], num_context=np.array(CONTEXT), num_rejected=0 * one, num_sampled=one,
            last_sampled=np.array(anchors), next_prefill=0 * one,
        )
    )  # fmt: skip
    ints = f.ints(engine.layout(3).pack(columns, sum(CONTEXT)))
    options = options | ({} if f.name == "jax" else {"table_width": engine.table_width})

    def run(weights, pools, features, ints):
        tap = Taps()
        state = f.draft_step.DraftState(pools)
        f.draft_step.draft_step(engine, weights, state, features, ints, num_reqs=3, tap=tap, **options)
        return tap.values

    pools = tuple(f.pool(shape, dtype) for shape in f.kv_cache.pool_shapes(engine))
    found = f.run(run, weights, pools, f.floats(np.concatenate(features), dtype), ints)
    return {name: numpy(value) for name, value in found.items()}


def apart(found: dict[str, np.ndarray], config: DraftConfig, values: dict) -> float:
    """The largest relative RMS distance of a step from the reference; infinite where -inf or a decided draft differs."""
    errors, start = [], 0
    for i, (features, anchor) in enumerate(zip(*inputs(config), strict=True)):
        expected = reference(config, values, features.astype(np.float64), anchor, K + 1)
        rows = slice(start, start := start + len(features))
        errors += [relative_rmse(found[f"context_{n}"][:, rows], expected["kv"][:, j]) for j, n in enumerate("kv")]
        errors.append(relative_rmse(found["hidden"][i], expected["hidden"]))
        logits, drafts = expected["logits"], expected["logits"].argmax(-1)
        if logits.shape != found["logits"][i].shape or not np.array_equal(
            np.isinf(logits), np.isinf(found["logits"][i])
        ):
            return math.inf
        there = np.isfinite(logits)
        errors.append(relative_rmse(found["logits"][i][there], logits[there]))
        margin = np.diff(np.sort(logits)[:, -2:])[:, 0]
        if np.any((found["draft_tokens"][i] != drafts) & (margin > 1e-3)):
            return math.inf
    assert np.all(found["layers.0.attn"][2] == 0), "a padded request's rows must read zeros"
    return max(errors)


def values_of(config: DraftConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """A drafter's tensors and whole tables of tokens, float32. Biases are as large as what they are added to."""
    required, optional = vocabulary_tensors(config)
    tables = optional | required
    d2t = tables.pop("d2t", None)
    values = random_values(draft_tensors(config) | tables, seed)
    if d2t is not None:
        values["d2t"] = offsets(config, seed)
    return values


def packed(f, config: DraftConfig, values: dict, dtype: str = "float32"):
    tree = f.tree({name: value for name, value in values.items() if name != "d2t"}, dtype)
    return f.drafter.pack(tree | ({"d2t": f.ints(values["d2t"])} if "d2t" in values else {}), config)


def target_of(config: DraftConfig, vocab_size: int):
    """A target that a drafter fits, with a vocabulary of that size."""
    layers = max(config.hidden_state_indices)
    sizes = {"hidden_size": config.target_hidden_size, "num_hidden_layers": layers, "vocab_size": vocab_size}
    return parse_target_config(SIZES | {"model_type": "qwen3", "rope_theta": 1e4} | sizes)


def narrow(raw: dict) -> dict:
    """The configuration with windows of 5 where it has windows, and its first two layers and its last."""
    for keys in (raw, raw.get("transformer_layer_config", {})):
        changes = {"sliding_window": 5, "num_hidden_layers": 3}
        keys |= {key: value for key, value in changes.items() if keys.get(key)}
        if keys.get("layer_types"):
            keys["layer_types"] = [*keys["layer_types"][:2], keys["layer_types"][-1]]
    return raw


# Four channel pairs: one kept, two on the ramp, one divided.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
S, F = "sliding_attention", "full_attention"
EVERYTHING = zlab(
    attention_bias=True, logit_scale=0.5, embed_scale=4.0, target_hidden_size=20, draft_vocab_size=12,
    layer_types=[F, S, S], sliding_window=5,
    rope_parameters={F: {"rope_theta": 100.0} | YARN, S: {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
)  # fmt: skip
FEATURES = {
    "biases": zlab(attention_bias=True),
    "scales": zlab(logit_scale=0.5, embed_scale=4.0),
    "target width": zlab(target_hidden_size=20),
    "reduced vocabulary": zlab(draft_vocab_size=12),
    "yarn": zlab(rope_theta=100, rope_scaling=YARN),
    "partial rotary": zlab(partial_rotary_factor=0.5),
    "causal": zlab(is_causal=True),
    "windows and directions": zlab(layer_types=[S, F, S], sliding_window=5),
    "windows to both sides": zlab(layer_types=[S, S, F], sliding_window=3, is_causal=False),
    "window of one": zlab(layer_types=[F, S, S], sliding_window=1),
    "rope by layer type": zlab(
        layer_types=[F, S, S],
        sliding_window=5,
        rope_parameters={F: {"rope_theta": 100.0} | YARN, S: {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "everything": EVERYTHING,
    "yarn of a part": zlab(rope_theta=100, partial_rotary_factor=0.5, rope_scaling=YARN),
}


@pytest.mark.parametrize("name, options", KINDS, ids=IDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_the_reference_s(feature, name, options):
    """A feature computed by half, in the block and not in its context, in one framework and not in the other: context
    K/V, final hidden states, logits and drafts of two requests beside a padded one."""
    f, config = FRAMEWORKS[name], parse_draft_config(FEATURES[feature])
    values = values_of(config)
    assert apart(step(f, options, config, packed(f, config, values)), config, values) <= 1e-5


def float64_errors() -> list[float]:
    """The distance of a drafter with every feature in every kind, in a process that has float64."""
    config, errors = parse_draft_config(EVERYTHING), []
    values = values_of(config)
    for name, options in KINDS:
        weights = packed(FRAMEWORKS[name], config, values, "float64")
        errors.append(apart(step(FRAMEWORKS[name], options, config, weights, "float64"), config, values))
    return errors


def test_features_in_float64():
    """A cast in the middle, which float32 hides: the same code in float64 is the reference up to 1e-12."""
    code = (
        "import json; from parity_tests.test_forms_forward import float64_errors; print(json.dumps(float64_errors()))"
    )
    errors = json.loads(run_python(code, JAX_ENABLE_X64="1").splitlines()[-1])
    assert len(errors) == len(KINDS) and max(errors) <= 1e-12, errors


def test_a_bias_is_added_before_the_rounding(f):
    """C15: a product rounded to bfloat16 before its bias: 1 + 2^-8 falls to 1, and 2^-9 more changes nothing."""
    x, bias = f.floats([[1.0, 2.0**-8]], "bfloat16"), f.floats([2.0**-9], "bfloat16")
    weight = f.floats([[1.0], [1.0]] if f.name == "jax" else [[1.0, 1.0]], "bfloat16")
    assert numpy(f.numerics.linear(x, weight, bias)).tolist() == [[1.0078125]]


def test_biases_survive_packing(f):
    """C15: biases of k and v exchanged, or lost, on the way to fused arrays and back; two shards in JAX."""
    config = parse_draft_config(zlab(attention_bias=True))
    values = random_values(draft_tensors(config))
    table = f.floats(np.zeros((2, 16)))
    for options in ({}, {"shards": 2}) if f.name == "jax" else ({},):
        weights = f.drafter.pack(f.tree(values), config, table, table, **options)
        back = f.drafter.unpack(weights, config, **options)
        assert set(back) == set(values)
        for name, value in values.items():
            np.testing.assert_array_equal(numpy(back[name]), value.astype(np.float64), err_msg=name)


PUBLISHED = [name for name in CONFIGS if name != REFUSED]


@pytest.mark.parametrize("name, options", KINDS, ids=IDS)
@pytest.mark.parametrize("form, own", [*((form, False) for form in PUBLISHED), (PUBLISHED[0], True)])
def test_published_forms(form, own, name, options, tmp_path):
    """A form that opens and drafts something else: each with the keys it has, a fraction of its widths and a window that
    its context passes, through the real loader, with the target's tables and (one) with its own."""
    f, raw = FRAMEWORKS[name], narrow(shrunk(CONFIGS[form]))
    values = tensors(raw, own=own)
    folder = write(tmp_path / "drafter", raw, values)
    config, drafter = f.drafter.load_drafter(folder, f.numerics.as_dtype("float32"))
    shape = (64, config.geometry.hidden_size)
    shared = random_values({"embed_tokens.weight": shape, "lm_head.weight": shape}, seed=1)
    config = check_pair(config, target_of(config, 64), values)
    weights = f.drafter.pack_drafter(drafter, config, *(f.floats(table) for table in shared.values()))
    assert apart(step(f, options, config, weights), config, shared | values) <= 1e-5


def test_a_reduced_head_through_the_loader(f, tmp_path):
    """C08: the drafter's own head replaced by the target's, or d2t read as the ids themselves, which drafts 4 for 5."""
    raw = speculators(draft_vocab_size=3, mask_token_id=5, nested={"vocab_size": 8})
    values = tensors(raw) | {"d2t": np.array([2, 4, 5])}
    values["lm_head.weight"] = np.zeros((3, 16), np.float32)
    values["lm_head.weight"][:, 0] = [0.1, 0.9, 0.3]
    config, drafter = f.drafter.load_drafter(write(tmp_path / "drafter", raw, values), f.numerics.as_dtype("float32"))
    config = check_pair(config, target_of(config, 8), values)
    tables = [f.floats(np.ones((8, 16)))] * 2
    logits = f.drafter.compute_logits(
        f.drafter.pack_drafter(drafter, config, *tables), config, f.floats(np.eye(1, 16)[None])
    )
    np.testing.assert_allclose(numpy(logits)[0, 0, [2, 5, 7]], [0.1, 0.9, 0.3], rtol=1e-6)
    assert np.isneginf(numpy(logits)[0, 0, [0, 1, 3, 4, 6]]).all() and numpy(logits).shape == (1, 1, 8)
    assert numpy(f.sampling.greedy(logits)).tolist() == [[5]]


def test_a_drafter_without_tables_needs_the_target_s(f):
    """A table of zeros, or none, in the place of the target's."""
    config = parse_draft_config(zlab())
    values = f.tree(random_values(draft_tensors(config)))
    with pytest.raises(InputError, match="has not both an embedding and an LM head of its own; pass the target's"):
        f.drafter.pack(values, config, f.floats(np.ones((40, 16))))


def test_a_scaled_embedding_rounds_once(f):
    """An embedding scaled in bfloat16 by a rounded scale, 3 x 1: 3 x 1.0039 = 3.0117 rounds to 3.0156."""
    config = parse_draft_config(zlab(embed_scale=1.00390625))
    weights = packed(f, config, values_of(config), "bfloat16")._replace(embed_tokens=f.floats([[3.0]], "bfloat16"))
    assert numpy(f.drafter.embed(weights, config, f.ints([[0]]))).tolist() == [[[3.015625]]]


def rope_of(**changes):
    """The RoPE of a drafter's configuration."""
    return parse_draft_config(zlab(**changes)).layers[0].rope


def cos_sin(f, positions, rope):
    return [numpy(x) for x in f.layers.rope_table(f.ints(positions), rope, f.numerics.as_dtype("float32"))]


def test_yarn_frequencies(f):
    """C21: YaRN ignored, or its ramp between other channels. theta 1e4, 8 channels, 1024 positions: 32 turns at pair
    log10(1024 / 64 pi) = 0.707 and one at 2.212, in whole pairs 0 and 3: shares of the divided one are 0, 1/3, 2/3, 1."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    whole, exact = (rope_of(rope_theta=1e4, rope_scaling=yarn | {"truncate": truncate}) for truncate in (True, False))
    np.testing.assert_allclose(f.layers.inverse_frequencies(whole), [1, 0.075, 0.005, 0.00025], rtol=1e-12)
    shares = np.array([0, (1 - 0.70697) / 1.50515, (2 - 0.70697) / 1.50515, 1])
    plain = np.array([1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(f.layers.inverse_frequencies(exact), plain * (1 - 0.75 * shares), rtol=2e-5)
    np.testing.assert_allclose(f.layers.inverse_frequencies(rope_of(rope_theta=1e4)), plain, rtol=1e-15)
    _, sin = cos_sin(f, [1], replace(whole, attention_factor=1.0))
    np.testing.assert_allclose(sin[0], np.sin([1, 0.075, 0.005, 0.00025]), rtol=3e-7)


@pytest.mark.parametrize(
    "factor, option, value",
    [
        (16.0, "mscale", 1.0),
        (16.0, "ignore-mscale", 1.2772588722),
        (64.0, "mscale", 1.0),
        (64.0, "ignore-mscale", 1.4158883083),
    ],
)
def test_yarn_attention_factor_scales_cos_and_sin(f, factor, option, value, tmp_path):
    """C22: mscale / mscale_all_dim ignored, or honoured where a server does not, by the loader's own option; a factor on
    one of cos and sin, or of q and k (their scores grow by its square)."""
    raw = zlab(rope_scaling={"rope_type": "yarn", "factor": factor, "mscale": 1.0, "mscale_all_dim": 1.0})
    folder = write(tmp_path / "drafter", raw, tensors(raw))
    rope = f.drafter.load_drafter(folder, yarn_attention=option)[0].layers[0].rope
    cos, sin = cos_sin(f, [0, 7], rope)
    np.testing.assert_allclose(cos[0], value, rtol=1e-7)
    np.testing.assert_allclose(np.hypot(cos[1], sin[1]), value, rtol=3e-7)
    q = f.floats([[[1.0, 2, 3, 4, 5, 6, 7, 8]]])
    rotated = numpy(f.layers.apply_rope(q, f.layers.rope_table(f.ints([7]), rope, q.dtype)))
    np.testing.assert_allclose((rotated**2).sum(), value**2 * 204, rtol=1e-6)


def test_partial_rotary_is_half_split_inside_its_channels(f):
    """C19: pairs made over the whole head, or the channels past rotary_dim rotated too; at position 1 of theta 1e4."""
    table = f.layers.rope_table(f.ints([1]), rope_of(rope_theta=1e4, partial_rotary_factor=0.5), f.floats(0).dtype)
    y = numpy(f.layers.apply_rope(f.floats([[[1, 2, 3, 4, 5, 6, 7, 8]]]), table))[0, 0]
    np.testing.assert_allclose(y[:4], [-1.984111, 1.959901, 2.462378, 4.019800], atol=1e-6)
    assert y[4:].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("name, options", KINDS, ids=IDS)
def test_rope_by_layer(name, options):
    """C25: one table for layers that rotate differently, in the block or in the context: theta 1e4 and 1e6, all channels
    and half of them."""
    f, config = FRAMEWORKS[name], parse_draft_config(zlab())
    ropes = rope_of(rope_theta=1e4), rope_of(rope_theta=1e6, partial_rotary_factor=0.5), rope_of(rope_scaling=YARN)
    config = replace(config, layers=tuple(replace(config.layers[0], rope=rope) for rope in ropes))
    tables = f.drafter.rope_tables(config, f.ints([100]), f.floats(0).dtype)
    for layer, theta, pairs in ((0, 1e4, 4), (1, 1e6, 2)):
        inv_freq = theta ** (-np.arange(pairs) / pairs)
        np.testing.assert_allclose(numpy(tables[layer][1])[0], np.sin(100 * inv_freq), atol=1e-5)
    values = values_of(config)
    assert apart(step(f, options, config, packed(f, config, values)), config, values) <= 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_the_anchor_of_a_causal_drafter_sees_no_mask(f, causal):
    """C35: a causal mask where there is none, or the reverse. Another embedding of the mask token, whose rows follow the
    anchor, moves what the anchor's row gives to layer 1, and not a bit of it in a causal drafter."""
    config = parse_draft_config(zlab(is_causal=causal))
    values, found = values_of(config), []
    for changed in (0, 1):
        values["embed_tokens.weight"][config.mask_token_id] += changed
        found.append(step(f, {"attention": "sdpa"} if f.name == "torch" else {}, config, packed(f, config, values)))
    before, after = (taps["layers.0.out"][0] for taps in found)
    assert np.abs(before[1:] - after[1:]).max() > 1e-2
    assert np.array_equal(before[0], after[0]) == causal
