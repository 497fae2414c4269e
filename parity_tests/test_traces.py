"""Traces: what is recorded is what the target computed, what is judged is what the text goes on with, and bad files end in
one line."""

import json
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_dflash import cli, excerpts
from jax_dflash import engine as jax_engine
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError, load_draft_config, parse_target_config
from jax_dflash.decoding import DecodeLoop
from jax_dflash.judge import JudgeJob, Verdict, judge, load_engine
from jax_dflash.record import Recorder
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.traces import Document, Trace, TracedTarget, check_features, check_target, load_trace, target_digest
from parity_tests import forms, target64
from parity_tests.engines import CONFIG, make_engine, one_thread, step_for, weights_of
from parity_tests.test_target_runner import PAGE, close, exact, fresh, prompt_of
from parity_tests.tiny import numpy
from torch_ref.decoder import Decoder

__all__ = ["one_thread"]
PAIR = cli.ASSETS / "builtin"
RAW = target64.FORMS["qwen3"] | {"hidden_size": 23, "num_hidden_layers": 5, "vocab_size": 101}
TARGET = TracedTarget("tiny", "0" * 64, RAW)


def trace_of(*documents: Document, indices=CONFIG.hidden_state_indices, target=TARGET) -> Trace:
    return Trace(list(documents), indices, target)


def document(length: int, prompt_length: int, seed: int = 0, dtype="float32", width: int = 69) -> Document:
    """Random text and features."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 99, length).astype(np.int32)
    return Document(tokens, rng.standard_normal((length - 1, width)).astype(dtype), prompt_length)


# Recording


@pytest.mark.parametrize("num_pages", [32, 8])
def test_features_are_those_of_one_forward(f, num_pages):
    """The row of another position after a chunk of a prompt or a preemption, rows of the padding, or none for the step that
    ends all requests: every row against one forward of the whole text in float64."""
    recorder = Recorder()
    loop = DecodeLoop(
        fresh(f, "qwen3"), None, num_speculative_tokens=0, max_num_seqs=3, max_model_len=40, num_pages=num_pages,
        page_size=PAGE, chunk=4, prompts_per_step=2, on_features=recorder,
    )  # fmt: skip
    prompts = [prompt_of(14), prompt_of(3, seed=1), prompt_of(6, seed=2), prompt_of(9, seed=3)]
    generations = loop.generate(prompts, [SamplingParams(max_new_tokens=5)] * 4)
    again = [i for i, pieces in recorder._pieces.items() if [start for start, _ in pieces].count(0) > 1]
    assert bool(again) == (num_pages == 8), "preempted requests, in the small pool only"
    documents = recorder.documents(generations)
    assert [(len(d.tokens), d.prompt_length) for d in documents] == [(19, 14), (8, 3), (11, 6), (14, 9)]
    for each, prompt in zip(documents, prompts, strict=True):
        assert each.tokens[: each.prompt_length].tolist() == prompt
        features, _ = exact("qwen3", tuple(each.tokens[:-1].tolist()))
        assert each.features.shape == features.shape
        close(each.features, features)


def test_refused_documents_are_told():
    """A trace that silently lacks a document which the pool could not hold."""
    loop = DecodeLoop(
        None, None, num_speculative_tokens=0, max_num_seqs=1, max_model_len=40, num_pages=3, page_size=PAGE
    )
    generations = loop.generate([[1] * 30], [SamplingParams(max_new_tokens=5)])
    with pytest.raises(InputError, match="request 0: 30 tokens and a block need 8 pages of 4"):
        Recorder().documents(generations)


# The file


@pytest.mark.parametrize("dtype, kind", [("float32", np.uint32), (ml_dtypes.bfloat16, np.uint16)])
def test_a_saved_trace_comes_back_bit_for_bit(dtype, kind, tmp_path):
    """bfloat16 that was rounded, widened or read as integers; rows given to the next document; also by safetensors' own
    reader."""
    documents = [document(9, 4, 0, dtype), document(2, 1, 1, dtype), document(5, 4, 2, dtype)]
    documents[0].features.view(kind)[0, :3] = (1, 1 << (8 * kind().nbytes - 1), 3)  # subnormal, -0
    trace = trace_of(*documents)
    trace.save(tmp_path / "trace")
    back = load_trace(tmp_path / "trace")
    assert (back.hidden_state_indices, back.target, back.dtype) == ((1, 3, 5), TARGET, np.dtype(dtype).name)
    assert len(back.documents) == 3
    for ours, theirs in zip(back.documents, documents, strict=True):
        assert ours.prompt_length == theirs.prompt_length and ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.features.dtype == theirs.features.dtype
        assert np.array_equal(ours.features.view(kind), theirs.features.view(kind))
    stored = load_file(tmp_path / "trace")
    assert {name: value.shape for name, value in stored.items()} == {
        "lengths": (3,), "prompt_lengths": (3,), "tokens": (16,), "features": (13, 69)
    }  # fmt: skip
    assert stored["features"].dtype == dtype
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """Half a trace under its name, a partial file left behind, or a traceback."""
    path = tmp_path / "trace"
    trace_of(document(5, 2)).save(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (8192, hard)
    )  # a write past it fails as on a full disk: Python ignores SIGXFSZ
    try:
        with pytest.raises(InputError, match=r"trace: not written \(.*File too large"):
            trace_of(document(200, 2)).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["trace"]


def rewrite(path: Path, metadata: dict | None = None, **tensors) -> None:
    """The same trace with other tensors or metadata."""
    raw = path.read_bytes()
    stored = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    save_file(load_file(path) | tensors, path, metadata=stored | (metadata or {}))


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


FAULTS = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "not a readable safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "not a readable safetensors file"),
    "text": (lambda path: path.write_text("accepted length 4.05\n"), "not a readable safetensors file"),
    "gone": (Path.unlink, "no such file; write a trace with"),
    "checkpoint": (lambda path: shutil.copy(PAIR / "drafter" / "model.safetensors", path), "not a trace; write one"),
    "other version": (lambda path: rewrite(path, {"format": "jax-dflash trace 2"}), "not a trace; write one"),
    "no indices": (lambda path: rewrite(path, {"hidden_state_indices": "None"}), "its metadata is not a trace's"),
    "a list": (lambda path: rewrite(path, {"target_config": "[1]"}), "its metadata is not a trace's"),
    "past the layers": (
        lambda path: rewrite(path, {"hidden_state_indices": "[1, 3, 6]"}), "hidden states that its target has not",
    ),
    "one index less": (
        lambda path: rewrite(path, {"hidden_state_indices": "[1, 3]"}), "hidden states that its target has not",
    ),
    "int64": (lambda path: rewrite(path, tokens=np.zeros(14, np.int64)), "no tensor tokens of a trace's form"),
    "float64": (lambda path: rewrite(path, features=np.zeros((12, 69))), "no tensor features of a trace's form"),
    "lengths": (lambda path: rewrite(path, lengths=ints(9, 6)), "lengths that do not add up"),
    "negative length": (lambda path: rewrite(path, lengths=ints(20, -6)), "a document without a continuation"),
    "no prompt": (lambda path: rewrite(path, prompt_lengths=ints(4, 0)), "a document without a continuation"),
    "all prompt": (lambda path: rewrite(path, prompt_lengths=ints(9, 2)), "a document without a continuation"),
    "no documents": (
        lambda path: rewrite(path, lengths=ints(), prompt_lengths=ints(), tokens=ints(), features=np.zeros((0, 69), "f4")),
        "a document without a continuation",
    ),
    "token outside": (lambda path: rewrite(path, tokens=np.full(14, 101, np.int32)), "tokens outside the target's"),
    "nan": (
        lambda path: rewrite(path, features=np.full((12, 69), np.nan, np.float32)), "features that are infinite or NaN",
    ),
    "gpt2": (
        lambda path: rewrite(path, {"target_config": json.dumps(RAW | {"model_type": "gpt2"})}),
        "key 'model_type' is 'gpt2'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_are_no_trace(name, tmp_path):
    """A traceback, an accepted length of nonsense, or an index wrapped round for a file that contradicts itself."""
    change, message = FAULTS[name]
    path = tmp_path / "trace"
    trace_of(document(9, 4), document(5, 2)).save(path)
    change(path)
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# Whose trace it is


def test_the_digest_names_a_target(tmp_path):
    """Another target under the same digest, or the same one under another because it lies in other files."""
    config = target64.config_of("qwen3")
    values = target64.values_of(config)
    values["model.layers.1.mlp.up_proj.weight"] = np.zeros((41, 24), np.float32)

    def digest(name, raw=target64.FORMS["qwen3"], shards=1, **changes):
        (tmp_path / name).mkdir()
        target64.write(tmp_path / name, raw, values | changes, shards)
        return target_digest(tmp_path / name)

    one = digest("one")
    assert len(one) == 64 and one == digest("split", shards=3)
    assert one == digest("order", dict(reversed(target64.FORMS["qwen3"].items())))
    last = values["model.layers.1.mlp.up_proj.weight"].copy()
    last[-1, -1] = 1
    others = {
        digest("weight", **{"model.layers.1.mlp.up_proj.weight": last}),
        digest("dtype", **{"model.norm.weight": values["model.norm.weight"].astype(np.float16)}),
        digest("theta", target64.FORMS["qwen3"] | {"rope_theta": 1e6}),
    }
    assert len(others | {one}) == 4
    large = np.zeros((61, 24 * 1024), np.float32)  # 6 MB, of which 64 KiB count
    before = digest("large", **{"model.extra": large})
    large[-1, -1] = 1
    assert digest("large, its end", **{"model.extra": large}) != before


def test_other_hidden_states_and_targets_are_refused(tmp_path):
    """A drafter judged on hidden states that it never saw, or with the embedding of a target that did not write the text."""
    trace = trace_of(document(9, 4))
    check_features(trace, CONFIG)
    with pytest.raises(
        InputError, match=r"holds hidden states \[1, 3, 5\] of tiny, 23 wide, the drafter reads \[1, 3, 4\]"
    ):
        check_features(trace, replace(CONFIG, hidden_state_indices=(1, 3, 4)))
    with pytest.raises(InputError, match="the drafter reads .* 46 wide"):
        judge(stub(draft=replace(CONFIG, target_hidden_size=46)), trace)
    target64.write(tmp_path, target64.FORMS["qwen3"], target64.values_of(target64.config_of("qwen3")))
    with pytest.raises(
        InputError, match="not the target of this trace, tiny: its digest is .*, the trace's 000000000000"
    ):
        check_target(trace, tmp_path)
    check_target(trace_of(target=TracedTarget.of(tmp_path, "x")), tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_only_the_tables_of_a_target_are_read(f, name, tmp_path):
    """A judge that needs the target's layers, or takes the wrong table for the head. qwen2 is tied."""
    config = target64.config_of(name)
    values = {key: value for key, value in target64.values_of(config).items() if "layers" not in key}
    target64.write(tmp_path, target64.FORMS[name], values)
    embed_tokens, lm_head = f.weights.load_tables(tmp_path, config, f.numerics.as_dtype("float32"))
    np.testing.assert_array_equal(numpy(embed_tokens), values["model.embed_tokens.weight"])
    np.testing.assert_array_equal(numpy(lm_head), values.get("lm_head.weight", values["model.embed_tokens.weight"]))
    target64.write(tmp_path, target64.FORMS[name], {"model.norm.weight": values["model.norm.weight"]})
    with pytest.raises(InputError, match="missing tensor"):
        f.weights.load_tables(tmp_path, config)


# Judging


class Stub:
    """An engine whose drafts at position p of document d are right up to `right[d][p]`, and which checks its context."""

    def __init__(self, documents, right, K, n, chunk, draft):
        self.config = SimpleNamespace(
            num_speculative_tokens=K, max_num_seqs=n, max_num_batched_tokens=n * chunk, draft=draft
        )
        self.documents, self.right, self.live, self.anchors = documents, right, {}, []

    def add_request(self, request_id, num_prompt_tokens=0):
        assert request_id not in self.live and len(self.live) < self.config.max_num_seqs
        self.live[request_id] = 0

    def remove_request(self, request_id):
        del self.live[request_id]

    def propose(self, step, features):
        K, at, drafts = self.config.num_speculative_tokens, 0, []
        assert sum(step.num_context) == len(features) <= self.config.max_num_batched_tokens
        assert step.num_sampled.tolist() == [1] * len(step.request_ids) and not step.num_rejected.any()
        for request_id, count, anchor in zip(step.request_ids, step.num_context, step.last_sampled, strict=True):
            text, start = self.documents[request_id], self.live[request_id]
            end = start + count
            assert np.array_equal(features[at : at + count], text.features[start:end]), "rows of another position"
            assert anchor == text.tokens[end], "an anchor that is not the token behind the context"
            own = text.tokens[end + 1 : end + 1 + K].tolist()
            own += [0] * (K - len(own))
            right = self.right[request_id].get(int(end), 0)
            # Right again behind the first wrong one, which must not count.
            drafts.append([t if i != right else (t + 1) % 99 for i, t in enumerate(own)])
            self.anchors.append((request_id, int(end)))
            self.live[request_id], at = int(end), at + count
        return np.array(drafts, np.int32)


def stub(documents=(), right=(), K=3, n=2, chunk=5, draft=CONFIG):
    return Stub(documents, right, K, n, chunk, draft)


def test_judging_is_counting():
    """An anchor off by one, drafts counted behind a wrong one or past the text, a prompt taken for the target's own text, a
    document left out, or a loop that skips one token too many. By hand, K = 3: document 0 has 12 tokens, a prompt of 7
    among them, so anchors 7 and 8; document 1 has anchors 2 to 6, document 2 none, document 3 one."""
    documents = [document(12, 7), document(10, 2, 1), document(7, 4, 2), document(5, 1, 3)]
    right = [{5: 3, 7: 3, 8: 1}, {2: 1, 3: 3, 4: 2, 5: 0, 6: 3}, {4: 3}, {1: 2}]
    seen = []
    engine = stub(documents, right)
    verdict = judge(engine, trace_of(*documents), advance=seen.append)
    assert verdict.accepted == [[3, 1], [1, 3, 2, 0, 3], [2]]
    assert engine.anchors == [
        (0, 5), (1, 2), (0, 7), (1, 3), (0, 8), (1, 4), (1, 5), (3, 1), (1, 6)
    ]  # fmt: skip
    assert seen == [1, 3, 5, 7, 8] and not engine.live
    assert (verdict.num_anchors, verdict.accepted_length) == (8, 1 + 15 / 8)
    assert verdict.acceptance_by_position == [7 / 8, 5 / 8, 3 / 8]
    assert verdict.verifies == [[3], [1, 2], [2]] and verdict.tau == 3

    strided = judge(stub(documents, right), trace_of(*documents), stride=2)
    assert strided.accepted == [[3], [1, 2, 3], [2]]
    assert (strided.verifies, strided.tau) == (None, None)


def test_a_loop_of_no_accepted_draft_visits_every_anchor():
    """A replay that stands still, or a mean over documents instead of verifies."""
    verdict = Verdict([[0, 0, 0, 3], [3]], 3, 1)
    assert verdict.verifies == [[0, 0, 0, 3], [3]] and verdict.tau == 1 + 6 / 5


def test_nothing_to_judge():
    """An accepted length of NaN over no anchor, or strides that the engine cannot take in one step."""
    short = document(7, 4)
    with pytest.raises(
        InputError, match="no token of the trace's continuations is followed by 3 more; record with a larger"
    ):
        judge(stub(), trace_of(short))
    for stride in (0, 6):
        with pytest.raises(InputError, match=f"stride={stride}; pass 1 to 5"):
            judge(stub(), trace_of(document(20, 4)), stride=stride)


def drafted_by(engine, rng, prompt_length: int, accepted: list[int]) -> Document:
    """A text that follows an engine's drafts as far as `accepted` says, then goes another way, verify by verify."""
    tokens = rng.integers(0, 99, prompt_length + 1).tolist()
    features = rng.standard_normal((prompt_length + 4 * len(accepted) + 8, CONFIG.feature_size)).astype(np.float32)
    for count in accepted:
        length = len(tokens) - 1
        engine.add_request("writer")
        for start in range(0, length, 4):
            end = min(start + 4, length)
            step = step_for(["writer"], end - start, last=tokens[end])
            drafts = engine.propose(step, features[start:end])[0].tolist()
        engine.remove_request("writer")
        tokens += drafts[:count]
        other = rng.integers(0, 99)
        tokens.append(int(other if count == len(drafts) or other != drafts[count] else (other + 1) % 99))
    tokens += rng.integers(0, 99, 4).tolist()
    return Document(np.array(tokens, np.int32), features[: len(tokens) - 1], prompt_length)


def test_both_frameworks_judge_alike():
    """A judge whose context, anchor or labels are shifted: the texts are written so that a loop must accept exactly these
    drafts. Twelve documents through four places, and eight."""
    rng = np.random.default_rng(0)
    plans = [rng.integers(0, 4, 5).tolist() for _ in range(12)]
    writer = make_engine("torch")
    trace = trace_of(*(drafted_by(writer, rng, int(rng.integers(1, 14)), plan) for plan in plans))
    compiled = jax_engine.DraftEngine(
        CONFIG, weights_of("jax"), max_num_seqs=4, max_model_len=60, num_speculative_tokens=3, max_num_batched_tokens=16,
        ladder=BucketLadder([16], max_num_seqs=4, query_lens=4),
    )  # fmt: skip
    compiled.capture(progress=False)
    ours, theirs = judge(compiled, trace), judge(make_engine("torch"), trace)
    assert ours.accepted == theirs.accepted
    assert [counts[:5] for counts in ours.verifies] == plans


def test_the_shipped_pair_is_judged_as_its_loop_decodes():
    """Labels or features off by one, of which the shipped drafter accepts next to nothing: the judge's verifies are the
    loop's own, to the last that the text does not cut off."""
    decoder = Decoder.load(PAIR / "drafter", PAIR / "target", max_num_seqs=3, max_model_len=192)
    decoder.capture(progress=False)
    every = excerpts.prompts(PAIR / "target", 8, (24, 200, 57, 130, 101, 16, 60, 150))
    prompts = [every[i] for i in (0, 3, 7)]  # not those that go on in blanks
    params = [SamplingParams(max_new_tokens=48)] * 3
    recorder = Recorder()
    loop = DecodeLoop(decoder.runner, None, on_features=recorder, **decoder.sizes.loop)
    documents = recorder.documents(loop.generate(prompts, params))
    target = TracedTarget.of(PAIR / "target", "builtin")
    indices = load_draft_config(PAIR / "drafter").hidden_state_indices
    trace = Trace(documents, indices, target)

    job = JudgeJob(
        trace=Path("unread"), checkpoint=PAIR / "drafter", target=PAIR / "target", pair="builtin", stride=1,
        framework="torch", device="cpu", num_speculative_tokens=None, max_num_seqs=2,
    )  # fmt: skip
    engine = load_engine(job, trace)
    engine.capture(progress=False)
    verdict = judge(engine, trace)
    found = decoder.generate(prompts, params)
    assert [g.tokens for g in found] == [d.tokens.tolist() for d in documents]
    for visited, generation in zip(verdict.verifies, found, strict=True):
        assert len(visited) >= 5 and visited == generation.accepted[: len(visited)]
    assert verdict.num_anchors == 41 + 41 + 35  # the last text ends itself
    assert verdict.accepted_length == pytest.approx(5.69, abs=0.15)
    shifted = [replace(d, features=np.roll(d.features, 1, axis=0)) for d in documents]
    assert judge(engine, Trace(shifted, indices, target)).accepted_length < 2


# The command line


@pytest.fixture
def pair(tmp_path):
    """A tiny pair with the shipped tokenizer, and a drafter of the same hidden states with tables of its own."""
    sizes = {"hidden_size": 24, "vocab_size": 264, "max_position_embeddings": 128, "num_hidden_layers": 1}
    raw = forms.zlab(**sizes, block_size=4, layer_types=["full_attention"], dflash_config={"target_layer_ids": [0]})
    forms.write(tmp_path / "drafter", raw, forms.tensors(raw))
    forms.write(tmp_path / "own", raw, forms.tensors(raw, own=True))
    (tmp_path / "target").mkdir()
    target = target64.FORMS["qwen3"] | {"vocab_size": 264, "num_hidden_layers": 1}
    target64.write(tmp_path / "target", target, target64.values_of(parse_target_config(target)))
    shutil.copy(PAIR / "target" / "tokenizer.json", tmp_path / "target")
    (tmp_path / "prompts").write_text("def f(x):\nimport os\n\nreturn self\n")
    return tmp_path


def run(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["jax-dflash", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_record_and_judge(pair, monkeypatch, capsys):
    """The two verbs apart from each other: a trace in another dtype or of other text than was asked for, a judge that needs
    the target's folder for a drafter with tables of its own, or more on stdout than one JSON line."""
    arguments = ["--checkpoint", pair / "drafter", "--target", pair / "target", "--device", "cpu"]
    small = ["--max-new-tokens", 9, "--max-model-len", 64, "--max-num-seqs", 2, "--dtype", "bfloat16", "--json"]
    code, out, err = run(
        monkeypatch, capsys, "record", "--out", pair / "trace", "--prompts", pair / "prompts", *arguments, *small
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["job"], told["documents"], told["generated"], told["tokens"]) == ("record", 3, 27, 27 + 9 + 9 + 11)
    assert told["hidden_state_indices"] == [1] and told["dtype"] == "bfloat16"
    trace = load_trace(pair / "trace")
    assert trace.dtype == "bfloat16" and trace.target.digest == told["digest"] == target_digest(pair / "target")
    assert bytes(trace.documents[1].tokens[:9].tolist()) == b"import os"

    results = []
    for framework, n in (("jax", 1), ("torch", 8)):
        more = ["--framework", framework, "--max-num-seqs", n, "--json", "--out", pair / "o"]
        code, out, err = run(monkeypatch, capsys, "judge", pair / "trace", *arguments, *more)
        assert (code, err) == (0, "") and (pair / "o").read_text() == out
        results.append(json.loads(out))
    ours = results[0]
    assert (ours["job"], ours["ok"], ours["anchors"], ours["documents"]) == ("judge", True, 18, 3)
    assert len(ours["acceptance_by_position"]) == 3 and 1 <= ours["accepted_length"] <= 4
    assert results[1] == ours | {"framework": "torch"}

    own = ["judge", pair / "trace", "--checkpoint", pair / "own", "--framework", "torch", "--device", "cpu"]
    code, out, err = run(monkeypatch, capsys, *own, "--stride", 4)
    last = json.loads(out.splitlines()[-1])
    assert code == 0 and (last["anchors"], last["stride"], last["tau"]) == (6, 4, None)
    assert out.splitlines()[0].startswith(
        f"accepted length {last['accepted_length']:.2f} tokens per verify over 6 anchors"
    )

    for message, *bad in (
        ("shares its target's embedding or LM head; pass --target DIR", "--checkpoint", pair / "drafter"),
        ("not the target of this trace", "--checkpoint", pair / "own", "--target", "builtin"),
        ("not the target of this trace", "--checkpoint", "builtin"),
        ("stride=0; pass at least 1", "--checkpoint", pair / "own", "--stride", 0),
        ("num_speculative_tokens=4: this drafter's blocks", "--checkpoint", pair / "own", "--num-speculative-tokens", 4),
    ):  # fmt: skip
        code, out, err = run(
            monkeypatch, capsys, "judge", pair / "trace", "--framework", "torch", "--device", "cpu", *bad
        )
        assert (code, out) == (2, "") and len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["judge", "no/trace"], "no/trace: no such file; write a trace with"),
        (["judge", "README.md"], "README.md: not a readable safetensors file"),
        (["judge", "x", "--framework", "flax"], "--framework 'flax': pass jax or torch"),
        (["judge", "x", "--out", "no/folder/out"], "--out no/folder/out: expected a file in a directory that exists"),
        (["record", "--out", "no/folder/out"], "--out no/folder/out: expected a file in a directory that exists"),
        (["record", "--out", "x", "--dtype", "float64"], "--dtype 'float64': pass float32 or bfloat16"),
        (["record", "--out", "x", "--checkpoint", "y"], "--checkpoint needs the drafter's own target too"),
        (["record", "--out", "x", "--prompts", "none"], "--prompts none: no such file"),
        (["record", "--out", "x", "--num-prompts", 0], "num_prompts=0; pass at least 1"),
        (["record", "--out", "x", "--max-num-seqs", 0], "max_num_seqs=0; pass at least 1"),
        (["record", "--out", "x", "--max-new-tokens", 0], "max_new_tokens=0: expected a whole number from 1"),
        (
            ["record", "--out", "x", "--max-model-len", 2000],
            "max_model_len=2000; this target is made for 1024 positions",
        ),
        (["record", "--out", "x", "--max-model-len", 24], "a prompt of 24 tokens leaves no room in max_model_len=24"),
    ],
)
def test_arguments_that_cannot_run(arguments, message, monkeypatch, capsys):
    """A job that fails after it has run, a traceback, or a file left behind."""
    code, out, err = run(monkeypatch, capsys, *arguments, "--device", "cpu")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and message in err and not Path("x").exists()
