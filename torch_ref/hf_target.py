"""Any causal language model of `transformers` as a target: the call surface of `torch_ref.target_runner.TargetRunner`.

For architectures that `torch_ref.target` does not compute. It is slow: one forward per request, over the model's own
cache. `transformers` is no dependency of this package; it is imported when a model is loaded or a cache is made.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jax_dflash.buckets import BucketLadder
from jax_dflash.config import Geometry, InputError, TargetConfig
from jax_dflash.target_batch import TargetBatch, TargetLimits, TargetOutput, check_taps
from torch_ref.numerics import accum_dtype
from torch_ref.sampling import greedy_verify

LAYER_LISTS = ("layers", "h", "blocks")  # where decoders keep their layers


def _transformers():
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("a Hugging Face target needs transformers; pip install transformers") from None
    return transformers


def load_hf_model(name: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """`AutoModelForCausalLM` of a folder or org/name, in evaluation mode. Raises InputError without transformers."""
    model = _transformers().AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.eval().to(device)


def target_config(model: Any) -> TargetConfig:
    """What `check_pair` and the limits read of a model's own configuration; its layers may be of any form."""
    c = model.config.get_text_config()
    eos = c.eos_token_id
    geometry = Geometry(
        hidden_size=c.hidden_size, num_layers=c.num_hidden_layers, num_heads=c.num_attention_heads,
        num_kv_heads=getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        intermediate_size=getattr(c, "intermediate_size", None) or 4 * c.hidden_size, rms_norm_eps=0.0, rope_theta=1.0,
        vocab_size=model.get_output_embeddings().weight.shape[0], max_position_embeddings=c.max_position_embeddings,
    )  # fmt: skip
    return TargetConfig(
        geometry=geometry,
        tie_word_embeddings=bool(getattr(c, "tie_word_embeddings", False)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def decoder_layers(model: Any) -> Any:
    """The list of a model's decoder layers. Raises InputError for a model that hides it."""
    decoder = model.get_decoder()
    for name in LAYER_LISTS:
        if (layers := getattr(decoder, name, None)) is not None:
            return layers
    raise InputError(
        f"{type(decoder).__name__} has no list of layers among {', '.join(LAYER_LISTS)}; tap a layer before"
    )


class HFTargetRunner:
    """A `transformers` model behind `run(batch)`. Its caches are its own: of block tables only each request's first page is
    read, which tells whose rows they are. So no two live requests may share their first page.

    A request begins anew with `start` 0; from a later start the cache is cut to that many tokens, which takes rejected
    drafts away. The caches of the `max_num_seqs` requests that ran last are kept.

    Args:
        model: `load_hf_model(...)`, or any model with its call surface.
        taps, num_speculative_tokens, max_num_seqs, max_model_len, num_pages, widths, page_size, max_num_batched_tokens,
            ladder: as in `TargetRunner`; there is no pool.
    """

    def __init__(
        self,
        model: Any,
        *,
        taps: Sequence[int],
        num_speculative_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_pages: int,
        widths: Sequence[int],
        page_size: int = 16,
        max_num_batched_tokens: int | None = None,
        ladder: BucketLadder | None = None,
    ):
        self.model, self.config = model, target_config(model)
        self.taps = check_taps(taps, self.config.geometry.num_layers)
        self.limits = TargetLimits.make(
            self.config, num_speculative_tokens=num_speculative_tokens, max_num_seqs=max_num_seqs, widths=widths,
            max_model_len=max_model_len, num_pages=num_pages, page_size=page_size, ladder=ladder,
            max_num_batched_tokens=max_num_batched_tokens,
        )  # fmt: skip
        self.caches: dict[int, Any] = {}  # by first page, the latest last
        self.captured = False
        self._last_layer: Tensor | None = None
        if self.config.geometry.num_layers in self.taps:
            decoder_layers(model)[-1].register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        """`hidden_states[-1]` has been through the final norm; the tap is the stream before it."""
        self._last_layer = output[0] if isinstance(output, tuple) else output

    def capture(self, *, progress: bool = True) -> None:
        """There is nothing to capture."""
        self.captured = True

    def _check(self, pages: list[int], starts: list[int]) -> None:
        if len(set(pages)) < len(pages):
            raise InputError(f"requests of first pages {pages} share one; each cache is known by its own")
        for page, start in zip(pages, starts, strict=True):
            if start > 0 and (page not in self.caches or self.caches[page].get_seq_length() < start):
                raise InputError(f"the request of page {page} starts at {start}, behind what has run; begin it at 0")

    def _cache(self, page: int, start: int) -> Any:
        """The request's cache, holding exactly `start` tokens."""
        cache = self.caches.pop(page, None)
        if start == 0:
            cache = _transformers().DynamicCache()  # of full layers, which can be cropped where windows are, too
        elif (surplus := cache.get_seq_length() - start) > 0:
            cache.crop(-surplus)
        self.caches[page] = cache
        return cache

    def _forward(self, tokens: np.ndarray, cache: Any, num_logits: int) -> tuple[Float[Tensor, "Q V"], Tensor]:
        """Logits of the last `num_logits` rows, and the features of all of them."""
        ids = torch.from_numpy(tokens).long().to(self.model.device)[None]
        out = self.model(
            input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True, logits_to_keep=num_logits
        )
        stream = [*out.hidden_states[:-1], self._last_layer]
        states = [stream[m] for m in self.taps]
        return out.logits[0, -num_logits:], torch.cat([*states, out.hidden_states[0][..., :0]], dim=-1)[0]

    @torch.inference_mode()
    def run(self, batch: TargetBatch) -> TargetOutput:
        """One step, request by request. Raises InputError before anything has changed."""
        if not self.captured:
            raise InputError("the target is not ready yet; call capture() first")
        columns = self.limits.check(batch)
        n, Q = len(columns.tokens), self.limits.query_len
        size = self.limits.feature_rows(*self.limits.dispatch(n, int(columns.num_rows.max())))
        pages, starts = columns.block_tables[:, 0].tolist(), columns.start.tolist()
        self._check(pages, starts)
        logits, features = [], []
        for tokens, page, start, num_drafts in zip(columns.tokens, pages, starts, columns.num_drafts, strict=True):
            own, feature = self._forward(tokens, self._cache(page, start), int(num_drafts) + 1)
            logits.append(torch.nn.functional.pad(own, (0, 0, 0, Q - len(own))))
            features.append(feature)
        while len(self.caches) > self.limits.max_num_seqs:
            del self.caches[next(iter(self.caches))]
        drafts = torch.zeros(n, Q - 1).int()
        for i, (tokens, count) in enumerate(zip(columns.tokens, columns.num_drafts, strict=True)):
            drafts[i, :count] = torch.from_numpy(tokens[len(tokens) - count :])
        device = self.model.device
        stacked = torch.stack(logits)
        tokens, num_sampled = greedy_verify(
            stacked.to(accum_dtype(stacked.dtype)), drafts.to(device), torch.from_numpy(columns.num_drafts).to(device)
        )
        rows = torch.cat(features)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, size - len(rows)))
        return TargetOutput(tokens=tokens.cpu().numpy(), num_sampled=num_sampled.cpu().numpy(), features=rows)
