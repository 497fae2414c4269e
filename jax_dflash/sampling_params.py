"""How a request is sampled, what of that a program is compiled for, and the streams of noise. Plain Python: both
frameworks use it, so that their noise is the same by construction."""

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_dflash.config import InputError

INT32_MAX = 2**31 - 1
LEAST, MOST = (
    0.01,
    100,
)  # temperatures (the least is vLLM's) and penalties that leave logits finite and apart in float32


class Stream(enum.IntEnum):
    """What a draw is for, as an offset of its position: positions stay below 2^30, so that no two streams meet.

    A draft and the token that replaces it are drawn at the same position. From the same noise the replacement would be
    the runner-up of a contest that its own draft won, and the output would not follow the target (vllm-project/vllm#54282,
    whose offset of drafts this is). Acceptance depends on one more uniform at that position, for the same reason its own.
    """

    TARGET = 0
    DRAFT = 1 << 30
    ACCEPT = -(1 << 30)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, under vLLM's names. Raises InputError.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token; `repetition_penalty` (Keskar et al. 2019) divides
    positive and multiplies negative logits of tokens in the prompt or the output, and 1 leaves them. `seed` with a
    position decides every draw, whatever the batch. `ignore_eos` goes on to `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        self._whole("max_new_tokens", least=1)
        self._whole("top_k", least=0, hint="; 0 keeps every token")
        self._whole("seed", least=0)
        temperature = self._number("temperature")
        if temperature != 0 and not LEAST <= temperature <= MOST:
            raise self._error("temperature", f"expected 0 (greedy) or a number from {LEAST} to {MOST}")
        if not 0 < self._number("top_p") <= 1:
            raise self._error("top_p", "expected a number above 0 and up to 1; 1 keeps every token")
        if not LEAST <= self._number("repetition_penalty") <= MOST:
            raise self._error("repetition_penalty", f"expected a number from {LEAST} to {MOST}; 1 is no penalty")
        if not isinstance(self.ignore_eos, bool):
            raise self._error("ignore_eos", "expected True or False")

    def _whole(self, name: str, least: int, hint: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= INT32_MAX:
            raise self._error(name, f"expected a whole number from {least} to 2^31 - 1{hint}")

    def _number(self, name: str) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._error(name, "expected a finite number")
        return value

    def _error(self, name: str, expected: str) -> InputError:
        return InputError(f"{name}={getattr(self, name)!r}: {expected}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p takes tokens away."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def penalised(self) -> bool:
        """Whether tokens seen before are penalised."""
        return self.repetition_penalty != 1


@dataclass(frozen=True)
class SamplingMode:
    """What a program is compiled for: whether any request of its batch is sampled, filtered, penalised. A greedy program
    holds no noise, and one that filters nothing no sort."""

    sampled: bool = False
    filtered: bool = False
    penalised: bool = False

    def covers(self, other: "SamplingMode") -> bool:
        """Whether a program of this mode serves what the other one serves."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return all(ours or not theirs for ours, theirs in pairs)

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "SamplingMode":
        """The least mode that serves these requests. No filter takes away the most likely token, so that greedy requests
        need none."""
        return cls(
            sampled=any(not each.greedy for each in params),
            filtered=any(each.filtered and not each.greedy for each in params),
            penalised=any(each.penalised for each in params),
        )


GREEDY = SamplingMode()
FLOAT = np.dtype("f4")  # how temperatures and the like travel to the device


def float_bits(values) -> np.ndarray:
    """Floats as the int32 that `numerics.from_bits` reads."""
    return np.array(values, FLOAT).view(np.int32)


class SamplingColumns(NamedTuple):
    """SamplingParams of a batch as arrays `[N]` of either framework: `top_k` and `seeds` int32, the others floats. A padded
    request has temperature 0, penalty 1, top_p 1 and top_k 0."""

    temperature: Any
    top_k: Any
    top_p: Any
    repetition_penalty: Any
    seeds: Any
