"""The verb `generate`: continue prompts speculatively, show the text as it is accepted, and say what speculation gave."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from jax_dflash import excerpts
from jax_dflash.config import InputError
from jax_dflash.decoding import Generation, acceptance_by_position, accepted_length
from jax_dflash.sampling_params import SamplingMode, SamplingParams

ACCEPTED, OWN = "green", "bold"  # drafts, and tokens that are the target's own
WARM_UP = 8  # tokens decoded before anything is timed


@dataclass(frozen=True)
class GenerateJob:
    """What the command line asked for."""

    checkpoint: Path
    target: Path
    pair: str
    prompts: list[str]
    params: SamplingParams
    loop: str
    framework: str
    device: str
    dtype: str
    num_speculative_tokens: int | None
    max_num_seqs: int
    max_model_len: int
    check: bool


class TextStream:
    """Shows tokens as text while they come. A character may take several tokens: it is shown with the last of them.

    One prompt streams; of several each is shown whole when it ends, since their tokens come together.
    """

    def __init__(self, tokenizer: Tokenizer, console: Console, several: bool):
        self.tokenizer, self.console, self.several = tokenizer, console, several
        self._shown: dict[int, tuple[int, int]] = {}  # tokens before which text is settled, and those already shown
        self._kept: dict[int, Text] = {}

    def start(self, prompts: list[str]) -> None:
        if not self.several:
            self.console.print(Text(prompts[0], style="dim"), end="", soft_wrap=True)

    def __call__(self, generation: Generation, new: list[int], num_drafts: int) -> None:
        first = len(generation.tokens) - len(new)
        piece = Text()
        for i in range(len(new)):
            piece.append(self._text_of(generation, first + i + 1), style=ACCEPTED if i < num_drafts else OWN)
        if self.several:
            self._kept.setdefault(generation.request_id, Text()).append_text(piece)
        else:
            self.console.print(piece, end="", soft_wrap=True)

    def _text_of(self, generation: Generation, end: int) -> str:
        """What token `end - 1` adds to the text; nothing while it ends inside a character."""
        settled, shown = self._shown.get(
            generation.request_id, (max(0, len(generation.prompt) - 8), len(generation.prompt))
        )
        before = self.tokenizer.decode(generation.tokens[settled:shown], skip_special_tokens=False)
        after = self.tokenizer.decode(generation.tokens[settled:end], skip_special_tokens=False)
        if after.endswith("\ufffd"):
            return ""
        self._shown[generation.request_id] = (shown, end)
        return after[len(before) :]

    def finish(self, prompts: list[str], generations: list[Generation]) -> None:
        """The end of one text, or all of several."""
        for prompt, generation in zip(prompts, generations, strict=True) if self.several else ():
            self.console.rule(
                f"[{generation.request_id + 1}/{len(prompts)}] {generation.finish_reason or 'interrupted'}"
            )
            text = self._kept.get(generation.request_id, Text())
            self.console.print(Text(prompt, style="dim") + text, soft_wrap=True)
        if not self.several:
            self.console.print()
        for generation in generations:
            if generation.error:
                self.console.print(f"refused: {generation.error}", style="red", soft_wrap=True, highlight=False)


def load_decoder(job: GenerateJob):
    """The decoder of the job's framework. Raises InputError."""
    sizes: dict[str, Any] = {
        "num_speculative_tokens": job.num_speculative_tokens,
        "max_num_seqs": job.max_num_seqs,
        "max_model_len": job.max_model_len,
        "mode": SamplingMode.of([job.params]),
    }
    if job.framework == "jax":
        from jax_dflash.decoder import Decoder

        return Decoder.load(job.checkpoint, job.target, job.dtype, **sizes)
    from torch_ref.decoder import Decoder

    return Decoder.load(
        job.checkpoint, job.target, job.dtype, device={"cpu": "cpu", "gpu": "cuda"}[job.device], **sizes
    )


def encode(target: Path, prompts: list[str], max_model_len: int) -> list[list[int]]:
    """Prompts as the target's tokens. Raises InputError."""
    tokenizer, rows = excerpts.tokenizer(target), []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        if not ids:
            raise InputError("a prompt is empty; write at least one character")
        if len(ids) >= max_model_len:
            raise InputError(
                f"a prompt of {len(ids)} tokens leaves no room in --max-model-len {max_model_len}; "
                "shorten it or raise that"
            )
        rows.append(ids)
    return rows


def generate(job: GenerateJob, stream: TextStream | None, capture_progress: bool = True) -> dict[str, Any]:
    """Decode with and without speculation; the JSON document. `interrupted` is true after Ctrl-C: then it holds what there
    was by then. Raises InputError."""
    prompts = encode(job.target, job.prompts, job.max_model_len)
    decoder = load_decoder(job)
    decoder.capture(loops=("host", job.loop), progress=capture_progress)
    params = [job.params] * len(prompts)
    warm = [SamplingParams(max_new_tokens=WARM_UP, temperature=job.params.temperature)] * min(2, len(prompts))
    for speculate in (True, False):
        decoder.generate(prompts[: len(warm)], warm, loop=job.loop if speculate else "host", speculate=speculate)

    found: list[Generation] = []
    if stream is not None:
        stream.start(job.prompts)
    waited, start = decoder.waited, time.perf_counter()
    interrupted = not _until_interrupt(
        lambda: decoder.generate(prompts, params, loop=job.loop, on_tokens=stream, generations=found)
    )
    wall, end = time.perf_counter() - start, decoder.waited
    if stream is not None:
        stream.finish(job.prompts, found)

    plain: list[Generation] = []
    start = time.perf_counter()
    if not interrupted:
        interrupted = not _until_interrupt(
            lambda: decoder.generate(prompts, params, speculate=False, generations=plain)
        )
    plain_wall = time.perf_counter() - start
    tokens = sum(len(g.generated) for g in found)
    result: dict[str, Any] = {
        "job": "generate", "ok": True, "pair": job.pair, "framework": job.framework, "loop": job.loop,
        "device": decoder.device_name,
        "dtype": job.dtype, "num_speculative_tokens": decoder.engine.config.num_speculative_tokens, "prompts": len(prompts),
        "temperature": job.params.temperature, "tau": _rounded(accepted_length(found)), "tokens": tokens,
        "identical_to_target": None, "tokens_per_s": round(tokens / wall, 1), "plain_tokens_per_s": None, "speedup": None,
        "acceptance_by_position": [round(a, 4) for a in acceptance_by_position(found)],
        "host_share": None if waited is None or end is None else round(1 - (end - waited) / wall, 4),
        "finish_reasons": [g.finish_reason for g in found], "interrupted": interrupted,
    }  # fmt: skip
    if not interrupted:
        same = [g.generated == p.generated for g, p in zip(found, plain, strict=True)]
        result["identical_to_target"] = all(same) if job.params.greedy else None
        result["plain_tokens_per_s"] = round(sum(len(g.generated) for g in plain) / plain_wall, 1)
        result["speedup"] = round(result["tokens_per_s"] / result["plain_tokens_per_s"], 3)
        result["ok"] = not (job.check and job.params.greedy) or all(same)
    tokenizer = excerpts.tokenizer(job.target)
    result["texts"] = [tokenizer.decode(g.generated, skip_special_tokens=False) for g in found]
    return result


def _until_interrupt(call: Callable[[], Any]) -> bool:
    """Whether a call came to its end before Ctrl-C."""
    try:
        call()
    except KeyboardInterrupt:
        return False
    return True


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 4)


def summary(result: dict[str, Any]) -> list[str]:
    """The lines under the text."""
    tau = "no draft was verified" if result["tau"] is None else f"accepted length {result['tau']:.2f} tokens per verify"
    by_position = " ".join(f"{a:.2f}" for a in result["acceptance_by_position"])
    lines = [
        f"{tau}, K={result['num_speculative_tokens']}; accepted by position: {by_position or '-'}",
        f"{result['tokens']} tokens, {result['tokens_per_s']:.0f} tokens/s ({result['loop']} loop, {result['framework']}, "
        f"{result['device']}, {result['dtype']})",
    ]
    if result["plain_tokens_per_s"]:
        lines[1] += f"; without speculation {result['plain_tokens_per_s']:.0f} tokens/s: {result['speedup']:.2f}x"
    if result["host_share"] is not None:
        lines.append(f"host's share of the time: {100 * result['host_share']:.0f}%")
    if result["identical_to_target"] is not None:
        same = result["identical_to_target"]
        lines.append(
            "the text is the target's own" if same else "FAULT: the text is not what plain greedy decoding gives"
        )
    return lines + (["interrupted"] if result["interrupted"] else [])
