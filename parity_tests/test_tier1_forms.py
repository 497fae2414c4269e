"""Tier 1 for every published form: a shrunken checkpoint of each computes the oracle's function in float64."""

from dataclasses import replace

import numpy as np
import pytest

from jax_dflash.config import parse_draft_config
from parity_tests import forms
from parity_tests.harness import case as cases
from parity_tests.harness import runners
from parity_tests.harness.case import Request, exact
from parity_tests.test_tier1_semantics import worst

RAW = {name: forms.shrunk(raw) for name, raw in forms.CONFIGS.items() if name != forms.REFUSED}
# What no published file has together, or at all: windows that bite, causal layers, biases, partial rotary, scales.
ODD = {
    "causal windows": forms.zlab(layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=5),
    "symmetric windows": forms.zlab(
        layer_types=["sliding_attention"] * 3, sliding_window=4, use_sliding_window=True, is_causal=False
    ),
    "biases": forms.zlab(attention_bias=True),
    "half rotary": forms.zlab(partial_rotary_factor=0.5),
    "scales": forms.speculators(logit_scale=0.25, input_embedding_scale=3.0),
    "muse": forms.muse(),
}


def case_of(raw: dict, seed: int = 0) -> cases.Case:
    """A step of a drafter with these keys: a decode with a rejected row far into its context, and a prompt."""
    config = parse_draft_config(raw)
    g = config.geometry
    step = cases.build(
        "form", [Request(33, 4, 1, 1), Request(0, 9)], seed=seed, num_layers=g.num_layers, hidden_size=g.hidden_size,
        num_heads=g.num_heads, num_kv_heads=g.num_kv_heads, head_dim=g.head_dim, intermediate_size=8, vocab_size=64,
        block_size=5, target_hidden_size=config.target_hidden_size, target_layers=max(config.hidden_state_indices),
        target_layer_ids=(0,), max_model_len=64,
    )  # fmt: skip
    tensors = forms.tensors(raw, seed)
    tensors = {n: v.astype(np.int32) if n == "d2t" else exact(v.astype(np.float32)) for n, v in tensors.items()}
    rng = np.random.default_rng(seed)
    vocabulary = g.vocab_size or 64
    table = lambda rows: exact(rng.standard_normal((rows, g.hidden_size)) / 8)  # noqa: E731
    shared = {"embed_tokens.weight": table(vocabulary), "lm_head.weight": table(config.draft_vocab_size or vocabulary)}
    anchors = {name: step.columns[name] % vocabulary for name in ("last_sampled", "next_prefill")}
    return replace(step, config=raw, tensors=shared | tensors, columns=step.columns | anchors)


@pytest.mark.parametrize("name", [*RAW, *ODD])
def test_pytorch_computes_every_form(name):
    """A key that is read and not computed, or computed otherwise: acceptance drops and nothing errors."""
    assert worst(case_of((RAW | ODD)[name]), "torch.eager") < 1e-12


@pytest.mark.parametrize("sut", ["torch.eager", "jax"])
def test_yarn_s_mscale_left_unread(sut, tmp_path):
    """C22: the option taken by one side only, or lost on the way into a saved case: then cos and sin are 1.416 apart."""
    case = case_of(RAW["kimi-k2.5-dflash"])
    ignored = cases.load(cases.save(replace(case, yarn_attention="ignore-mscale"), tmp_path / "case.safetensors"))
    assert ignored.yarn_attention == "ignore-mscale" and cases.digest(ignored) != cases.digest(case)
    assert worst(ignored, sut) < 1e-12
    pair = [runners.oracle(c)["context_k"][:, : case.live_rows] for c in (case, ignored)]
    np.testing.assert_allclose(np.linalg.norm(pair[1]) / np.linalg.norm(pair[0]), 1.4158883083, rtol=1e-9)


@pytest.mark.parametrize("name", ["qwen3.6-27b-dflash", "kimi-k2.5-dflash", "speculators-qwen3-8b-dflash", *ODD])
def test_jax_computes_every_form(name):
    """As above; one of each kind, since each is a compilation."""
    assert worst(case_of((RAW | ODD)[name]), "jax") < 1e-12
