"""The main job on the shipped pair: it passes, and it fails when one side is wrong."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torch_ref.drafter
from jax_dflash import compare, excerpts, lockstep, steptime
from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder, GraphMode
from jax_dflash.cli import ASSETS
from jax_dflash.config import InputError
from jax_dflash.decoding import Generation, accepted_length
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.taps import tap_table
from jax_dflash.target_batch import TargetBatch
from jax_dflash.target_runner import TargetRunner
from parity_tests.test_cli import run as run_verb


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
    drafters, tally, generations = run
    assert tally.faults == []
    assert tally.tokens_compared > 500 and tally.tokens_equal == tally.tokens_compared
    assert tally.undecidable <= 0.001 * tally.tokens_compared
    assert tally.compiles == 0 and drafters.engines.jax.eager_compiles == 0
    floats = {tap.name for tap in tap_table(2) if tap.kind == "float" and tap.level == 1}
    assert set(tally.errors) == floats | {"pool"}
    assert max(tally.errors.values()) < 1e-5
    assert all(tally.by_bucket[n][1] > 0 for n in (1, 2, 4))
    tau = accepted_length(generations)
    assert tau >= 3.0 and 1 + tally.torch_accepted / tally.torch_steps == pytest.approx(tau)


def test_speculation_changes_no_token(job, run):
    """Would catch: a verify that accepts a draft the target would not have written."""
    drafters, _, generations = run
    runner = TargetRunner(
        drafters.target_config, drafters.target_weights, taps=(), num_speculative_tokens=0, max_num_seqs=1,
        max_model_len=512, num_pages=33, widths=(1, 128),
    )  # fmt: skip
    runner.capture(progress=False)
    pages = 1 + np.arange(32)[None]
    for answer in generations[:3]:
        plain, computed = list(answer.prompt), 0
        while len(plain) < len(answer.tokens):
            rows = plain[computed : computed + 128]
            output = runner.run(TargetBatch(tokens=[rows], start=[computed], num_drafts=[0], block_tables=pages))
            computed += len(rows)
            if computed == len(plain):
                plain.append(int(output.tokens[0, 0]))
        assert plain == answer.tokens


def test_lockstep_notices_a_wrong_context(job, run, monkeypatch):
    """Would catch: a comparison that looks at nothing. Here PyTorch's context keys are rotated one position too far."""
    right = torch_ref.drafter.precompute_context_kv
    monkeypatch.setattr(torch_ref.drafter, "precompute_context_kv", lambda w, c, x, p, tap: right(w, c, x, p + 1, tap))
    with torch.inference_mode():
        tally, _ = compare.run_lockstep(replace(job, num_prompts=3), run[0], lambda *_: None)
    assert any(fault.startswith("context_k") for fault in tally.faults)
    assert any("differs: JAX" in fault for fault in tally.faults)


def test_undecidable_is_a_matter_of_the_float64_margin():
    """Would catch: unequal tokens excused by their being unequal, or a margin in units of the wrong error."""
    exact = np.array([[[5.0, 4.0, 0.0, 0.0]], [[5.0, 4.99, 0.0, 0.0]]])
    logits = np.stack([exact + 0.01, exact - 0.01])
    drafts, other = np.array([[1], [1]]), np.array([[0], [0]])
    tally = lockstep.Tally()
    tally.compare_tokens(2, drafts, other, logits, exact)
    assert (tally.tokens_compared, tally.tokens_equal, tally.undecidable) == (2, 0, 1)
    assert tally.faults == ["draft 1 of a request differs: JAX 1, PyTorch 0, margin 100.0 sigma"]


def document(job, generations, **changes):
    """The job's verdict on a made-up tally."""
    values = {"tokens_compared": 4000, "tokens_equal": 4000, "pool_checks": 1}
    tally = lockstep.Tally(**values | changes, by_bucket={n: [2, 2, 0.0] for n in (1, 2, 4)})
    row = {"num_tokens": 8, "ms": 1.0, "low": 0.9, "high": 1.1}
    times = {name: [row | {"num_reqs": n} for n in (1, 2, 4)] for name in ("jax", "torch-eager")}
    ladder = BucketLadder.without_holes(max_num_seqs=4, query_len=8)
    descriptors = ladder.capture_order(GraphMode.FULL)[::-1]
    return compare._document(job, tally, generations, times, descriptors, 3, 0)


def test_the_verdict(job, run):
    """Would catch: a job that calls itself ok over too few tokens, too many undecidable ones, a compilation after
    capture or an unreached bucket; a document with other keys than promised."""
    generations = run[2]
    good = document(job, generations)
    assert good["ok"] and good["faults"] == []
    promised = "job ok device dtype pair tau tokens_compared tokens_equal undecidable max_error programs "
    promised += "compiles_after_capture eager_compiles buckets"
    assert set(promised.split()) <= set(good)
    row = good["buckets"][0]
    assert (row["num_reqs"], row["num_tokens"], row["jax_ms"], row["torch_eager_ms"], row["torch_graph_ms"]) == (
        1, 8, 1.0, 1.0, None,
    )  # fmt: skip
    for changes, fault in (
        ({"tokens_compared": 1999}, "only 1999 tokens compared, at least 2000 needed"),
        ({"undecidable": 5}, "5 of 4000 tokens undecidable, at most 0.1% allowed"),
        ({"compiles": 1}, "1 compilations after capture"),
        ({"pool_checks": 0}, "the pools were never compared"),
    ):
        bad = document(job, generations, **changes)
        assert (bad["ok"], bad["faults"]) == (False, [fault])


@pytest.fixture
def yarn_job(job, tmp_path):
    """The shipped drafter with YaRN of factor 16 whose mscale pair says 1, where they are left unread."""
    folder = shutil.copytree(job.checkpoint, tmp_path / "drafter")
    raw = json.loads((folder / "config.json").read_text())
    yarn = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    (folder / "config.json").write_text(json.dumps(raw | {"rope_scaling": yarn}))
    return replace(job, checkpoint=folder, yarn_attention="ignore-mscale")


def test_yarn_s_option_reaches_every_drafter(yarn_job, monkeypatch):
    """Would catch: an option that the lockstep follows and the timed processes do not, or one framework of either."""
    made = []

    class Engine:
        def __init__(self, config, weights, **options):
            made.append(round(config.layers[0].rope.attention_factor, 6))

        def capture(self, progress):
            pass

    for name in ("jax_dflash.compare.DraftEngine", "jax_dflash.compare.TorchEngine"):
        monkeypatch.setattr(name, Engine)
    compare.check_job(yarn_job)
    compare.Drafters(yarn_job, progress=False)
    assert made == [1.277259] * 5
    for name in ("jax_dflash.engine.DraftEngine", "torch_ref.engine.DraftEngine"):
        monkeypatch.setattr(name, Engine)
    specs, rows = [], SimpleNamespace(returncode=0, stdout="[]")
    monkeypatch.setattr(compare.subprocess, "run", lambda *a, input, **kw: specs.append(json.loads(input)) or rows)
    compare.time_frameworks(yarn_job, ["jax", "torch-eager"], None, lambda name: None)
    steptime._jax_engine(specs[0])
    steptime._torch_engine(specs[1], "eager")
    assert made[5:] == [1.277259] * 2
    with pytest.raises(InputError, match="yarn_attention='no'; pass one of mscale, ignore-mscale"):
        compare.check_job(replace(yarn_job, yarn_attention="no"))


def test_yarn_s_option_on_the_command_line(monkeypatch, capsys):
    """Would catch: an option that is taken and not passed on."""
    jobs = []
    monkeypatch.setattr(compare, "compare", lambda job: jobs.append(job) or {"ok": True})
    for options in ([], ["--yarn-attention", "ignore-mscale"]):
        code, _, err = run_verb(monkeypatch, capsys, "compare", "--device", "cpu", "--json", *options)
        assert code == 0, err
    assert [job.yarn_attention for job in jobs] == ["mscale", "ignore-mscale"]


class ToldEngine:
    """An engine that drafts and taps what it is told."""

    config = SimpleNamespace(draft=SimpleNamespace(geometry=SimpleNamespace(num_layers=1)))

    def __init__(self, **taps):
        self.last_taps = {name: torch.tensor(value) for name, value in taps.items()}

    def propose(self, step, features, num_speculative_tokens):
        return np.zeros((len(step.request_ids), num_speculative_tokens), np.int32)


def test_context_stored_without_drafting_is_compared():
    """Would catch: chunks of a prompt that no tap compares, or a padded row of such a step that is stored."""
    stored = {"features": [[1.0], [2.0]], "context_positions": [0, 1], "combined": [[3.0], [4.0]]}
    stored |= {"context_k": [[[[5.0]], [[6.0]]]], "context_v": [[[[7.0]], [[8.0]]]]}
    right = ToldEngine(**stored, context_slots=[16, 17])
    padded = {"context_slots": [16, 17, 18], "context_positions": [0, 1, 0], "context_v": [[[[7.0]], [[8.8]], [[0.0]]]]}
    drafter = lockstep.Lockstep(
        lockstep.Engines(
            jax=right, tapped=ToldEngine(**stored | padded), torch=right, oracle=right, fused=right, graph=None
        ),
        max_error=1e-5,
    )
    one = np.ones(1, np.int32)
    step = TargetStep(
        request_ids=[0], num_context=2 * one, num_rejected=0 * one, num_sampled=0 * one, last_sampled=0 * one,
        next_prefill=one,
    )  # fmt: skip
    assert drafter.propose(step, np.zeros((2, 1)), 0).shape == (1, 0)
    assert drafter.tally.faults == [
        "padded context rows of stored context have slots",
        "context_v of stored context differs by 7.53e-02 (limit 1e-05)",
    ]
    assert drafter.tally.tokens_compared == 0 and set(drafter.tally.by_bucket) == {lockstep.NO_BUCKET}


@pytest.mark.parametrize("theirs, new, count", [
    ([4, 5, 6], [4, 5, 9], 2),  # as ours
    ([4, 8, 6], [4, 5, 9], 1),
    ([4, 5, 9], [4, 5, 9], 3),  # right where ours was not
    ([4, 5, 6], [4], 2),  # the text ended among accepted drafts
])  # fmt: skip
def test_accepted_drafts_of_pytorch(theirs, new, count):
    """Would catch: PyTorch's accepted length taken from JAX's drafts, or counted on past a token in which they part."""
    own = Generation(0, [1], SamplingParams(max_new_tokens=9), [1, 2, *new], accepted=[2])
    drafter = lockstep.Lockstep(lockstep.Engines(*[None] * 6), max_error=0)
    drafter._to_verify[0] = [4, 5, 6], theirs
    drafter.count_accepted(own, new, 2)
    assert (drafter.tally.torch_accepted, drafter.tally.torch_steps) == (count, 1)
    drafter.count_accepted(own, [3], 0)
    assert drafter.tally.torch_steps == 1


def test_an_error_that_is_not_finite_is_a_fault():
    """Would catch: NaN that max() turns into an error of 0."""
    tally = lockstep.Tally()
    tally.float_error(2, "hidden", np.array([1.0, np.nan]), np.array([1.0, 2.0]), 1e-5)
    assert tally.errors["hidden"] == 1e30 and len(tally.faults) == 1


def test_kv_is_judged_by_its_worst_layer():
    """Would catch: an error in small K that is diluted by large V."""
    theirs = np.ones((2, 2, 5, 1, 3))
    theirs[:, 1] = 1000.0
    ours = theirs.copy()
    ours[1, 0] *= 1.5
    assert lockstep.relative_rms(ours, theirs) == pytest.approx(0.5)


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
