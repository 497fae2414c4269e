"""Training a target and a DFlash drafter for it: masks, losses and train steps.

The drafter is trained through the functions that serve it: context K/V from `precompute_context_kv`, blocks through
`query_forward`; only `attend` differs, which reads the context K/V of the sequence instead of a paged pool.

B sequences, S tokens of one, A anchors of one, T = block_size rows of a block, K draft tokens = T - 1, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_dflash import drafter as drafters
from jax_dflash import target as targets
from jax_dflash.attention import dense
from jax_dflash.config import DraftConfig, InputError, TargetConfig
from jax_dflash.inputs import slot_mapping
from jax_dflash.kv_cache import pool_shape, store_layer
from jax_dflash.numerics import accum_einsum, store, to_accum

Params = dict[str, Array]


def masked_attention(q: Float[Array, "B T N H"], k: Array, v: Array, mask: Bool[Array, "B T S"]) -> Array:
    """Softmax attention over keys `[B, S, K, H]`; every row of the mask must see a key."""
    B, T, N, H = q.shape
    q = q.reshape(B, T, k.shape[2], -1, H)
    scores = accum_einsum("btkgh,bskh->bkgts", q, k) * H**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    return store(accum_einsum("bkgts,bskh->btkgh", store(weights, q.dtype), v), q.dtype).reshape(B, T, N, H)


def causal_attend(pool: None, layer: int, q: Array, k: Array, v: Array) -> tuple[None, Array]:
    """`attend` of a whole sequence from position 0: each token sees itself and what stands before it."""
    S = q.shape[1]
    mask = jnp.tril(jnp.ones((S, S), bool))[None]
    return pool, masked_attention(q, k, v, mask)


def block_mask(
    anchors: Int[Array, "B A"], num_context: int, block_size: int, window: int | None = None, causal: bool = False
) -> Bool[Array, "B AT S+AT"]:
    """Who sees whom: a row of the block anchored at position a sees context j iff j < a, strictly, and every row of its
    own block in both directions; nothing of other blocks (arXiv 2602.06036). Of these a layer with `window` and `causal`
    (`checkpoint_forms.Layer`) sees a part."""
    B, A = anchors.shape
    own = jnp.repeat(anchors, block_size, axis=1)
    context = jnp.arange(num_context) < own[..., None]
    block = jnp.arange(A * block_size) // block_size
    blocks = jnp.broadcast_to(block[:, None] == block, (B, A * block_size, A * block_size))
    mask = jnp.concatenate([context, blocks], axis=-1)
    rows = own + jnp.arange(A * block_size) % block_size
    keys = jnp.concatenate([jnp.broadcast_to(jnp.arange(num_context), (B, num_context)), rows], axis=1)
    distance = rows[:, :, None] - keys[:, None]
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= jnp.abs(distance) < window
    return mask


def draft_logits(
    weights: drafters.DraftWeights,
    config: DraftConfig,
    tokens: Int[Array, "B S"],
    features: Float[Array, "B S F"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A K V"]:
    """The draft logits of blocks anchored anywhere in the sequences, all in one pass."""
    (B, S), A, T = tokens.shape, anchors.shape[1], config.block_size
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    combined = drafters.combine_hidden_states(weights, features)
    context = jax.vmap(lambda x, p: drafters.precompute_context_kv(weights, config, x, p), out_axes=2)(
        combined, positions
    )
    masks = [block_mask(anchors, S, T, layer.window, layer.causal) for layer in config.layers]

    def attend(pool, layer, q, k, v):
        keys = jnp.concatenate([context[layer, 0], k], axis=1)
        return pool, masked_attention(q, keys, jnp.concatenate([context[layer, 1], v], axis=1), masks[layer])

    steps = jnp.arange(T, dtype=jnp.int32)
    anchor_ids = jnp.take_along_axis(tokens, anchors, axis=1)
    ids = jnp.where(steps == 0, anchor_ids[..., None], config.mask_token_id)
    x = drafters.embed(weights, config, ids).reshape(B, A * T, -1)
    rows = (anchors[..., None] + steps).reshape(B, A * T)
    _, hidden = drafters.query_forward(weights, config, None, x, rows, attend)
    return drafters.compute_logits(weights, config, hidden.reshape(B, A, T, -1)[:, :, 1:])


def draft_loss(
    logits: Float[Array, "B A K V"], tokens: Int[Array, "B S"], anchors: Int[Array, "B A"], gamma: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross entropy of the token at position a + k, weighted exp(-(k-1)/gamma), and the mean accepted length that greedy
    drafts would have on these tokens, the bonus token counted."""
    K = logits.shape[2]
    rows = anchors[..., None] + 1 + jnp.arange(K)
    labels = jnp.take_along_axis(tokens, rows.reshape(rows.shape[0], -1), axis=1).reshape(rows.shape)
    weight = jnp.exp(-jnp.arange(K) / gamma)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weight
    right = jnp.cumprod(jnp.argmax(logits, axis=-1) == labels, axis=-1)
    return jnp.mean(losses) / jnp.mean(weight), 1 + jnp.mean(jnp.sum(right, axis=-1))


def target_loss(
    params: Params, config: TargetConfig, dtype: jnp.dtype, tokens: Int[Array, "B S+1"]
) -> Float[Array, ""]:
    """Mean cross entropy of the next token."""
    weights = targets.pack({name: store(value, dtype) for name, value in params.items()}, config)
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    # The gradient of a lookup is a scatter in which a batch's tokens all fall on a few rows; a product has none.
    x = store(
        accum_einsum("bsv,vd->bsd", jax.nn.one_hot(ids, len(weights.embed_tokens), dtype=dtype), weights.embed_tokens),
        dtype,
    )
    _, hidden, _ = targets.target_forward(weights, config, None, x, positions, causal_attend)
    logits = targets.compute_logits(weights, hidden)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def optimizer(weight_decay: float = 0.01) -> optax.GradientTransformation:
    """AdamW with clip 1.0, the paper's; norms are not decayed. Its updates are for a learning rate of 1: `train_steps`
    takes the rate of each step as data, so that a schedule never compiles."""

    def decayed(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1.0, b2=0.95, weight_decay=weight_decay, mask=decayed)
    )


def learning_rate(peak: float, step: Int[np.ndarray, "n"], num_steps: int) -> Float[np.ndarray, "n"]:
    """Warm-up over 4% of the steps, then a cosine to 0."""
    warm = max(1, num_steps // 25)
    cosine = 0.5 * (1 + np.cos(np.pi * np.clip((step - warm) / max(1, num_steps - warm), 0, 1)))
    return peak * np.where(step < warm, (step + 1) / warm, cosine)


class TrainState(NamedTuple):
    """Master weights in at least float32, the optimizer's state, and the steps done."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]


def init_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    """A state whose master weights are these parameters."""
    master = {name: to_accum(value) for name, value in params.items()}
    return TrainState(master, tx.init(master), jnp.zeros((), jnp.int32))


def train_steps(
    loss: Callable[[Params, PRNGKeyArray], tuple[Array, Array]],
    tx: optax.GradientTransformation,
    state: TrainState,
    key: PRNGKeyArray,
    rates: Float[Array, "n"],
) -> tuple[TrainState, Array, Array]:
    """One update per learning rate, all on the device; the losses and the auxiliary values of each. Step i draws from
    key fold i."""

    def one(state: TrainState, rate: Array):
        draw = jax.random.fold_in(key, state.step)
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(state.params, draw)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda update: rate * update, updates)
        params = {name: value + updates[name] for name, value in state.params.items()}
        return TrainState(params, opt_state, state.step + 1), (value, aux)

    state, (losses, aux) = lax.scan(one, state, rates)
    return state, losses, aux


def sample_windows(corpus: Int[Array, "M"], key: PRNGKeyArray, batch: int, length: int) -> Int[Array, "B S"]:
    """Random stretches of one long token array."""
    starts = jax.random.randint(key, (batch,), 0, corpus.shape[0] - length)
    return corpus[starts[:, None] + jnp.arange(length)].astype(jnp.int32)


def target_batch_loss(config: TargetConfig, dtype: jnp.dtype, corpus: Array, batch: int, length: int):
    """The loss of `train_steps` for a language model on windows of a corpus."""

    def loss(params, key):
        value = target_loss(params, config, dtype, sample_windows(corpus, key, batch, length + 1))
        return value, value

    return loss


def draft_batch_loss(
    config: DraftConfig,
    target_config: TargetConfig,
    target: targets.TargetWeights,
    sequences: Int[Array, "M S"],
    first: Int[Array, "M"],
    last: Int[Array, "M"],
    *,
    batch: int,
    num_anchors: int,
    gamma: float,
):
    """The loss of `train_steps` for a drafter: random sequences, and anchors drawn anew in [first, last] of each, whose
    whole block must lie inside the sequence. The target is frozen; its hidden states are made in the same step. Raises
    InputError for a drafter with a reduced vocabulary: labels outside it have no logit, and its `d2t` no gradient."""
    if config.draft_vocab_size is not None:
        raise InputError(
            f"draft_vocab_size={config.draft_vocab_size}: a drafter of some of the target's tokens cannot be trained here, "
            "the other labels have no logit; train one of the whole vocabulary"
        )

    def loss(params, key):
        rows_key, anchors_key = jax.random.split(key)
        rows = jax.random.randint(rows_key, (batch,), 0, sequences.shape[0])
        tokens = sequences[rows].astype(jnp.int32)
        low, high = first[rows, None], last[rows, None] + 1
        anchors = jax.random.randint(anchors_key, (batch, num_anchors), low, high)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        taps = config.hidden_state_indices
        x = targets.embed(target, tokens)
        _, _, features = targets.target_forward(target, target_config, None, x, positions, causal_attend, taps)
        values = {name: store(value, features.dtype) for name, value in params.items()}
        weights = drafters.pack(values, config, target.embed_tokens, target.lm_head)
        return draft_loss(draft_logits(weights, config, tokens, features, anchors), tokens, anchors, gamma)

    return loss


@partial(jax.jit, static_argnames=("config", "num_new", "page_size"))
def continue_text(
    weights: targets.TargetWeights,
    config: TargetConfig,
    prompts: Int[Array, "B P"],
    temperature: Float[Array, "B"],
    key: PRNGKeyArray,
    *,
    num_new: int,
    page_size: int = 16,
) -> Int[Array, "B P+num_new"]:
    """The target's own continuations, greedy where temperature is 0: the text that a drafter should be trained on."""
    B, P = prompts.shape
    pages = dense.padded_width(-(-(P + num_new) // page_size), page_size)
    tables = jnp.asarray(1 + np.arange(B * pages, dtype=np.int32).reshape(B, pages))
    pool = jnp.zeros(pool_shape(config.geometry, 1 + B * pages, page_size), weights.norm.dtype)

    def run(pool, ids, positions):
        T = ids.shape[1]
        slots = slot_mapping(positions.reshape(-1), jnp.repeat(tables, T, axis=0), page_size, P + num_new)

        def attend(pool, layer, q, k, v):
            pool = store_layer(pool, layer, k.reshape(B * T, *k.shape[2:]), v.reshape(B * T, *v.shape[2:]), slots)
            return pool, dense.attention(pool, layer, q, tables, positions[:, -1] + 1, positions)

        pool, hidden, _ = targets.target_forward(weights, config, pool, targets.embed(weights, ids), positions, attend)
        return pool, targets.compute_logits(weights, hidden[:, -1])

    def pick(logits, key):
        noisy = logits / jnp.maximum(temperature, 1e-3)[:, None] + jax.random.gumbel(key, logits.shape, logits.dtype)
        return jnp.where(temperature > 0, jnp.argmax(noisy, -1), jnp.argmax(logits, -1)).astype(jnp.int32)

    def step(carry, step_key):
        pool, ids, position = carry
        pool, logits = run(pool, ids[:, None], jnp.full((B, 1), position, jnp.int32))
        return (pool, pick(logits, step_key), position + 1), ids

    keys = jax.random.split(key, num_new + 1)
    pool, logits = run(pool, prompts, jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P)))
    _, new = lax.scan(step, (pool, pick(logits, keys[0]), jnp.int32(P)), keys[1:])
    return jnp.concatenate([prompts, new.T], axis=1)


def end_of_answers(sequences: Int[np.ndarray, "B S"], start: int, eos: int, repeat: int = 32) -> Int[np.ndarray, "B"]:
    """Where each answer from `start` on ends: after its first eos, or where its first repeated `repeat`-gram is whole."""
    ends = np.full(len(sequences), sequences.shape[1])
    for row, tokens in enumerate(sequences):
        seen: set[bytes] = set()
        for end in range(start + 1, len(tokens) + 1):
            gram = tokens[max(start, end - repeat) : end].tobytes()
            if tokens[end - 1] == eos or (end - start >= repeat and gram in seen):
                ends[row] = end
                break
            seen.add(gram)
    return ends
