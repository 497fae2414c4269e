"""Tier 1b: on integers that bfloat16 holds exactly the real kernels have nothing to round, so they are bitwise right."""

import numpy as np
import pytest
import torch

from parity_tests.harness import mutations, runners, tiers
from parity_tests.harness.mutations import Modules


@pytest.mark.parametrize("sut", ["torch.eager", "torch.sdpa", "jax"])
def test_integers_are_exact(sut):
    """A product that drops partial sums to bfloat16, GQA or gathers in another order, a key too many in a mean."""
    assert tiers.exact_arithmetic(sut) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("sut", ["torch.eager", "torch.sdpa", "jax"])
def test_integers_are_exact_on_the_gpu(sut):
    """As above, by the GPU's own kernels."""
    assert tiers.exact_arithmetic(sut, "gpu") == []


def test_the_case_is_exact_in_bfloat16():
    """A case whose right answers bfloat16 cannot hold, which every implementation would fail, or only by luck pass."""
    case, forced = tiers.exact_case()
    exact = runners.oracle(case, forced=forced)
    for name in ("combined", "context_v", "layers.0.v", "layers.1.attn", "layers.0.post_attention", "layers.1.out"):
        value = exact[name][np.isfinite(exact[name])]
        assert np.array_equal(value, torch.tensor(value).bfloat16().double().numpy()), name
        assert np.abs(value).max() > 1


@pytest.mark.parametrize("bug", ["gqa-tile", "boolean-mask-added", "padding-key", "causal-block"])
def test_one_wrong_key_or_head_shows(bug):
    """Exactness that does not look: each of these changes an exact mean."""
    with mutations.planted(bug, "torch"):
        faults = tiers.exact_arithmetic("torch.eager")
    assert faults and all("attn of small integers" in fault for fault in faults)


def test_bfloat16_sums_show():
    """C79: sums in bfloat16 stand still at 256; a product of rounded partial sums is not exact."""
    m = Modules.of("torch")
    right = m.drafter.linear

    def halves(x, weight, bias=None):
        half = x.shape[-1] // 2
        return right(x[..., :half] * 1.01, weight[:, :half]) + right(x[..., half:], weight[:, half:])

    m.drafter.linear = halves
    try:
        assert any("combined" in fault for fault in tiers.exact_arithmetic("torch.eager"))
    finally:
        m.drafter.linear = right
