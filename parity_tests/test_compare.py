"""The main job on the shipped pair: it passes, and it fails when one side is wrong."""

import json

import numpy as np
import pytest
import torch

import torch_ref.drafter
from jax_dflash import compare, excerpts
from jax_dflash.cli import ASSETS


@pytest.fixture(scope="module")
def job():
    return compare.CompareJob(
        checkpoint=ASSETS / "builtin" / "drafter", target=ASSETS / "builtin" / "target", pair="builtin", device="cpu",
        dtype="float32", num_speculative_tokens=None, max_num_seqs=4, max_model_len=512, num_prompts=8, max_new_tokens=48,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(job):
    with torch.inference_mode():
        drafters = compare.Drafters(job, progress=False)
        return drafters, *compare.run_lockstep(job, drafters, lambda *_: None)


def test_lockstep_agrees_on_held_out_text(job, run):
    """Would catch: any integer, K/V, hidden state, logit or decided token that differs between the frameworks."""
    drafters, tally, loop = run
    assert tally.faults == []
    assert tally.tokens_compared > 500 and tally.tokens_equal == tally.tokens_compared
    assert tally.undecidable <= 0.001 * tally.tokens_compared
    assert tally.compiles == 0 and drafters.jax.eager_compiles == 0
    assert set(tally.errors) == {"combined", "context_kv", "hidden", "logits", "pool"}
    assert max(tally.errors.values()) < 1e-5
    tokens = sum(len(a.generated) - 1 for a in loop.finished if a.steps)
    assert tokens / sum(a.steps for a in loop.finished) >= 3.0


def test_speculation_changes_no_token(job, run):
    """Would catch: a verify that accepts a draft the target would not have written."""
    drafters, _, loop = run
    runner = compare.jax_target.TargetRunner(
        drafters.target_config, drafters.target_weights, taps=(), max_num_seqs=4, max_model_len=512, widths=(1, 128)
    )
    for answer in loop.finished[:3]:
        plain, computed = list(answer.prompt), 0
        while len(plain) < len(answer.tokens):
            rows = plain[computed : computed + 128]
            own, _ = runner.run([0], [computed], [rows])
            computed += len(rows)
            if computed == len(plain):
                plain.append(int(own[0][-1]))
        assert plain == answer.tokens


def test_lockstep_notices_a_wrong_context(job, monkeypatch):
    """Would catch: a comparison that looks at nothing. Here PyTorch's context keys are rotated one position too far."""
    right = torch_ref.drafter.precompute_context_kv
    monkeypatch.setattr(torch_ref.drafter, "precompute_context_kv", lambda w, c, x, p: right(w, c, x, p + 1))
    with torch.inference_mode():
        drafters = compare.Drafters(job, progress=False)
        tally, _ = compare.run_lockstep(job, drafters, lambda *_: None)
    assert any(fault.startswith("context_kv") for fault in tally.faults)
    assert any("differs: JAX" in fault for fault in tally.faults)


def test_undecidable_is_a_matter_of_the_float64_margin():
    """Would catch: unequal tokens excused by their being unequal, or a margin in units of the wrong error."""
    exact = np.array([[[5.0, 4.0, 0.0, 0.0]], [[5.0, 4.99, 0.0, 0.0]]])
    logits = exact + 0.01
    drafts, other = np.array([[1], [1]]), np.array([[0], [0]])
    tally = compare.Tally()
    compare._compare_tokens(tally, 2, drafts, other, logits, exact)
    assert (tally.tokens_compared, tally.tokens_equal, tally.undecidable) == (2, 0, 1)
    assert tally.faults == ["draft 1 of a request differs: JAX 1, PyTorch 0, margin 100.0 sigma"]


def test_shipped_data():
    """Would catch: excerpts of modules that were trained on, assets past 12 MB, a tokenizer that loses bytes."""
    index = json.loads((excerpts.EXCERPTS / "index.json").read_text())
    assert len(index["files"]) == 20
    assert all(int(row["sha256"][:2], 16) < 14 for row in index["files"])
    assert {row["file"] for row in index["files"]} == set(excerpts.texts())
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 12_000_000
    tokenizer = excerpts.tokenizer(ASSETS / "builtin" / "target")
    text = "def f(x):\n\treturn 'é' + x  # \U0001f600\n"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
