"""What published forms compute beside the plain drafter: biases, tables of their own, RoPE, windows, causal layers.

Every form is judged by `reference`, plain numpy written from the formulas, in both frameworks and both of PyTorch's
attention kernels. Numbers C.. are cases met by users.
"""

import json
import math

import numpy as np
import pytest

from jax_dflash.batch import EngineConfig, RequestTable, TargetStep
from jax_dflash.config import DraftConfig, parse_draft_config
from jax_dflash.names import draft_tensors
from jax_dflash.taps import Taps
from parity_tests.forms import zlab
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
    S, N, KV, H = len(features), g.num_heads, g.num_kv_heads, g.head_dim
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = w["embed_tokens.weight"][[anchor] + [config.mask_token_id] * (rows - 1)] * config.embedding_scale
    at, block = np.arange(S + rows), S + np.arange(rows)
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
        far, ahead = (math.inf if layer.window is None else layer.window for _ in range(2))
        distance = block[:, None] - at
        seen = (distance < far) & (distance > (-1 if layer.causal else -ahead))
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
    return {"kv": np.array(stored)[:, :, :S], "hidden": hidden, "logits": logits[:, : g.vocab_size]}


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

    def run(weights, pool, features, ints):
        tap = Taps()
        state = f.draft_step.DraftState(pool)
        f.draft_step.draft_step(engine, weights, state, features, ints, num_reqs=3, tap=tap, **options)
        return tap.values

    pool = f.pool(f.kv_cache.pool_shape(config.geometry, engine.num_pages, PAGE), dtype)
    found = f.run(run, weights, pool, f.floats(np.concatenate(features), dtype), ints)
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
    g = config.geometry
    tables = {name: (g.vocab_size, g.hidden_size) for name in ("embed_tokens.weight", "lm_head.weight")}
    return random_values(draft_tensors(config) | tables, seed)


def packed(f, config: DraftConfig, values: dict, dtype: str = "float32"):
    tree = f.tree(values, dtype)
    tables = tree.pop("embed_tokens.weight"), tree.pop("lm_head.weight")
    return f.drafter.pack(tree, config, *tables)


FEATURES = {
    "biases": zlab(attention_bias=True),
}


@pytest.mark.parametrize("name, options", KINDS, ids=IDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_the_reference_s(feature, name, options):
    """A feature computed by half, in the block and not in its context, in one framework and not in the other: context
    K/V, final hidden states, logits and drafts of two requests beside a padded one. Dropped, each moves the drafts' hidden
    states by more than 1e-2."""
    f, config = FRAMEWORKS[name], parse_draft_config(FEATURES[feature])
    values = values_of(config)
    assert apart(step(f, options, config, packed(f, config, values)), config, values) <= 1e-5


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_matters(feature):
    """A test that a drafter without the feature passes: an empty window, a bias of zeros."""
    config, plain = parse_draft_config(FEATURES[feature]), parse_draft_config(zlab())
    (features, *_), (anchor, *_) = inputs(config)
    values = values_of(config)
    shared = {name: value for name, value in values.items() if not name.endswith("bias")}
    with_it = reference(config, values, features, anchor, K + 1)
    without = reference(plain, shared, features, anchor, K + 1)
    assert relative_rmse(with_it["hidden"], without["hidden"]) > 1e-2


def float64_errors() -> dict[str, float]:
    """The distance of every feature in every kind, in a process that has float64."""
    errors = {}
    for feature, raw in FEATURES.items():
        config = parse_draft_config(raw)
        values = values_of(config)
        for (name, options), label in zip(KINDS, IDS, strict=True):
            weights = packed(FRAMEWORKS[name], config, values, "float64")
            found = step(FRAMEWORKS[name], options, config, weights, "float64")
            errors[f"{feature} {label}"] = apart(found, config, values)
    return errors


def test_features_in_float64():
    """A cast in the middle, which float32 hides: the same code in float64 is the reference up to 1e-12."""
    code = (
        "import json; from parity_tests.test_forms_forward import float64_errors; print(json.dumps(float64_errors()))"
    )
    errors = json.loads(run_python(code, JAX_ENABLE_X64="1").splitlines()[-1])
    assert len(errors) == len(KINDS) * len(FEATURES)
    assert all(error <= 1e-12 for error in errors.values()), errors


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
