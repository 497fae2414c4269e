"""Decoders of both frameworks on a tiny pair: sampled and penalised texts, fewer drafts than K, interrupts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dflash.device_loop
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError
from jax_dflash.draft_step import zero_state
from jax_dflash.names import draft_tensors, target_tensors
from jax_dflash.programs import num_compiles
from jax_dflash.sampling_params import SamplingMode, SamplingParams
from parity_tests.tiny import FRAMEWORKS, TARGET, numpy, resized

K, R, V = 3, 3, 61
CONFIG = replace(resized(num_layers=1), hidden_state_indices=(0, 1, 2))
TARGET_CONFIG = replace(TARGET, geometry=replace(TARGET.geometry, num_layers=2))
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2]]
EVERYTHING = SamplingMode(sampled=True, filtered=True, penalised=True)
SAMPLED = [
    SamplingParams(20, temperature=1.0, seed=7),
    SamplingParams(20, temperature=0.7, top_k=12, top_p=0.9, repetition_penalty=1.3, seed=7),
    SamplingParams(20),
]


@functools.cache
def values() -> tuple[dict, dict]:
    rng = np.random.default_rng(0)

    def draw(shapes):
        return {n: 1 + 0.1 * x if len(s) == 1 else 0.4 * x
                for n, s in shapes.items() for x in [rng.standard_normal(s)]}  # fmt: skip

    return draw(draft_tensors(CONFIG)), draw(target_tensors(TARGET_CONFIG))


def decoder(framework: str, **options):
    f = FRAMEWORKS[framework]
    draft, target = (f.tree(tensors) for tensors in values())
    weights = f.target.pack(target, TARGET_CONFIG)
    made = f.decoder.Decoder(
        CONFIG, f.drafter.pack(draft, CONFIG, embed_tokens=weights.embed_tokens, lm_head=weights.lm_head), TARGET_CONFIG,
        weights, num_speculative_tokens=K, max_num_seqs=R, max_model_len=64, page_size=4, chunk=6,
        max_num_batched_tokens=24, ladder=BucketLadder([R * (K + 1)], max_num_seqs=R, query_lens=K + 1), **options,
    )  # fmt: skip
    made.capture(progress=False)
    return made


@functools.cache
def sampling(framework: str):
    return decoder(framework, mode=EVERYTHING)


@functools.cache
def scheduling(framework: str):
    return decoder(framework, scheduled_ks=(1, 0))


def texts(made, params=SAMPLED, prompts=PROMPTS, **how):
    return [g.generated for g in made.generate(prompts, params, **how)]


def test_sampled_texts_are_the_same_in_every_loop():
    """A seed, position or row of draft_logits that one loop or framework takes from elsewhere: then its text is another."""
    made = sampling("jax")
    compiles = num_compiles()
    host = texts(made)
    assert texts(made, loop="device") == host and num_compiles() == compiles
    assert texts(sampling("torch")) == host
    assert len({tuple(text) for text in host}) == 3 and all(len(text) == 20 for text in host)
    assert texts(made, [replace(p, seed=8) for p in SAMPLED])[:2] != host[:2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_text_does_not_depend_on_its_batch_mates(framework):
    """Noise by batch row: a request alone, or beside others in another order, draws another text."""
    together = texts(sampling(framework))
    for order in ([2, 0, 1], [1], [0, 2]):
        found = texts(sampling(framework), [SAMPLED[i] for i in order], [PROMPTS[i] for i in order])
        assert found == [together[i] for i in order]


@pytest.mark.parametrize("loop", ["host", "device"])
def test_sampled_output_follows_the_target(loop):
    """Drafts verified against another request's logits, or none: the accepted tokens follow the drafter. Frequencies of
    tokens 2 to 4 against plain sampling of other seeds, two samples of 600."""
    draws, made = 600, sampling("jax")

    def sample(first_seed, **how):
        params = [SamplingParams(4, temperature=1.0, seed=first_seed + i) for i in range(draws)]
        found = made.generate([PROMPTS[i % 3] for i in range(draws)], params, **how)
        counts = [np.bincount([g.generated[at] for g in found], minlength=V) for at in range(1, 4)]
        return np.stack(counts), [a for g in found for a in g.accepted]

    spoken, accepted = sample(0, loop=loop)
    plain, _ = sample(draws, speculate=False)
    df = V - 1
    for a, b in zip(spoken, plain, strict=True):
        assert ((a - b) ** 2 / np.maximum(a + b, 1)).sum() < df + 5 * np.sqrt(2 * df)
    assert 0.02 < np.mean(np.array(accepted) > 0) < 0.9, "all or no drafts accepted: the test says nothing"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_penalty_changes_no_text_by_speculation(framework):
    """C86: a penalty that counts the drafts before a row not, or too late: greedy text parts from plain decoding's."""
    params = [SamplingParams(24, repetition_penalty=1.5)] * 3
    made = sampling(framework)
    plain = texts(made, params, speculate=False)
    assert texts(made, params) == plain
    if framework == "jax":
        assert texts(made, params, loop="device") == plain
    assert plain != texts(made, [SamplingParams(24)] * 3), "the penalty did nothing, so the test says nothing"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_draft_logits_are_those_of_the_request(framework):
    """C57: a padded row that writes over a live request's logits, or rows in batch order: q of somebody else."""
    engine = sampling(framework).engine
    f, rng = FRAMEWORKS[framework], np.random.default_rng(1)
    from parity_tests.engines import step_for

    for name in ("x", "a", "b"):
        engine.add_request(name, 8, params=SamplingParams(1, temperature=1.0, seed=5))
    engine.remove_request("x")  # so that rows of state are not those of the batch
    features = rng.standard_normal((16, CONFIG.feature_size)).astype("f4")
    tables = np.array([[1, 2, 3], [4, 5, 6]])
    try:
        step = replace(step_for(["b", "a"], [8, 8]), block_tables=tables)
        both = engine.propose(step, features)
        kept = numpy(engine.draft_logits).copy()
        alone = replace(step_for(["a"], [8], start_position=np.array([0])), block_tables=tables[1:])
        assert engine.propose(alone, features[8:]).tolist() == both[1:].tolist()
        rows = [engine.request_index(name) for name in ("b", "a")]
        again = numpy(engine.draft_logits)
        np.testing.assert_array_equal(again[rows[0]], kept[rows[0]])
        np.testing.assert_allclose(again[rows[1]], kept[rows[1]], atol=1e-5)
        assert rows[0] != rows[1] and np.abs(kept[rows[0]] - kept[rows[1]]).max() > 0.1
        noise = numpy(f.run(
            lambda: f.sampling.gumbel(f.sampling.Stream.DRAFT, f.ints([[5]]), f.ints([[8 + i for i in range(K)]]), V,
                                      f.numerics.as_dtype("float32"))
        ))  # fmt: skip
        assert (kept[rows] + noise).argmax(-1).tolist() == both.tolist()
    finally:
        engine.remove_request("a")
        engine.remove_request("b")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fewer_drafts_are_an_engine_s_of_that_many(framework):
    """C88: K = 3 configured and 1 scheduled drafts 3, or the first of a block of 3: a block of 1 sees other masks."""
    f, made = FRAMEWORKS[framework], scheduling(framework)
    from parity_tests.engines import step_for

    rng = np.random.default_rng(2)
    features = rng.standard_normal((8, CONFIG.feature_size)).astype("f4")
    step = replace(step_for(["a"], [8]), block_tables=np.array([[1, 2, 3]]))
    one = f.engine.DraftEngine(
        CONFIG, f.drafter.pack(f.tree(values()[0]), CONFIG, embed_tokens=made.runner.weights.embed_tokens,
        lm_head=made.runner.weights.lm_head), max_num_seqs=R, max_model_len=64, page_size=4, num_speculative_tokens=1,
        max_num_batched_tokens=16, external_pages=True, ladder=BucketLadder([2 * R], max_num_seqs=R, query_lens=2),
    )  # fmt: skip
    one.capture(progress=False)
    expected, found = [], []
    for engine, into, how in ((one, expected, {}), (made.engine, found, {"num_speculative_tokens": 1})):
        for name in ("a", "b"):
            engine.add_request(name, 8)
            named = replace(step, request_ids=[name])
            into.append(engine.propose(named, features, **how).tolist())
            features = features[::-1].copy()
            engine.remove_request(name)
    assert found == expected and np.shape(found) == (2, 1, 1)
    with pytest.raises(InputError, match=r"num_speculative_tokens=2; this engine has programs for 0 and \[1, 3\]"):
        made.engine.propose(step, features, num_speculative_tokens=2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scheduled_drafts_in_the_loop(framework):
    """C88: a schedule asked for and ignored; 0 drafts that leave the step's context unstored, so that later drafts see a
    hole: here K is 0 for the first steps, and drafts after it are those of a loop that always drafted."""
    made = scheduling(framework)
    plain = texts(made, [SamplingParams(24)] * 3, speculate=False)
    for schedule, proposed in ((lambda n: 1, {1}), (lambda n: 0, set()), (lambda n: 3 if n == 3 else 1, {1, 3})):
        found = made.generate(PROMPTS, [SamplingParams(n) for n in (24, 24, 9)], schedule_k=schedule)
        assert [g.generated for g in found] == [plain[0], plain[1], plain[2][:9]]
        assert {k for g in found for k in g.proposed} == proposed
    turns = iter([0, 0, 0, *[3] * 99])
    late = made.generate(PROMPTS[:1], [SamplingParams(24)], schedule_k=lambda n: next(turns))[0]
    always = made.generate(PROMPTS[:1], [SamplingParams(24)])[0]
    assert late.generated == always.generated and sum(late.accepted) > 0
    # The last verifies start where the others did too, so they accept alike.
    assert late.accepted[-2:] == always.accepted[-2:]


def test_drafts_for_every_request():
    """C90: the second request of an engine, on pages used before, gets no drafts: speed of plain decoding, and no error."""
    made = scheduling("torch")
    first, second = (made.generate(PROMPTS[:1], [SamplingParams(24)])[0] for _ in range(2))
    assert first.proposed == second.proposed and set(first.proposed) == {K}
    assert first.accepted == second.accepted and first.generated == second.generated


@pytest.mark.parametrize("how", [{"loop": "host"}, {"loop": "device"}])
def test_an_interrupt_harms_nobody(how):
    """Ctrl-C that leaves requests in the engine, or loses the text so far."""
    made, kept = scheduling("jax"), []

    def interrupt(generation, new, num_drafts):
        if len(generation.generated) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPTS, [SamplingParams(24)] * 3, on_tokens=interrupt, generations=kept, **how)
    plain = texts(made, [SamplingParams(24)] * 3, speculate=False)
    assert any(g.generated for g in kept)
    assert all(g.generated == text[: len(g.generated)] for g, text in zip(kept, plain, strict=True))
    assert not made.engine.requests.requests
    assert texts(made, [SamplingParams(24)] * 3, **how) == plain


@pytest.mark.parametrize("what, lost", [(KeyboardInterrupt, False), (MemoryError, True)])
def test_a_call_on_the_device_that_does_not_return(what, lost, monkeypatch):
    """Ctrl-C while the device works, when it is likeliest, takes the pools with it; or a call that failed goes on with
    pools that are gone."""
    made = scheduling("jax")
    shape, dtype = made.runner.pool.shape, made.engine.programs.dtype
    expected = texts(made, [SamplingParams(24)] * 3, loop="device")

    def raising(_):
        raise what

    with monkeypatch.context() as patch, pytest.raises(what):
        patch.setattr(jax_dflash.device_loop.jax, "device_get", lambda x: raising(x) if len(x[0]) > 2 else real(x))
        texts(made, [SamplingParams(24)] * 3, loop="device")
    if lost:
        with pytest.raises(RuntimeError, match="lost its pool in a step that failed"):
            texts(made, [SamplingParams(24)] * 3)
        made.runner.pool, made.engine.state = jnp.zeros(shape, dtype), zero_state(made.engine.config, dtype)
    assert texts(made, [SamplingParams(24)] * 3, loop="device") == expected


real = jax.device_get


def test_weights_of_the_same_shapes():
    """Weights that programs were not compiled for: an error of XLA's, after the pool is gone."""
    engine = scheduling("jax").engine
    weights = engine.programs.weights
    with pytest.raises(InputError, match="these weights have other shapes or dtypes"):
        engine.set_weights(weights._replace(fc=weights.fc[:-1]))
    engine.set_weights(jax.tree.map(lambda x: x * 1, weights))
    engine.set_weights(weights)


def test_what_cannot_be_decoded():
    """A loop that there is not, and a draft method of another spelling."""
    with pytest.raises(InputError, match="loop='gpu': pass one of host, device"):
        scheduling("jax").generate(PROMPTS, [SamplingParams(1)] * 3, loop="gpu")
    with pytest.raises(InputError, match="PyTorch has the host loop only; pass host"):
        scheduling("torch").generate(PROMPTS, [SamplingParams(1)] * 3, loop="device")
    with pytest.raises(InputError, match="draft_sample_method 'gumbel' is unknown; pass greedy or probabilistic"):
        decoder("torch", draft_sample_method="gumbel")


@pytest.mark.parametrize("framework, loop", [("jax", "host"), ("jax", "device"), ("torch", "host")])
def test_a_draft_miss_never_vetoes_a_target_hit(framework, loop):
    """C48: no hit as soon as the drafter is on, since it lacks the pages of what was decoded plainly. C46: a draft that
    reads its pages of them, which hold nothing."""
    made = caching(framework)
    prompt, params = list(range(2, 13)), [SamplingParams(16)]
    plain = texts(made, params, [prompt], speculate=False)
    missed = made.generate([prompt], params, loop=loop)[0]
    assert (missed.context_start, missed.generated) == (8, plain[0])  # two pages of 4, the last token runs
    assert set(missed.proposed) == {K}
    other = [60, *prompt]
    first, second = (made.generate([other], params, loop=loop)[0] for _ in range(2))
    assert first.context_start == second.context_start == 0 and first.generated == second.generated
    # The drafter has those pages too: it drafts what it drafted without the hit.
    assert first.accepted == second.accepted


@functools.cache
def caching(framework: str):
    return decoder(framework, prefix_cache=True)
