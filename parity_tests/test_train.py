"""Training: the mask, the loss, and that what is trained is what is served."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dflash import drafter as drafters
from jax_dflash import target as targets
from jax_dflash import train
from jax_dflash.batch import TargetStep
from jax_dflash.config import InputError
from jax_dflash.engine import DraftEngine
from jax_dflash.names import draft_tensors, target_tensors
from parity_tests.tiny import DRAFT, GEOMETRY, TARGET, WINDOWED, random_values

PRINTED_MASKS = {
    (None, False): """
        110000 111000
        110000 111000
        110000 111000
        111100 000111
        111100 000111
        111100 000111
    """,
    (2, False): """
        010000 110000
        000000 111000
        000000 011000
        000100 000110
        000000 000111
        000000 000011
    """,
    (3, True): """
        110000 100000
        010000 110000
        000000 111000
        001100 000100
        000100 000110
        000000 000111
    """,
}


@pytest.mark.parametrize("window, causal", PRINTED_MASKS)
def test_block_mask_is_the_printed_one(window, causal):
    """Would catch: a block that sees its own anchor's position in the context, other blocks, or itself causally; a window
    by packed instead of original position."""
    mask = train.block_mask(jnp.array([[2, 4]]), num_context=6, block_size=3, window=window, causal=causal)
    printed = PRINTED_MASKS[window, causal]
    expected = [[int(c) for c in line.replace(" ", "")] for line in printed.split("\n") if line.strip()]
    np.testing.assert_array_equal(np.asarray(mask[0], int), expected)


def test_causal_attention_sees_itself_and_before():
    """Would catch: a training mask off by one, which trains a target that copies its input."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 5, 2, 4)), jnp.float32) for _ in range(3))
    _, out = train.causal_attend(None, 0, q, k, v)
    np.testing.assert_allclose(out[:, 0], v[:, 0], atol=1e-6)
    _, changed = train.causal_attend(None, 0, q, k.at[:, 4].set(9), v.at[:, 4].set(9))
    np.testing.assert_array_equal(changed[:, :4], out[:, :4])


def test_draft_loss_by_hand():
    """Would catch: labels shifted by one, a loss on the anchor, a weight that does not decay."""
    tokens = jnp.array([[5, 1, 2, 3, 0]])
    logits = jnp.log(
        jnp.array([[[[0.1, 0.1, 0.5, 0.3], [0.25, 0.25, 0.25, 0.25]]]])
    )  # after the anchor at 1: 2, then 3
    loss, accepted = train.draft_loss(logits, tokens, jnp.array([[1]]), gamma=4.0)
    decay = np.exp(-0.25)
    assert float(loss) == pytest.approx((-np.log(0.5) - np.log(0.25) * decay) / (1 + decay), rel=1e-6)
    assert float(accepted) == 2.0  # 2 is right, 3 ties with 0 and loses; the bonus token counts


@pytest.fixture(scope="module")
def values():
    return {name: jnp.asarray(value) for name, value in random_values(draft_tensors(DRAFT)).items()}


@pytest.mark.parametrize("config", [DRAFT, WINDOWED], ids=["full", "windows"])
def test_training_computes_what_the_engine_serves(values, config):
    """Would catch: masks by packed instead of original position, context that includes the anchor, other RoPE offsets:
    train/serve mismatches that only lower acceptance."""
    rng = np.random.default_rng(5)
    tables = jnp.asarray(rng.standard_normal((2, GEOMETRY.vocab_size, GEOMETRY.hidden_size)), jnp.float32)
    weights = drafters.pack(values, config, *tables)
    S, anchor = 30, 11
    tokens = rng.integers(0, 50, (1, S)).astype(np.int32)
    features = rng.standard_normal((1, S, DRAFT.feature_size)).astype(np.float32)
    trained = train.draft_logits(
        weights, config, jnp.asarray(tokens), jnp.asarray(features), jnp.array([[3, anchor, 20]])
    )

    engine = DraftEngine(config, weights, max_num_seqs=1, max_model_len=64, page_size=4, taps=1)
    engine.capture(progress=False)
    engine.add_request(0)
    one = np.ones(1, np.int32)
    step = TargetStep(
        request_ids=[0], num_context=one * anchor, num_rejected=one * 0, num_sampled=one,
        last_sampled=one * tokens[0, anchor], next_prefill=one * 0,
    )  # fmt: skip
    engine.propose(step, features[0, :anchor])
    served = np.asarray(engine.last_taps["logits"])[0]
    np.testing.assert_allclose(trained[0, 1], served, atol=2e-5 * np.abs(served).max())


def test_a_few_steps_lower_both_losses(values):
    """Would catch: a gradient that stops at pack(), an update of the wrong sign, a frozen parameter."""
    dtype, key = jnp.dtype("float32"), jax.random.key(0)
    corpus = jnp.asarray(np.tile(np.arange(50, dtype=np.uint16), 40))
    target_values = {n: jnp.asarray(v) for n, v in random_values(target_tensors(TARGET)).items()}
    tx, rates = train.optimizer(), jnp.full(12, 3e-3)
    state = train.init_state(target_values, tx)
    loss = train.target_batch_loss(TARGET, dtype, corpus, batch=4, length=24)
    state, losses, _ = jax.jit(lambda s: train.train_steps(loss, tx, s, key, rates))(state)
    assert losses[-1] < 0.9 * losses[0]
    assert int(state.step) == 12

    frozen = targets.pack(state.params, TARGET)
    sequences = corpus[: 8 * 40].reshape(8, 40)
    bounds = jnp.full(8, 5), jnp.full(8, 40 - DRAFT.block_size)
    loss = train.draft_batch_loss(
        DRAFT, TARGET, frozen, sequences, *bounds, batch=4, num_anchors=3, gamma=4.0
    )  # fmt: skip
    before = train.init_state(values, tx)
    after, losses, accepted = jax.jit(lambda s: train.train_steps(loss, tx, s, key, rates))(before)
    assert losses[-1] < 0.9 * losses[0]
    assert all(accepted >= 1)
    assert all(bool(jnp.any(after.params[name] != before.params[name])) for name in values)


def test_a_reduced_vocabulary_is_not_trained():
    """Would catch: an infinite loss at the first label that the drafter has no row for, or a gradient of its map."""
    config = replace(DRAFT, draft_vocab_size=12)
    nothing = jnp.zeros((1, 20), jnp.int32)
    with pytest.raises(InputError, match="draft_vocab_size=12: a drafter of some of the target's tokens cannot be"):
        train.draft_batch_loss(config, TARGET, None, nothing, nothing[0], nothing[0], batch=1, num_anchors=1, gamma=4.0)


def test_learning_rate_warms_up_and_ends_near_zero():
    """Would catch: a schedule that starts at full rate, or never comes down."""
    rates = train.learning_rate(1.0, np.arange(100), 100)
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[52] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.001


def test_answers_end_where_they_repeat():
    """Would catch: loops kept as training text, or an answer cut before its first repetition is whole."""
    prompt, phrase = [7, 7, 7], [1, 2, 3, 4]
    rows = np.array([
        prompt + phrase + phrase + [9],  # the phrase is whole again after 8 tokens
        prompt + [1, 2, 3, 4, 5, 6, 50, 8, 9],  # 50 ends the text
        prompt + [1, 2, 3, 4, 5, 6, 8, 9, 10],
    ])  # fmt: skip
    np.testing.assert_array_equal(train.end_of_answers(rows, 3, eos=50, repeat=4), [11, 10, 12])


def test_continue_text_is_greedy_decoding():
    """Would catch: a cache read past the position, or a continuation that skips a token."""
    weights = targets.pack({n: jnp.asarray(v) for n, v in random_values(target_tensors(TARGET), 3).items()}, TARGET)
    prompts = jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, 5)), jnp.int32)
    text = train.continue_text(weights, TARGET, prompts, jnp.zeros(2), jax.random.key(0), num_new=6, page_size=4)
    positions = jnp.broadcast_to(jnp.arange(11, dtype=jnp.int32), (2, 11))
    x = targets.embed(weights, text)
    _, hidden, _ = targets.target_forward(weights, TARGET, None, x, positions, train.causal_attend)
    greedy = jnp.argmax(targets.compute_logits(weights, hidden), axis=-1)
    np.testing.assert_array_equal(text[:, 5:], greedy[:, 4:-1])
