"""The values of a draft step that both frameworks expose, by name. Plain Python."""

from typing import Any, NamedTuple


class Tap(NamedTuple):
    """`dims` is the shape by the letters of the legend in drafter.py, `kind` is float or int."""

    name: str
    dims: str
    kind: str


TAPS = (
    Tap("context_positions", "C", "int"),
    Tap("context_slots", "C", "int"),
    Tap("input_ids", "B*T", "int"),
    Tap("query_positions", "B*T", "int"),
    Tap("query_slots", "B*T", "int"),
    Tap("query_start_loc", "B+1", "int"),
    Tap("seq_lens", "B", "int"),
    Tap("sample_indices", "B*(T-1)", "int"),
    Tap("sample_positions", "B*(T-1)", "int"),
    Tap("sample_request", "B*(T-1)", "int"),
    Tap("combined", "C D", "float"),
    Tap("context_kv", "L 2 C K H", "float"),
    Tap("hidden", "B T-1 D", "float"),
    Tap("logits", "B T-1 V", "float"),
)
NAMES = frozenset(tap.name for tap in TAPS)


def record(taps: dict[str, Any] | None, values: dict[str, Any]) -> None:
    """Keep values if anybody asked for taps."""
    if taps is not None:
        assert values.keys() <= NAMES and not values.keys() & taps.keys(), values.keys()
        taps.update(values)
