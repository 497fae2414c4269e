"""Bugs to plant, each one that a real implementation had, and what the harness should say of it.

A mutation replaces functions of one framework's package in this process while its context lasts. The harness is never told
which: it sees a package that computes something else. Both frameworks have the same rooms, so most are written once.
"""

import difflib
import importlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from jax_dflash import checkpoint_forms
from parity_tests.harness.verdict import ROUNDING, WRONG

Patch = list[tuple[Any, str, Any]]


@dataclass(frozen=True)
class Mutation:
    """`plant(m)` gives the replacements as (object, attribute, new value) for the modules `m` of one framework."""

    name: str
    bug: str
    tap: str
    verdict: str
    plant: Callable[["Modules"], Patch]
    case: str = "mixed"  # the standard case that shows it


class Modules(SimpleNamespace):
    """The rooms of one package by name, and `xp`, its array functions."""

    framework: str
    xp: ModuleType
    drafter: ModuleType
    layers: ModuleType
    draft_step: ModuleType
    dense: ModuleType

    @classmethod
    def of(cls, framework: str) -> "Modules":
        package = {"jax": "jax_dflash", "torch": "torch_ref"}[framework]
        names = ("drafter", "layers", "draft_step", "sampling", "numerics")
        rooms = {name: importlib.import_module(f"{package}.{name}") for name in names}
        xp = importlib.import_module({"jax": "jax.numpy", "torch": "torch"}[framework])
        dense = importlib.import_module(f"{package}.attention.dense")
        return cls(framework=framework, xp=xp, dense=dense, **rooms)


@contextmanager
def planted(name: str, framework: str) -> Iterator[None]:
    """The bug of that name in that framework's package while the context lasts. Raises ValueError for an unknown one."""
    if name not in MUTATIONS:
        near = difflib.get_close_matches(name, MUTATIONS, 3, 0) or list(MUTATIONS)[:3]
        raise ValueError(
            f"no bug {name!r} to plant; did you mean {', '.join(near)}? `mutate` lists all {len(MUTATIONS)}"
        )
    with patched(MUTATIONS[name].plant(Modules.of(framework))):
        yield


@contextmanager
def patched(patches: Patch) -> Iterator[None]:
    """These attributes replaced while the context lasts."""
    kept = [(where, key, getattr(where, key)) for where, key, _ in patches]
    for where, key, value in patches:
        setattr(where, key, value)
    try:
        yield
    finally:
        for where, key, value in reversed(kept):
            setattr(where, key, value)


MUTATIONS: dict[str, Mutation] = {}


def mutation(bug: str, tap: str, verdict: str = WRONG, case: str = "mixed"):
    """Enter a plant function into MUTATIONS under its own name."""

    def enter(plant):
        name = plant.__name__.replace("_", "-")
        MUTATIONS[name] = Mutation(name, bug, tap, verdict, plant, case)
        return plant

    return enter


# --- how the pieces are replaced


def rms_norms(m: Modules, change: Callable) -> Patch:
    """Every norm of the package: `change(right, x, weight, eps)`."""
    right = m.layers.rms_norm
    wrong = lambda x, weight, eps: change(right, x, weight, eps)  # noqa: E731
    return [(m.layers, "rms_norm", wrong), (m.drafter, "rms_norm", wrong)]


def rope_tables(m: Modules, change: Callable) -> Patch:
    """`change(right, positions, rope, dtype)`; positions are `[C]` for context rows and `[B, T]` for a block."""
    right = m.drafter.rope_table
    return [(m.drafter, "rope_table", lambda positions, rope, dtype: change(right, positions, rope, dtype))]


def rotations(m: Modules, change: Callable) -> Patch:
    right = m.layers.apply_rope
    wrong = lambda x, table: change(right, x, table)  # noqa: E731
    return [(m.layers, "apply_rope", wrong), (m.drafter, "apply_rope", wrong)]


def tensors(m: Modules, change: Callable[[dict], dict]) -> Patch:
    """The checkpoint as the package packs it."""
    right = m.drafter.pack
    return [(m.drafter, "pack", lambda values, *rest: right(change(dict(values)), *rest))]


def packed(m: Modules, change: Callable) -> Patch:
    """The packed weights."""
    right = m.drafter.pack
    return [(m.drafter, "pack", lambda *args: change(right(*args)))]


def step_inputs(m: Modules, change: Callable) -> Patch:
    """`change(right, fields, **sizes) -> StepInputs`."""
    right = m.draft_step.prepare_inputs
    return [(m.draft_step, "prepare_inputs", lambda fields, **sizes: change(right, fields, **sizes))]


def stored_slots(m: Modules, change: Callable, names=("store_context", "store_layer")) -> Patch:
    """`change(pool, slots)` gives the slots that are written."""

    def wrap(right):
        return lambda pool, *args: right(pool, *args[:-1], change(pool, args[-1]))

    return [(m.draft_step, name, wrap(getattr(m.draft_step, name))) for name in names]


def attention_queries(m: Modules, change: Callable, back: Callable = lambda o, K: o) -> Patch:
    """`change(q, K)` before attention and `back(o, K)` after it, `[B, T, N, H]`, K KV heads."""
    name = {"jax": "attention", "torch": "attend_keys"}[m.framework]
    right = getattr(m.dense, name)

    def wrong(pool, layer, q, *rest):
        K = pool.shape[4]
        return back(right(pool, layer, change(q, K), *rest), K)

    return [(m.dense, name, wrong)]


def attention_scores(m: Modules, weigh: Callable) -> Patch:
    """Attention in one go, with `weigh(scores, visible, store) -> (weights [B, K, R, S], divisor [B, K, R])` in the
    softmax's place; rows are R = G T. The right `weigh` makes a negative control: the same function, and the same
    roundings, in another order."""
    xp, store, accum = m.xp, m.numerics.store, m.numerics.to_accum

    def kernel(q, k, v, visible):
        scores = accum(q) @ xp.swapaxes(accum(k), -1, -2) * q.shape[-1] ** -0.5
        weights, divisor = weigh(scores, visible, lambda x: accum(store(x, q.dtype)))
        return store(accum(store(weights, q.dtype)) @ accum(v) / divisor[..., None], q.dtype)

    if m.framework == "torch":
        return [(m.dense, "KERNELS", m.dense.KERNELS | {"dense": kernel})]
    from jax_dflash.kv_cache import gather_pages

    def attention(pool, layer, q, tables, seq_lens, last_key=None, first_key=None):
        B, T, N, H = q.shape
        K = pool.shape[4]
        k, v = (xp.nan_to_num(xp.moveaxis(a, 2, 1)) for a in gather_pages(pool, layer, tables))
        rows = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
        keys = xp.arange(k.shape[2])
        visible = (keys < seq_lens[:, None])[:, None, None]
        for bound, sees in ((last_key, operator.le), (first_key, operator.ge)):
            if bound is not None:
                visible = visible & sees(keys, xp.tile(xp.broadcast_to(bound, (B, T)), (1, N // K))[:, None, :, None])
        o = kernel(rows, k, v, visible).reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
        return xp.where((seq_lens > 0)[:, None, None, None], o, 0)

    return [(m.dense, "attention", attention)]


def softmax(xp, scores, visible):
    """Weights, the largest 1, and their sum. A row without keys has none."""
    scores = xp.where(visible, scores, -xp.inf)
    largest = xp.amax(scores, -1)[..., None]
    weights = xp.exp(scores - xp.where(largest == -xp.inf, 0, largest))
    total = weights.sum(-1)
    return weights, xp.where(total == 0, 1, total)


def bf16(xp, x):
    """Rounded to bfloat16 in whatever dtype x has: a stray cast, not the policy's."""
    return x.astype(xp.bfloat16).astype(x.dtype) if hasattr(x, "astype") else x.to(xp.bfloat16).to(x.dtype)


# --- the bugs; the first fifteen are those of the evidence that this harness is designed on


@mutation("epsilon 1e-5 for 1e-6", "context_norm")
def epsilon(m):
    return rms_norms(m, lambda right, x, weight, eps: right(x, weight, 10 * eps))


@mutation("softmax scale rounded to bfloat16", "layers.0.attn")
def softmax_scale_rounded(m):
    def rounded(q, K):
        scale = q.shape[-1] ** -0.5
        return q * (float(ml_dtypes.bfloat16(scale)) / scale)

    return attention_queries(m, rounded)


@mutation("cos and sin rounded to bfloat16", "context_k")
def cos_sin_rounded(m):
    return rope_tables(m, lambda right, *args: tuple(bf16(m.xp, t) for t in right(*args)))


@mutation("attention scores rounded to the activation dtype before the softmax", "layers.0.attn", ROUNDING)
def scores_rounded(m):
    return attention_scores(m, lambda scores, visible, store: softmax(m.xp, store(scores), visible))


@mutation("attention weights divided by their sum before they are rounded", "layers.0.attn", ROUNDING)
def weights_divided_first(m):
    """The largest weight is then no longer 1, which every dtype holds."""

    def weigh(scores, visible, store):
        weights, total = softmax(m.xp, scores, visible)
        return weights / total[..., None], m.xp.ones_like(total)

    return attention_scores(m, weigh)


@mutation("one padding key of zeros visible", "layers.0.attn")
def padding_key(m):
    def weigh(scores, visible, store):
        weights = m.xp.exp(m.xp.where(visible, scores, -m.xp.inf))
        return weights, weights.sum(-1) + 1

    return attention_scores(m, weigh)


@mutation("inverse frequencies in bfloat16", "context_k")
def frequencies_rounded(m):
    def wrong(right, positions, rope, dtype):
        inverse = m.layers.inverse_frequencies(rope)
        angles = positions[..., None] * m.xp.asarray(inverse.astype(ml_dtypes.bfloat16).astype(np.float64))
        kind = m.numerics.accum_dtype(dtype)
        return tuple(
            f(angles).astype(kind) if hasattr(angles, "astype") else f(angles).to(kind) for f in (m.xp.cos, m.xp.sin)
        )

    return rope_tables(m, wrong)


@mutation("the last context token of a request is not stored", "layers.0.attn")
def last_context_token_dropped(m):
    return stored_slots(m, lambda pool, slots: m.xp.where(slots == slots.max(), -1, slots), ["store_context"])


@mutation("block positions off by one", "layers.0.q")
def block_positions(m):
    return rope_tables(m, lambda right, positions, *rest: right(positions + (positions.ndim == 2), *rest))


@mutation("causal inside the block", "layers.0.attn")
def causal_block(m):
    def weigh(scores, visible, store):
        R, S, T = *scores.shape[-2:], 5
        length = visible.sum(-1)[..., None]
        row = m.xp.arange(R) % T
        return softmax(m.xp, scores, visible & (m.xp.arange(S) <= (length - T + row[:, None])))

    return attention_scores(m, weigh)


def swapped(values: dict, a: str, b: str) -> dict:
    """Tensors whose names hold `a` and `b` exchanged."""
    swap = {name: name.replace(a, "?").replace(b, a).replace("?", b) for name in values}
    return {name: values[swap[name]] for name in values}


@mutation("q_norm and k_norm exchanged", "context_k")
def qk_norms_swapped(m):
    return tensors(m, lambda values: swapped(values, "q_norm", "k_norm"))


def ones(values: dict, name: str) -> dict:
    return values | {name: values[name] * 0 + 1}


@mutation("hidden_norm's weight ignored", "context_norm")
def hidden_norm_ignored(m):
    return tensors(m, lambda values: ones(values, "hidden_norm.weight"))


@mutation("RoPE base 100 times too large", "context_k")
def rope_base(m):
    def wrong(right, positions, rope, dtype):
        return right(positions, replace(rope, theta=100 * rope.theta), dtype)

    return rope_tables(m, wrong)


@mutation("GQA by tiling KV heads instead of repeating them (C40)", "layers.0.attn")
def gqa_tile(m):
    def regroup(x, first, second):
        B, T, N, H = x.shape
        return m.xp.swapaxes(x.reshape(B, T, first, second, H), 2, 3).reshape(B, T, N, H)

    return attention_queries(
        m, lambda q, K: regroup(q, q.shape[2] // K, K), lambda o, K: regroup(o, K, o.shape[2] // K)
    )


def indices(change: Callable) -> Patch:
    right = checkpoint_forms.hidden_state_indices
    return [(checkpoint_forms, "hidden_state_indices", lambda keys: change(right(keys)))]


@mutation("target features in another order", "features")
def feature_order(m):
    return indices(lambda ids: ids[::-1])


@mutation("gate and up exchanged", "layers.0.act")
def gate_up_swapped(m):
    return tensors(m, lambda values: swapped(values, "gate_proj", "up_proj"))


@mutation("K norm of layer 0 used for all layers (C42)", "context_k")
def k_norm_of_layer_0(m):
    return packed(m, lambda w: w._replace(context_k_norm=w.context_k_norm[:1] + 0 * w.context_k_norm))


@mutation("context K rotated by another table than query K (C23)", "context_k")
def context_table(m):
    def wrong(right, positions, rope, dtype):
        return right(positions, replace(rope, theta=2 * rope.theta) if positions.ndim == 1 else rope, dtype)

    return rope_tables(m, wrong)


@mutation("rejected rows stored (C45)", "context_positions")
def rejected_rows_stored(m):
    def wrong(right, fields, **sizes):
        kept = right(fields | {"num_rejected": 0 * fields["num_rejected"]}, **sizes)
        return right(fields, **sizes)._replace(
            context_positions=kept.context_positions, context_slots=kept.context_slots
        )

    return step_inputs(m, wrong)


@mutation("slot -1 wraps to the last row (C71)", "pool")
def slot_wraps(m):
    return stored_slots(m, lambda pool, slots: m.xp.where(slots < 0, pool.shape[2] * pool.shape[3] - 1, slots))


@mutation("padded rows keep a request's index (C57)", "sample_request")
def stale_request_index(m):
    def wrong(right, fields, **sizes):
        inputs = right(fields, **sizes)
        return inputs._replace(sample_request=m.xp.where(inputs.sample_request < 0, 0, inputs.sample_request))

    return step_inputs(m, wrong)


@mutation("target layers off by one: a layer's input for its output (C01)", "features")
def target_layers(m):
    return indices(lambda ids: tuple(i - 1 for i in ids))


@mutation("boolean mask added to the scores (C37)", "layers.0.attn")
def boolean_mask_added(m):
    def weigh(scores, visible, store):
        everything = m.xp.ones_like(scores) > 0
        return softmax(m.xp, scores + visible, everything)

    return attention_scores(m, weigh)


@mutation("padded rows share slot 0 (C51)", "pool")
def padding_in_slot_0(m):
    return stored_slots(m, lambda pool, slots: m.xp.where(slots < 0, 0, slots))


@mutation("rejected count off by one", "context_positions")
def rejected_count(m):
    def wrong(right, fields, **sizes):
        rejected = fields["num_rejected"]
        return right(fields | {"num_rejected": m.xp.where(rejected > 0, rejected - 1, rejected)}, **sizes)

    return step_inputs(m, wrong)


@mutation("drafts read one row too early, the anchor's included", "hidden")
def sampled_rows(m):
    right = m.drafter.query_forward

    def wrong(*args):
        pool, hidden = right(*args)
        return pool, m.xp.concatenate([hidden[:, -1:], hidden[:, :-1]], 1)

    return [(m.drafter, "query_forward", wrong)]


@mutation("the block's K/V are stored after they are read", "layers.0.attn")
def read_before_write(m):
    return stored_slots(m, lambda pool, slots: 0 * slots - 1, ["store_layer"])


@mutation("context through layer 0's input_layernorm instead of hidden_norm", "context_norm")
def context_through_input_norm(m):
    return tensors(m, lambda values: values | {"hidden_norm.weight": values["layers.0.input_layernorm.weight"]})


@mutation("final norm's weight ignored", "hidden")
def final_norm_ignored(m):
    return tensors(m, lambda values: ones(values, "norm.weight"))


@mutation("positions past max_model_len not clamped", "query_positions")
def no_clamp(m):
    def wrong(right, fields, **sizes):
        far = right(fields, **sizes | {"max_model_len": 2 * sizes["max_model_len"]})
        return right(fields, **sizes)._replace(query_positions=far.query_positions)

    return step_inputs(m, wrong)


@mutation("seq_lens without the block's own rows", "seq_lens")
def seq_lens_without_block(m):
    def wrong(right, fields, *, query_len, **sizes):
        inputs = right(fields, query_len=query_len, **sizes)
        return inputs._replace(seq_lens=m.xp.where(inputs.seq_lens > 0, inputs.seq_lens - query_len, 0))

    return step_inputs(m, wrong)


@mutation("the residual is dropped after attention", "layers.0.post_attention")
def residual_dropped(m):
    return [(m.layers, "add", lambda x, y: y)]


@mutation("GELU for SiLU", "layers.0.act")
def gelu(m):
    def wrong(gate_up):
        half = gate_up.shape[-1] // 2
        gate, up = m.numerics.to_accum(gate_up[..., :half]), m.numerics.to_accum(gate_up[..., half:])
        inner = 0.7978845608028654 * (gate + 0.044715 * gate**3)
        return m.numerics.store(0.5 * gate * (1 + m.xp.tanh(inner)) * up, gate_up.dtype)

    return [(m.layers, "swiglu", wrong)]


@mutation("interleaved RoPE for half-split (C19)", "context_k")
def interleaved_rope(m):
    def wrong(right, x, table):
        shape = (*x.shape[:-1], x.shape[-1] // 2, 2)
        y = right(m.xp.swapaxes(x.reshape(shape), -1, -2).reshape(x.shape), table)
        return m.xp.swapaxes(y.reshape(*shape[:-2], 2, shape[-2]), -1, -2).reshape(x.shape)

    return rotations(m, wrong)


@mutation("the anchor of an unfinished prompt is the last sampled token", "input_ids")
def anchor_of_prefill(m):
    return step_inputs(
        m, lambda right, fields, **sizes: right(fields | {"next_prefill": fields["last_sampled"]}, **sizes)
    )


@mutation("logits rounded to the activation dtype", "logits", ROUNDING)
def logits_rounded(m):
    right = m.drafter.compute_logits

    def wrong(weights, config, hidden):
        logits = right(weights, config, hidden)
        rounded = m.numerics.store(logits, hidden.dtype)
        return rounded.astype(logits.dtype) if hasattr(rounded, "astype") else rounded.to(logits.dtype)

    return [(m.drafter, "compute_logits", wrong)]


@mutation("norms round before their weight (C77)", "context_norm", ROUNDING)
def norm_rounds_first(m):
    def wrong(right, x, weight, eps):
        return m.numerics.store(
            m.numerics.to_accum(right(x, weight * 0 + 1, eps)) * m.numerics.to_accum(weight), x.dtype
        )

    return rms_norms(m, wrong)


@mutation("padded context rows are stored in slot 0", "context_slots")
def padded_context_stored(m):
    def wrong(right, fields, *, context_rows, **sizes):
        inputs = right(fields, context_rows=context_rows, **sizes)
        padded = m.xp.arange(context_rows) >= fields["num_rows"]
        return inputs._replace(context_slots=m.xp.where(padded, 0, inputs.context_slots))

    return step_inputs(m, wrong)


@mutation("padded context rows are written where slot -1 wraps to", "pool")
def padded_context_wraps(m):
    return stored_slots(
        m, lambda pool, slots: m.xp.where(slots < 0, pool.shape[2] * pool.shape[3] - 1, slots), ["store_context"]
    )


@mutation("ties go to the last id", "draft_tokens", case="ties")
def last_of_a_tie(m):
    def wrong(logits):
        last = logits.shape[-1] - 1 - m.xp.argmax(m.xp.flip(logits, (-1,)), -1)
        return last.astype(m.xp.int32) if hasattr(last, "astype") else last.to(m.xp.int32)

    return [(m.sampling, "greedy", wrong)]


@mutation("no rescaling when a later chunk of keys has a larger score", "layers.0.attn", case="long")
def no_rescaling(m):
    class NoDecay:
        """The array module with an `exp` that is 1 for the rescaling factors, which have no axis of keys."""

        def __getattr__(self, name):
            return getattr(m.xp, name)

        def exp(self, x):
            return m.xp.ones_like(x) if x.ndim == 3 else m.xp.exp(x)

    return [(m.dense, {"jax": "jnp", "torch": "torch"}[m.framework], NoDecay())]


# --- not a bug


def reordered_attention(m: Modules) -> Patch:
    """A negative control: attention in one go instead of in chunks."""
    return attention_scores(m, lambda scores, visible, store: softmax(m.xp, scores, visible))
