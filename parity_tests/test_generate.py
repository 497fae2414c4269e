"""The verb `generate`: what is shown while tokens come, what the last line says, and what it refuses."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from jax_dflash import cli, excerpts, generate
from jax_dflash.cli import ASSETS
from jax_dflash.config import InputError
from jax_dflash.decoding import Generation
from jax_dflash.sampling_params import SamplingParams
from parity_tests import test_decoding
from parity_tests.test_decoding import Drafts, PagedTarget, continuation

TARGET = ASSETS / "builtin" / "target"


class Decoder:
    """Stands for a decoder of either package: the language of test_decoding, in which `right` drafts are right."""

    def __init__(self, right=3, wrong=False):
        self.right, self.wrong, self.waited, self.device_name = right, wrong, 0.0, "nowhere"
        self.engine = SimpleNamespace(config=SimpleNamespace(num_speculative_tokens=3))
        self.calls = []

    def capture(self, **_):
        pass

    def generate(self, prompts, params, *, speculate=True, loop="host", on_tokens=None, generations=None):
        self.calls.append((speculate, loop, params[0].max_new_tokens))
        drafts = Drafts(self.right, prompts, params[0].max_new_tokens) if speculate else None
        loop = test_decoding.DecodeLoop(
            PagedTarget(64, 4), drafts, num_speculative_tokens=3, max_num_seqs=3, max_model_len=96, chunk=5,
            num_pages=64, page_size=4, on_tokens=on_tokens,
        )  # fmt: skip
        found = loop.generate(prompts, params, generations)
        if self.wrong and speculate:
            found[0].tokens[-1] += 1
        return found


JOB = generate.GenerateJob(
    checkpoint=Path("x"), target=TARGET, pair="builtin", prompts=["ab"], params=SamplingParams(max_new_tokens=20),
    loop="host", framework="jax", device="cpu", dtype="float32", num_speculative_tokens=None, max_num_seqs=2,
    max_model_len=96, check=True,
)  # fmt: skip


@pytest.fixture
def fake(monkeypatch):
    made = Decoder()
    monkeypatch.setattr(generate, "load_decoder", lambda job: made)
    monkeypatch.setattr(generate, "encode", lambda target, prompts, max_model_len: [[3, 1, 4]] * len(prompts))
    return made


def test_the_document(fake):
    """Acceptance of a warm-up counted in, or a text that was not compared called identical."""
    result = generate.generate(JOB, None)
    assert (result["ok"], result["identical_to_target"], result["tokens"], result["tau"]) == (True, True, 20, 4.0)
    assert result["acceptance_by_position"] == [1, 1, 1] and result["finish_reasons"] == ["length"]
    assert result["speedup"] == round(result["tokens_per_s"] / result["plain_tokens_per_s"], 3)
    assert not result["interrupted"] and json.dumps(result)
    assert [call[:2] for call in fake.calls] == [(True, "host"), (False, "host")] * 2


def test_a_text_that_is_not_the_target_s(fake):
    """A lossy loop that ends with ok: exit code 1 only comes of it."""
    fake.wrong = True
    result = generate.generate(JOB, None)
    assert (result["ok"], result["identical_to_target"]) == (False, False)
    assert "FAULT" in generate.summary(result)[-1]
    assert generate.generate(replace(JOB, check=False), None)["ok"]
    sampled = replace(JOB, params=SamplingParams(20, temperature=1.0))
    assert generate.generate(sampled, None)["identical_to_target"] is None


def test_an_interrupt_keeps_the_text_so_far(fake):
    """Ctrl-C that loses what was written, or goes on with plain decoding."""
    shown = []

    class Stream:
        start = finish = staticmethod(lambda *_: None)

        def __call__(self, generation, new, num_drafts):
            shown.extend(new)
            if len(shown) > 6:
                raise KeyboardInterrupt

    result = generate.generate(JOB, Stream())
    assert result["interrupted"] and result["identical_to_target"] is None and result["plain_tokens_per_s"] is None
    assert result["tokens"] == len(shown) and shown == continuation([3, 1, 4], 20)[: len(shown)]
    assert generate.summary(result)[-1] == "interrupted"


def test_pytorch_continues_text(capsys, monkeypatch):
    """The verb with the real PyTorch decoder, whose waits nobody counts: a share of None that ends in a TypeError."""
    monkeypatch.setattr("sys.argv", [*"jax-dflash generate x --framework torch --max-new-tokens 8 --json".split()])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    result = json.loads(capsys.readouterr().out)
    assert exit.value.code == 0 and result["identical_to_target"] is True
    assert (result["tokens"], result["host_share"]) == (8, None)


def streamed(tokens, chunks, several=False, color=None):
    """What a stream shows of `tokens` that come in `chunks` of (how many, how many of them drafts)."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=color is not None, color_system=color, width=200)
    stream = generate.TextStream(excerpts.tokenizer(TARGET), console, several)
    generation = Generation(0, tokens[:2], SamplingParams(max_new_tokens=99), tokens[:2])
    stream.start(["PROMPT "])
    for count, num_drafts in chunks:
        new = tokens[len(generation.tokens) :][:count]
        generation.tokens = generation.tokens + new
        stream(generation, new, num_drafts)
    stream.finish(["PROMPT "], [generation])
    return out.getvalue()


def test_what_is_streamed_is_the_text():
    """A character of several tokens shown as broken ones, or a space that goes between two decodings."""
    ids = excerpts.tokenizer(TARGET).encode("x = 'über → 漢字 naïve'  # done").ids
    text = excerpts.tokenizer(TARGET).decode(ids[2:])
    for chunks in ([(1, 0)] * 60, [(3, 2)] * 20, [(60, 59)]):
        assert streamed(ids, chunks) == f"PROMPT {text}\n"


def test_accepted_drafts_have_a_colour_of_their_own():
    """Drafts and the target's own tokens shown alike, or escape codes where nobody reads them."""
    ids = excerpts.tokenizer(TARGET).encode("abcdef").ids
    coloured = streamed(ids, [(3, 2), (1, 0)], color="standard")
    assert "\x1b[32mc\x1b[0m" in coloured or "\x1b[32mcd\x1b[0m" in coloured
    assert "\x1b[1me\x1b[0m" in coloured
    assert "\x1b" not in streamed(ids, [(3, 2), (1, 0)])


def test_several_texts_are_shown_whole():
    """Tokens of several requests mixed into one line."""
    shown = streamed(excerpts.tokenizer(TARGET).encode("abcdef").ids, [(2, 1), (2, 1)], several=True)
    assert "[1/1]" in shown and "PROMPT cdef" in shown


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "pass a PROMPT or --prompts FILE, one of them"),
        (["x", "--prompts", "y"], "pass a PROMPT or --prompts FILE, one of them"),
        (["--prompts", "/nowhere"], "/nowhere: no such file"),
        (["x", "--loop", "gpu"], "--loop 'gpu': pass host or device"),
        (["x", "--loop", "device", "--framework", "torch"], "PyTorch has the host loop only"),
        (["x", "--framework", "tf"], "--framework 'tf': pass jax or torch"),
        (["x", "--dtype", "int8"], "--dtype 'int8': pass float32 or bfloat16"),
        (["x", "--temperature", "-1"], "temperature=-1.0: expected"),
        (["x", "--top-p", "2"], "top_p=2.0: expected"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens=0: expected"),
        (["x", "--checkpoint", "/nowhere"], "--checkpoint needs the drafter's own target too"),
    ],
)
def test_bad_input_is_one_line(args, message):
    """A traceback, or a model loaded before the command line is read."""
    with pytest.raises(InputError) as error:
        cli.app(["generate", *args], standalone_mode=False)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_prompts_that_cannot_run(tmp_path):
    """A prompt without tokens, or longer than the model: refused after minutes of compiling."""
    with pytest.raises(InputError, match="a prompt is empty; write at least one character"):
        generate.encode(TARGET, [""], 96)
    with pytest.raises(InputError, match="a prompt of 200 tokens leaves no room in --max-model-len 96"):
        generate.encode(TARGET, ["abcd " * 40], 96)
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    with pytest.raises(InputError, match="no prompt in it; write one a line"):
        cli.app(["generate", "--prompts", str(empty)], standalone_mode=False)
