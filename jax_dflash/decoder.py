"""Decoder: prompts in, text out; a target and a drafter behind one call.

decoder = Decoder.load("jax_dflash/assets/builtin/drafter", "jax_dflash/assets/builtin/target")
decoder.capture()
generations = decoder.generate([[1, 2, 3]], [SamplingParams(max_new_tokens=100)])
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_dflash.buckets import BucketLadder
from jax_dflash.config import DraftConfig, InputError, TargetConfig, check_pair
from jax_dflash.decoding import DecodeLoop, DecoderSizes, Generation
from jax_dflash.device_loop import DeviceLoop
from jax_dflash.drafter import DraftWeights, load_drafter, pack_drafter
from jax_dflash.engine import DraftEngine
from jax_dflash.modules import tensors
from jax_dflash.pages import PageAllocator, PrefixCache
from jax_dflash.sampling_params import GREEDY, SamplingMode, SamplingParams
from jax_dflash.target import TargetWeights, load_target, pack_target
from jax_dflash.target_runner import TargetRunner

LOOPS = ("host", "device")


class Decoder:
    """A target runner, a draft engine and the loop on the device, over pools of the same pages.

    Args:
        draft_config, draft_weights, target_config, target_weights: the pair, as `load_drafter`, `pack_drafter` and so on
            give it.
        num_speculative_tokens: drafts K per request; default the drafter's block_size - 1.
        max_num_seqs, max_model_len: requests at a time, and positions of one, at most.
        page_size, num_pages: of each pool; by default every request can grow to max_model_len.
        max_num_batched_tokens, ladder, allow_long_block: as `DraftEngine` takes them.
        chunk: prompt rows of one request in a step.
        mode: what the programs are compiled for; greedy by default.
        draft_sample_method: greedy or probabilistic; default probabilistic where the mode samples.
        scheduled_ks: fewer drafts that a `schedule_k` may ask for.
        prefix_cache: keep pages from one call to the next for prompts that begin alike.
        max_rounds: rounds of the loop on the device in one call.
    """

    def __init__(
        self,
        draft_config: DraftConfig,
        draft_weights: DraftWeights,
        target_config: TargetConfig,
        target_weights: TargetWeights,
        *,
        max_num_seqs: int = 8,
        max_model_len: int = 1024,
        num_speculative_tokens: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        max_num_batched_tokens: int | None = None,
        ladder: BucketLadder | None = None,
        allow_long_block: bool = False,
        chunk: int = 64,
        mode: SamplingMode = GREEDY,
        draft_sample_method: str | None = None,
        scheduled_ks: Sequence[int] = (),
        prefix_cache: bool = False,
        max_rounds: int = 128,
    ):
        self.engine = DraftEngine(
            draft_config,
            draft_weights,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_speculative_tokens=num_speculative_tokens,
            page_size=page_size,
            num_pages=num_pages or DecoderSizes.num_pages(max_num_seqs, max_model_len, page_size),
            max_num_batched_tokens=max_num_batched_tokens,
            ladder=ladder,
            allow_long_block=allow_long_block,
            external_pages=True,
            draft_sample_method=draft_sample_method or ("probabilistic" if mode.sampled else "greedy"),
            scheduled_ks=scheduled_ks,
        )
        self.sizes = DecoderSizes.of(self.engine.config, self.engine.ladder, chunk)
        self.target_config = target_config
        loop = self.sizes.loop
        pages = PageAllocator(loop["num_pages"])
        self.prefix_cache = PrefixCache(pages, loop["page_size"]) if prefix_cache else None
        self.runner = TargetRunner(
            target_config,
            target_weights,
            taps=draft_config.hidden_state_indices,
            mode=mode,
            draft_logits=self.engine.config.samples_drafts,
            ladder=self.engine.ladder,
            **self.sizes.runner,
        )
        self.device_loop = DeviceLoop(
            self.engine, self.runner, eos_token_ids=target_config.eos_token_ids, max_rounds=max_rounds
        )

    @classmethod
    def load(cls, checkpoint: str | Path, target: str | Path, dtype: str = "float32", **sizes: Any) -> "Decoder":
        """A pair of published folders. Raises InputError."""
        from jax_dflash.numerics import as_dtype

        target_config, target_module = load_target(target, as_dtype(dtype))
        draft_config, drafter = load_drafter(checkpoint, as_dtype(dtype))
        draft_config = check_pair(draft_config, target_config, tensors(drafter))
        weights = pack_target(target_module, target_config)
        draft_weights = pack_drafter(drafter, draft_config, weights.embed_tokens, weights.lm_head)
        return cls(draft_config, draft_weights, target_config, weights, **sizes)

    def capture(self, *, loops: Sequence[str] = LOOPS, progress: bool = True) -> None:
        """Compile everything that generating needs; nothing compiles after it."""
        self.engine.capture(progress=progress)
        self.runner.capture(progress=progress)
        if "device" in loops:
            self.device_loop.capture(progress=progress)

    @property
    def device_name(self) -> str:
        """What it runs on."""
        return jax.devices()[0].device_kind

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the device so far; all other time is the host's."""
        return self.runner.waited + self.engine.waited + self.device_loop.waited

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        loop: str = "host",
        speculate: bool = True,
        drafter: Any = None,
        max_num_seqs: int | None = None,
        schedule_k: Callable[[int], int] | None = None,
        on_tokens: Callable[[Generation, list[int], int], Any] | None = None,
        generations: list[Generation] | None = None,
    ) -> list[Generation]:
        """Continue each prompt; the generations in the order of the prompts. `loop="device"` runs rounds without the host;
        `speculate=False` decodes plainly, one token a step; another `drafter` with the engine's call surface takes its
        place in the host loop; `max_num_seqs` lets fewer requests run at a time. `generations` is filled at the start, so
        that who interrupts has the texts so far; the decoder can be used again then. Raises InputError."""
        if loop not in LOOPS:
            raise InputError(f"loop={loop!r}: pass one of {', '.join(LOOPS)}")
        decoding = DecodeLoop(
            self.runner,
            (drafter or self.engine) if speculate else None,
            rounds=self.device_loop if speculate and loop == "device" else None,
            eos_token_ids=self.target_config.eos_token_ids,
            schedule_k=schedule_k,
            on_tokens=on_tokens,
            prefix_cache=self.prefix_cache,
            **(self.sizes.loop | ({} if max_num_seqs is None else {"max_num_seqs": max_num_seqs})),
        )
        return decoding.generate(prompts, params, generations)
