"""Tier 0: weights and inputs are the same bits in both frameworks before anything is computed."""

from dataclasses import replace

import numpy as np
import pytest

from jax_dflash.taps import tap_table
from parity_tests.harness import case as cases
from parity_tests.harness import mutations, null, runners, standard, tiers
from parity_tests.harness.mutations import Modules


@pytest.mark.parametrize("name", standard.CASES)
def test_packing_loses_and_invents_nothing(name):
    """A fused array with rows out of order, a tensor that is packed twice or not at all."""
    assert tiers.weights(standard.CASES[name]()) == []


def test_a_lossy_pack_is_noticed(monkeypatch):
    """A round trip that compares a thing with itself."""
    m = Modules.of("torch")
    right = m.drafter.unpack
    wrong = lambda *args: {n: v * (1 + (n == "layers.1.mlp.up_proj.weight")) for n, v in right(*args).items()}  # noqa: E731
    monkeypatch.setattr(m.drafter, "unpack", wrong)
    assert tiers.weights(cases.mixed()) == ["torch: tensor layers.1.mlp.up_proj.weight comes back changed from packing"]


def test_context_projections_out_of_order_are_noticed(monkeypatch):
    """Arrays that unpacking does not read: the fused context projection with K and V exchanged."""
    m = Modules.of("torch")
    right = m.drafter.pack
    monkeypatch.setattr(m.drafter, "pack", lambda *a: right(*a)._replace(context_kv=right(*a).context_kv.flip(0)))
    assert tiers.weights(cases.mixed()) == ["torch: context_kv is not every layer's own tensors, in order"]


def test_features_are_the_rows_of_the_named_states():
    """A case that hands both sides features which nobody selected: ids 0, 2, 3 are hidden states 1, 3, 4, in that order;
    padded rows are NaN."""
    case = cases.mixed()
    draft = runners.parse_draft_config(case.config)
    found = runners.features(case, draft)
    assert np.array_equal(found[: case.live_rows], np.concatenate(case.hidden_states[[1, 3, 4]], axis=-1))
    assert np.isnan(found[case.live_rows :]).all() and len(found) == case.context_rows


def test_every_implementation_emits_the_table_s_taps():
    """A tap that one side lacks and nobody compares."""
    case = cases.mixed()
    names = [tap.name for tap in tap_table(case.num_layers)]
    for trace in (runners.oracle(case), *(runners.runner(r)(case, "bfloat16") for r in ("torch.eager", "jax"))):
        assert sorted(trace) == sorted(names)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_missing_tap_is_a_failure(framework, monkeypatch):
    """A tap call that somebody dropped: a comparison of the rest would pass, or trip over the gap and be skipped."""
    from parity_tests.harness import verdict

    m = Modules.of(framework)
    right = m.drafter.precompute_context_kv
    monkeypatch.setattr(m.drafter, "precompute_context_kv", lambda w, c, x, p, tap: right(w, c, x, p))
    ref, sut = {"jax": ("torch.eager", "jax.jitted"), "torch": ("jax.jitted", "torch.eager")}[framework]
    # The float64 process of JAX has a package of its own, without the fault.
    single = lambda case, name, forced=None: runners.runner(name)(case, "float32", forced)  # noqa: E731
    if framework == "jax":
        monkeypatch.setattr(runners, "float64_run", single)
    reference = null.Reference(cases.mixed(), ref, "bfloat16")
    result = verdict.compare(cases.mixed(), ref, sut, "bfloat16", reference=reference)
    assert (result.verdict, result.first_divergence) == (verdict.WRONG, "context_k")
    assert result.attribution.lines == [f"{sut} lacks the tap context_k"]


def test_a_case_survives_its_file(tmp_path):
    """A replay of something else: every number, size and word of a case, NaN rows included."""
    case = replace(cases.mixed(), meta={"verdict": "ok", "tap": None})
    read = cases.load(cases.save(case, tmp_path / "a" / "case.safetensors"))
    for name in ("name", "config", *cases.SIZES, "meta"):
        assert getattr(read, name) == getattr(case, name), name
    for name, value in {**case.tensors, **case.columns}.items():
        assert np.array_equal((read.tensors | read.columns)[name], value), name
    assert np.array_equal(read.pool, case.pool, equal_nan=True) and np.isnan(read.pool).any()
    assert np.array_equal(read.hidden_states, case.hidden_states)
    assert cases.digest(read) == cases.digest(case) != cases.digest(cases.mixed(seed=1))


def test_a_float64_pool_survives_its_file(tmp_path):
    """A pool of a float64 step rounded to bfloat16 on its way to another process."""
    case = replace(cases.mixed(), pool=cases.mixed().pool.astype(np.float64) / 3)
    assert np.array_equal(cases.load(cases.save(case, tmp_path / "c.safetensors")).pool, case.pool, equal_nan=True)


def test_a_planted_bug_is_gone_afterwards():
    """Mutations that leak into the next comparison."""
    m = Modules.of("torch")
    before = {room: dict(vars(getattr(m, room))) for room in ("layers", "drafter", "draft_step", "dense")}
    for name in mutations.MUTATIONS:
        with mutations.planted(name, "torch"):
            pass
    assert {room: dict(vars(getattr(m, room))) for room in before} == before
