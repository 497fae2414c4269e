"""Reports: what a reader of a failing comparison must see first, and that no string from a file is obeyed."""

import base64
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from parity_tests.harness import report, report_figure, report_html

REPLAY = "python -m parity_tests replay failures/layers.0.attn-3f2a.safetensors"


def tap(name, dims="B T D", shape=(3, 8, 60), rho=1.01, e2e=1.02, contract=2, fp64=2.1e-15, **changes):
    """A tap row as the harness writes it. `changes` overrides any field."""
    row = {
        "kind": "tap", "case": "mixed-tiny", "ref": "torch.eager", "sut": "jax", "dtype": "bfloat16", "tap": name,
        "dims": dims, "shape": list(shape), "level": 1, "value_kind": "float", "fp64": fp64, "rel_rmse_u": 0.57,
        "roundings": 1.85 * rho**2, "contract": contract, "rho_local": rho, "band_local": [0.88, 1.16], "rho_e2e": e2e,
        "band_e2e": [0.85, 1.2], "ulp_p50": 0.0, "ulp_p99": 1.0, "ulp_max": 3.0, "ulp_at": [0, 3, 2, 7][: len(shape)],
        "verdict": "ok",
    }  # fmt: skip
    return row | changes


def integer(name, **changes):
    floats = ("fp64", "rel_rmse_u", "roundings", "contract", "rho_local", "band_local", "rho_e2e", "band_e2e")
    nulls = dict.fromkeys((*floats, "ulp_p50", "ulp_p99", "ulp_max", "ulp_at"))
    return tap(name, "B*T", (24,)) | nulls | {"value_kind": "int"} | changes


def summary(**changes):
    versions = {"jax": "0.10.2", "torch": "2.13.0", "numpy": "2.4.1"}
    row = {
        "kind": "summary", "case": "mixed-tiny", "ref": "torch.eager", "sut": "jax", "dtype": "bfloat16",
        "device": "cpu: 2 cores", "versions": versions, "git": "abc123", "ok": True, "first_divergence": None,
        "verdict": "ok", "attribution": [], "hypothesis": None, "replay": None,
        "tiers": {"0": "pass", "1": "pass", "2": "pass"}, "error_map": None, "histograms": None, "magnitude": None,
    }  # fmt: skip
    return row | changes


def passing(layers=1, **changes):
    """A comparison of 3 + 6 * layers float and 3 integer taps, all ok, rho drawn from a plausible null."""
    rng = np.random.default_rng(7)
    names = ["combined"] + [f"layers.{i}.{n}" for i in range(layers) for n in ("q", "k", "v", "attn", "mlp", "out")]
    rows = [integer(n) for n in ("context_slots", "query_positions", "seq_lens")]
    for name in [*names, "hidden", "logits"]:
        attention = name.split(".")[-1] in ("q", "k", "v", "attn")
        dims, shape = ("B T N H", (3, 8, 6, 10)) if attention else ("B T D", (3, 8, 60))
        local, e2e = np.exp(rng.normal(0, 0.04, 2))
        rows.append(tap(name, dims, shape, rho=local, e2e=e2e, fp64=10 ** rng.uniform(-16, -14.5)))
    return [row | changes for row in [*rows, summary()]]


def failing(layers=1, **changes):
    """The same with a wrong mask in layer 0's attention: it fails there, downstream is off only end to end."""
    rng = np.random.default_rng(8)
    rows = passing(layers)
    at = next(i for i, row in enumerate(rows) if row.get("tap") == "layers.0.attn")
    rows[at] |= {"rho_local": 45.3, "roundings": 3796.0, "fp64": 5.2e-2, "ulp_max": 412.0, "verdict": "wrong maths"}
    for row in rows[at:-1]:
        row["rho_e2e"] = float(45.3 * np.exp(rng.normal(-0.7, 0.3)))
    rows[min(at + 8, len(rows) - 2)] |= {"rho_local": 2.23, "roundings": 9.1, "verdict": "rounding policy differs"}
    values = rng.uniform(0.2, 0.6, (8, 6))
    values[7] += 9
    x = np.exp(rng.normal(-2, 1.5, 400))
    steps = rng.integers(0, 3, (2, 400)) / 2 * 2.0 ** np.floor(np.log2(x)) * 2**-7
    rows[-1] |= {
        "ok": False, "first_divergence": "layers.0.attn", "verdict": "wrong maths",
        "attribution": ["93% of the squared error in T=7", "41% in N=2"], "replay": REPLAY,
        "hypothesis": "a mask: the last query token sees one key too many", "tiers": {"0": "pass", "1": "fail"},
        "error_map": {"tap": "layers.0.attn", "rows": "token", "columns": "head", "values": values.tolist()},
        "histograms": {"tap": "layers.0.attn", "edges": [0, 0.5, 1, 2, 4, 8, 16, 32, 512],
                       "ref": [800, 500, 130, 9, 1, 0, 0, 0], "sut": [700, 420, 120, 20, 15, 35, 60, 70]},
        "magnitude": {"tap": "layers.0.attn", "abs_value": x.tolist(), "abs_error_ref": steps[0].tolist(),
                      "abs_error_sut": (steps[1] * rng.choice([1, 30], 400, p=[0.85, 0.15])).tolist(),
                      "ulp_guides": [0.5, 1, 4]},
    }  # fmt: skip
    return [row | changes for row in rows]


def printed(rows, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    report.terminal(rows, console)
    return console.file.getvalue()


def row_of(text, name):
    """The one line of a printed table that is about a tap."""
    [line] = [line for line in text.splitlines() if line[3:].split(" ")[0] == name]
    return line


def test_load_reads_what_was_written(tmp_path):
    """Would catch: rows lost or reordered, a blank last line taken for a row, NaN refused."""
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, failing())) + "\n\n")
    assert report.load(path) == failing()
    path.write_text('{"kind": "tap", "rho_local": NaN}')
    assert math.isnan(report.load(path)[0]["rho_local"])


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (
            b'{"kind": "tap"}\n{"kind": "tap"',
            2,
            "not JSON in UTF-8 (Expecting ',' delimiter: line 1 column 15 (char 14))",
        ),
        (b'{"kind": "tap"}\n\n\xff\n', 3, "not JSON in UTF-8 ('utf-8' codec can't decode byte 0xff in position 0"),
        (b"[1]", 1, 'expected an object with "kind": "tap" or "summary", got [1]'),
        (b'{"kind": "tip"}', 1, """expected an object with "kind": "tap" or "summary", got {'kind': 'tip'}"""),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, line, message):
    """Would catch: a truncated file that reads as a shorter, passing one; a message without the place."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as e:
        report.load(path)
    assert str(e.value).startswith(f"{path}:{line}: {message}") and "\n" not in str(e.value)


def test_a_file_without_rows_is_no_success(tmp_path):
    """Would catch: "0 of 0 ok" from a run that died before its first row."""
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no rows"):
        report.load(tmp_path / "r.jsonl")


def test_rows_are_split_into_comparisons():
    """Would catch: two dtypes or two runs of one case merged, so that the later verdict hides the earlier one."""
    found = report.comparisons(failing() + passing() + passing(dtype="float32"))
    assert [(c.label, len(c.taps), report.verdict(c)) for c in found] == [
        ("mixed-tiny: jax against torch.eager, bfloat16", 12, "wrong maths"),
        ("mixed-tiny: jax against torch.eager, bfloat16 (run 2)", 12, "ok"),
        ("mixed-tiny: jax against torch.eager, float32", 12, "ok"),
    ]
    assert report.headline(found) == "2 of 3 comparisons ok, 36 taps"
    interleaved = [row for pair in zip(passing(), passing(case="other"), strict=True) for row in pair]
    assert [len(c.taps) for c in report.comparisons(interleaved)] == [12, 12]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([tap("a"), summary()], "ok"),
        ([tap("a")], "ok"),
        ([tap("a", verdict=None)], "not judged"),
        ([summary(ok=None, verdict=None)], "not judged"),
        ([tap("a"), summary(ok=False)], "failed"),
        ([tap("a", verdict="taps perturb"), summary()], "taps perturb"),
        ([tap("a", verdict="taps perturb"), summary(ok=False, verdict="wrong maths")], "wrong maths"),
    ],
)
def test_only_what_was_judged_ok_is_ok(rows, verdict):
    """Would catch: a missing verdict read as a pass, a summary that overrules a failing tap."""
    [c] = report.comparisons(rows)
    assert report.verdict(c) == verdict


def test_first_divergence_is_the_summarys_else_the_first_in_order():
    """Would catch: the worst tap, or the last one, shown as the first."""
    [c] = report.comparisons(failing())
    assert report.first_divergence(c) == ("layers.0.attn", c.taps[7])
    taps = [tap("a"), tap("b", verdict="rounding policy differs"), tap("c", rho=90, verdict="wrong maths")]
    assert report.first_divergence(report.comparisons(taps)[0])[0] == "b"
    assert report.first_divergence(report.comparisons([*taps, summary(first_divergence="gone")])[0]) == ("gone", {})


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_terminal_fits(width):
    """Would catch: a header or a row that wraps, a band or verdict dropped for want of room, a folded replay line."""
    text = printed(failing(), width)
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("   tap "))
    assert lines[start].rstrip().endswith("verdict") and "rho local" in lines[start]
    assert [line[3:].split()[0] for line in lines[start + 1 : start + 10]] == [t["tap"] for t in failing()[3:-1]]
    assert max(map(len, lines[start : start + 10])) <= width
    assert [line for line in lines if line.startswith(">")] == [row_of(text, "layers.0.attn")]
    assert "45.3 [0.88,1.16]" in row_of(text, "layers.0.attn")
    assert f"replay: {REPLAY}" in lines
    assert "3 integer taps equal" in lines
    assert "  93% of the squared error in T=7" in lines
    assert text.count("412") == (1 if width < 100 else 2)  # named below the table where the column is left out


def test_terminal_shortens_what_cannot_fit():
    """Would catch: a long tap name folded over several lines."""
    lines = printed([tap("layers.0.self_attention.output_projection"), tap("b")], 50).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["tap", "rho", "local", "verdict"],
        ["layers.0...rojection", "1.01", "[0.88,1.16]", "ok"],
        ["b", "1.01", "[0.88,1.16]", "ok"],
    ]
    assert max(map(len, lines)) <= 50
    assert not any("integer" in line for line in lines)


def test_terminal_row_in_full():
    """Would catch: swapped columns, a rounding count without its contract, an index without its value."""
    assert row_of(printed(failing(), 200), "layers.0.attn").split() == [
        ">", "layers.0.attn", "3x8x6x10", "0.57", "3796/2", "45.3", "[0.88,1.16]", "13.4", "[0.85,1.20]", "5.2e-2",
        "1/412", "@0,3,2,7", "wrong", "maths",
    ]  # fmt: skip
    assert "left out" not in printed(failing(), 200)
    assert "left out at 80 columns: ULP index, verdict in words, shape, e2e band" in printed(failing(), 80)


def test_a_failing_integer_tap_has_a_row():
    """Would catch: unequal ids folded into "integer taps equal"."""
    text = printed([integer("ids"), integer("slots", verdict="wrong maths"), tap("a"), summary(ok=False)], 200)
    assert "1 of 2 integer taps equal" in text
    assert row_of(text, "slots").startswith(">") and row_of(text, "slots").rstrip().endswith("wrong maths")
    assert "WRONG MATHS at slots: shape 24\n" in text


def test_terminal_obeys_no_string():
    """Would catch: a tap name that rich reads as markup, or whose escape sequence clears the reader's screen."""
    text = printed([tap("[red]x[/]", verdict="wrong maths"), tap("a\x1b[2Jb\nc"), summary(replay="run [bold]x")])
    assert "[red]x[/]" in text and "a?[2Jb?c" in text and "replay: run [bold]x" in text and "\x1b" not in text


def test_markdown_survives_its_strings():
    """Would catch: a pipe that splits a cell, a tag that opens, a name in underscores set in italics."""
    rows = [
        tap("a|b`c", verdict="wrong maths", case="my_case_1 <b>"),
        summary(case="my_case_1 <b>", ok=False, attribution=["x|y"], replay=REPLAY),
    ]
    text = report.markdown(rows)
    lines = text.splitlines()
    assert lines[0] == "### Parity: 0 of 1 comparison ok, 1 tap"
    assert lines[4] == (r"| my\_case\_1 \<b\>: jax against torch.eager, bfloat16 | **wrong maths** | `a\|b'c` | 1 |")
    assert r"- x\|y" in lines and lines[lines.index(REPLAY) - 1] == "```sh"
    [row] = [line for line in lines if line.startswith("| **`a")]
    cells = re.split(r"(?<!\\)\|", row)[1:-1]
    assert len(cells) == 9 and cells[4] == r" 1.01 \[0.88,1.16\] "


def titles(rows):
    """Titles of the figure's panels, colour bars left out."""
    return [ax.get_title() for ax in report_figure.draw(report.comparisons(rows)).axes if ax.get_title()]


BARS = ["local rho (error / reference's error)", "end-to-end rho", "roundings, estimated", "relative RMSE in float64"]


def test_figure_leaves_out_panels_without_data():
    """Would catch: an empty panel, or a panel lost because another one is absent."""
    below = [
        "error at layers.0.attn, token x head",
        "error in ULP at layers.0.attn",
        "error by magnitude at layers.0.attn",
    ]
    assert titles(failing()) == BARS + below
    assert titles([row | {"histograms": None} for row in failing()]) == BARS + [below[0], below[2]]
    assert titles([*passing(), *failing(case="other")]) == BARS + below  # not the first, but the first that fails
    assert titles(passing()) == BARS
    assert titles([row | {"fp64": None} for row in passing()]) == BARS[:3]


def test_figure_labels_do_not_overlap(tmp_path):
    """Would catch: 35 tap names, or the ticks of a wide range, printed on top of each other; no hardware named."""
    fig = report_figure.draw(report.comparisons(failing(layers=5)))
    fig.savefig(tmp_path / "f.png", dpi=100)
    for axis in (fig.axes[0].yaxis, *(ax.xaxis for ax in fig.axes)):
        low, high = sorted(axis.get_view_interval())
        labels = [t for x, t in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True) if low <= x <= high]
        boxes = [t.get_window_extent() for t in labels]
        assert len(boxes) >= 3 or axis.axes not in fig.axes[:7]  # the colour bar's x axis has none
        assert not [1 for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert fig.get_supxlabel() == (
        "cpu: 2 cores | jax 0.10.2, torch 2.13.0, numpy 2.4.1 | git abc123 | 3 integer taps equal"
    )
    names = [t.get_text() for t in fig.axes[0].get_yticklabels()]
    assert names[4] == "\N{BLACK RIGHT-POINTING TRIANGLE} layers.0.attn" and len(names) == 33
    assert fig.get_suptitle() == "mixed-tiny: jax against torch.eager, bfloat16: wrong maths at layers.0.attn"


def test_figure_names_the_verdict_of_a_tap_without_a_dot():
    """Would catch: a coloured row for unequal ids whose meaning no legend gives."""
    rows = [integer("ids", verdict="not deterministic"), tap("a" * 50), summary()]
    ax = report_figure.draw(report.comparisons(rows)).axes[0]
    assert [(t.get_text(), t.get_position()[1]) for t in ax.texts] == [("not deterministic", 0)]
    assert len(ax.get_yticklabels()[1].get_text()) == 40


def test_figure_shows_what_is_not_finite(tmp_path):
    """Would catch: an infinite error that no axis shows, a $ in a name read as a formula."""
    rows = [
        tap("a_$x^$", rho=math.inf, verdict="wrong maths"),
        tap("b", rho=math.nan),
        tap("c", rho=0, e2e=0),
        failing()[-1],
    ]
    rows[-1]["error_map"]["values"][0][0] = None
    rows[-1]["error_map"]["values"][1][0] = math.inf
    report.figure(rows, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    fig = report_figure.draw(report.comparisons(rows))
    markers = [(line.get_marker(), line.get_ydata()[0]) for line in fig.axes[0].lines if line.get_marker() in "<>oX"]
    assert markers == [(">", 0), ("<", 2)]
    assert any(ax.get_ylabel() == "RMS error (red: not finite)" for ax in fig.axes)


class Page(HTMLParser):
    """Tags with their attributes, and the text outside script and style."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.text, self.inside = [], "", None
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        self.text += "" if self.inside else data

    def all(self, tag):
        return [attrs for t, attrs in self.tags if t == tag]


EVIL = "\"'><img src=x onerror=alert(1)><script>alert(1)</script>{{rows}}"


def test_html_escapes_every_string(tmp_path):
    """Would catch: a tap, path or version from a file that the browser runs, by a tag or out of an attribute."""
    good = failing()
    bad = [
        row | {key: EVIL for key, value in row.items() if isinstance(value, str) and key not in ("kind", "value_kind")}
        for row in good
    ]
    bad[-1] |= {
        "versions": {EVIL: EVIL},
        "tiers": {EVIL: EVIL},
        "attribution": [EVIL],
        "hypothesis": EVIL,
        "replay": EVIL,
    }
    bad[-1]["error_map"] |= dict.fromkeys(("tap", "rows", "columns", "unit"), EVIL)
    bad = [row | {"tap": f"{i}{EVIL}"} if row["kind"] == "tap" else row for i, row in enumerate(bad)]
    bad[-1]["first_divergence"] = f"7{EVIL}"
    report.html(bad, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert page.text.count(EVIL) > 30
    harmless = Page(report_html.page(report.comparisons(good)))
    assert {t for t, _ in page.tags} == {t for t, _ in harmless.tags}


def test_html_policy_admits_its_own_script_only():
    """Would catch: an edit of the script that the page's own policy then blocks, anything loaded from elsewhere."""
    source = report_html.page(report.comparisons(failing()))
    script = source.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [m["content"] for m in Page(source).all("meta") if "http-equiv" in m]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source.replace(script, ""))
    assert len(script.splitlines()) + source.split("</style>")[0].count("\n") < 200
    assert "{{" not in source


def test_html_puts_the_first_divergence_on_top():
    """Would catch: a failing comparison listed after passing ones, a link to a row that is not there."""
    source = report_html.page(report.comparisons(passing(case="fine") + failing()))
    page = Page(source)
    at = [
        source.index(s)
        for s in ("<article>", "first divergence: ", "93% of the squared", REPLAY, "fine: jax", "<tbody>")
    ]
    assert at == sorted(at)
    assert page.all("a") == [{"href": "#c1-first"}]
    assert [(r["id"], r["data-verdict"]) for r in page.all("tr") if "id" in r] == [("c1-first", "wrong maths")]
    assert "1 of 2 comparisons ok, 24 taps" in page.text and "a mask: the last query token" in page.text
    assert "45.3 [0.88,1.16]" in page.text
    assert len([r for r in page.all("tr") if "data-case" in r]) == 24


def test_html_bars_are_on_a_log_scale():
    """Would catch: a linear bar, one that is cut off, a value within its band drawn as outside."""
    bar = report_html._bar(tap("a", rho=2.0, band_local=[0.5, 1.0]), "local", (0.25, 4.0))
    shapes = [(r["class"], float(r["x"]), float(r["width"])) for r in Page(bar).all("rect")]
    assert shapes == [("band", 25, 25), ("outside", 50, 25), ("outside", 75, 0.8)]
    assert 'class="inside"' in report_html._bar(tap("a"), "local", (0.25, 4.0))
    assert 'x="0.00"' in report_html._bar(tap("a", rho=0), "local", (0.25, 4.0))
    assert report_html._bar(integer("ids"), "local", (0.25, 4.0)) == ""


def test_html_heat_map_finds_the_largest_cell():
    """Would catch: rows taken for columns, a single bad cell averaged away in a large map, blank cells unmentioned."""
    values = np.ones((200, 3))
    values[131, 2] = 7
    m = {"tap": "t", "rows": "token", "columns": "head", "values": values.tolist()}
    m["values"][0][0] = None
    page = Page(report_html._heat_map(m))
    assert "1.00 (dark) to 7.00 (bright), which is at token 131, head 2." in page.text
    assert "One cell is the largest of 4 x 1. Blank: 1 without a finite value." in page.text
    cells = page.all("rect")
    assert len(cells) == 150 and [c["fill"] for c in cells].count("#fee838") == 1
    assert "token 128, head 2: 7.00" in page.text


@pytest.mark.parametrize(
    "rows", [[{"kind": "tap"}], [{"kind": "summary"}], [{"kind": "summary", "case": "x", "ok": False}]]
)
def test_reports_need_no_field(rows, tmp_path):
    """Would catch: a report that dies on a comparison that died, which is when it is wanted."""
    said = report.verdict(report.comparisons(rows)[0])
    assert said in ("not judged", "failed")
    assert said in printed(rows).lower() and said in report.markdown(rows)
    report.html(rows, tmp_path / "r.html")
    report.figure(rows, tmp_path / "r.png")
    assert said in (tmp_path / "r.html").read_text() and (tmp_path / "r.png").stat().st_size > 1000
