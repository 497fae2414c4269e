"""Decoder: prompts in, text out; a target and a drafter behind one call, as in `jax_dflash.decoder`, in the host loop."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from jax_dflash.buckets import BucketLadder
from jax_dflash.config import DraftConfig, InputError, TargetConfig, check_pair
from jax_dflash.decoding import DecodeLoop, DecoderSizes, Generation
from jax_dflash.pages import PageAllocator, PrefixCache
from jax_dflash.sampling_params import GREEDY, SamplingMode, SamplingParams
from torch_ref.drafter import DraftWeights, load_drafter, pack_drafter
from torch_ref.engine import DraftEngine
from torch_ref.modules import tensors
from torch_ref.target import TargetWeights, load_target, pack_target
from torch_ref.target_runner import TargetRunner

LOOPS = ("host",)


class Decoder:
    """A target runner and a draft engine over pools of the same pages.

    Args: as in `jax_dflash.decoder.Decoder`. The device is that of the weights; `draft_mode` is the engine's mode, "eager"
        or "cuda_graph".
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
        draft_mode: str = "eager",
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
            mode=draft_mode,
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

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        target: str | Path,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        **sizes: Any,
    ) -> "Decoder":
        """A pair of published folders. Raises InputError."""
        from torch_ref.numerics import as_dtype

        kind = as_dtype(dtype)
        target_config, target_module = load_target(target, kind, device)
        draft_config, drafter = load_drafter(checkpoint, kind, device)
        draft_config = check_pair(draft_config, target_config, tensors(drafter))
        weights = pack_target(target_module, target_config)
        draft_weights = pack_drafter(drafter, draft_config, weights.embed_tokens, weights.lm_head)
        return cls(draft_config, draft_weights, target_config, weights, **sizes)

    def capture(self, *, loops: Sequence[str] = LOOPS, progress: bool = True) -> None:
        """CUDA graphs of the drafter, if it has some. Raises InputError for a loop that PyTorch has not."""
        check_loops(loops)
        self.engine.capture(progress=progress)
        self.runner.capture(progress=progress)

    @property
    def device_name(self) -> str:
        """What it runs on."""
        return torch.cuda.get_device_name() if self.engine.device.type == "cuda" else "cpu"

    waited: float | None = None  # an eager step waits everywhere

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
        """As `jax_dflash.decoder.Decoder.generate`, in the host loop."""
        check_loops([loop])
        decoding = DecodeLoop(
            self.runner,
            (drafter or self.engine) if speculate else None,
            eos_token_ids=self.target_config.eos_token_ids,
            schedule_k=schedule_k,
            on_tokens=on_tokens,
            prefix_cache=self.prefix_cache,
            **(self.sizes.loop | ({} if max_num_seqs is None else {"max_num_seqs": max_num_seqs})),
        )
        return decoding.generate(prompts, params, generations)


def check_loops(loops: Sequence[str]) -> None:
    for loop in loops:
        if loop not in LOOPS:
            raise InputError(f"loop={loop!r}: PyTorch has the host loop only; pass host")
