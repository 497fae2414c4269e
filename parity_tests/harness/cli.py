"""`python -m parity_tests`: judge, replay, narrow down and shrink comparisons of the two implementations.

Exit codes: 0 pass, 1 wrong maths (or not deterministic, or taps perturb), 4 rounding policy differs, 2 bad usage or input,
125 cannot run, so that `git bisect run python -m parity_tests replay FILE` skips what cannot be judged.
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_dflash.cli import run_app
from jax_dflash.config import InputError
from parity_tests.harness.case import Case, CaseError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

PASS, WRONG_MATHS, BAD_INPUT, ROUNDING_DIFFERS, CANNOT_RUN = 0, 1, 2, 4, 125
Ref = Annotated[str, typer.Option(help="Reference implementation.")]
Sut = Annotated[str, typer.Option(help="Implementation under test.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32; semantics are always judged in float64 too.")]
Device = Annotated[str, typer.Option(help="cpu or gpu.")]
SavedDevice = Annotated[str | None, typer.Option(help="cpu or gpu; default: where the case was judged.")]
Level = Annotated[int, typer.Option(min=1, max=2, help="1: taps between blocks, 2: inside them too.")]
AllowRounding = Annotated[bool, typer.Option("--allow-rounding", help="Exit 0 where only the rounding policy differs.")]
Save = Annotated[Path, typer.Option(help="Folder for failing cases.")]
Results = Annotated[Path | None, typer.Option(help="Append the rows of every tap to this JSONL file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON line only.")]
Plant = Annotated[str | None, typer.Option(help="Plant this bug first (see `mutate`), to see what the harness says.")]
CaseFile = Annotated[str, typer.Argument(help="A case file, or the name of a standard case.")]


def prepare(device: str, dtype: str, *names: str, out: Path | None = None) -> None:
    """Check what a verb was given and tell the frameworks where to run, before their first array. Small cases want one
    thread and the same sums. Raises InputError."""
    from parity_tests.harness.runners import RUNNERS

    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"--dtype {dtype!r}: pass bfloat16 or float32")
    for name in names:
        if name not in RUNNERS:
            raise InputError(f"implementation {name!r} is unknown; pass one of {', '.join(RUNNERS)}")
    check_folder(out)
    from jax_dflash.cli import select_device

    select_device(device)
    import torch

    torch.set_num_threads(1)


def check_folder(*paths: Path | None) -> None:
    """Refuse a file that cannot be written before anything long begins."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError(f"{path}: expected a file in a folder that exists")


def find_case(name: str) -> Case:
    """A standard case, or one from a file. Raises InputError, CaseError."""
    from parity_tests.harness import case as case_files
    from parity_tests.harness import standard

    if name in standard.CASES:
        return standard.CASES[name]()
    if not Path(name).exists():
        raise InputError(f"{name}: no such file and no standard case ({', '.join(standard.CASES)})")
    return case_files.load(name)


def planted(stack: ExitStack, name: str | None, sut: str) -> None:
    """Plant a bug in this process and in the float64 one."""
    if name is None:
        return
    from parity_tests.harness import mutations, runners

    try:
        stack.enter_context(mutations.planted(name, sut.partition(".")[0]))
    except ValueError as error:
        raise InputError(str(error)) from None
    if sut.startswith("jax"):
        runners.float64_worker().plant = name


def progress():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


def exit_code(verdict: str, allow_rounding: bool) -> int:
    from parity_tests.harness import verdict as v

    if verdict == v.OK or (verdict == v.ROUNDING and allow_rounding):
        return PASS
    return ROUNDING_DIFFERS if verdict == v.ROUNDING else WRONG_MATHS


def finish(document: dict[str, Any], code: int) -> None:
    """The last line, for machines."""
    print(json.dumps(document))
    raise typer.Exit(code)


def report_result(result, rows: list[dict], as_json: bool, results: Path | None, full: bool = True) -> None:
    """Print a comparison for people, whole or in one line, and append it for machines."""
    if results is not None:
        with results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if not as_json:
        from rich.console import Console

        from parity_tests.harness import report

        console = Console(stderr=True)
        if full:
            report.terminal(rows, console)
        else:
            fp64 = max(row.get("fp64") or 0.0 for row in result.rows)
            ratios = [row["rho_local"] for row in result.rows if row.get("rho_local") is not None]
            rho = f", largest local rho {max(ratios):.2f}" if ratios else ""
            tokens = "{equal} of {compared} drafts equal, {undecidable} undecidable".format(**result.tokens)
            for note in result.notes:
                console.print(f"{result.case.name}: {note}", highlight=False, soft_wrap=True)
            taps = f"{len(rows) - 1} taps, float64 {fp64:.0e}{rho}"
            console.print(f"{result.case.name}: {result.verdict}; {taps}; {tokens}", highlight=False, soft_wrap=True)


def replay_line(path: Path | str, plant: str | None) -> str:
    return f"python -m parity_tests replay {path}" + (f" --plant {plant}" if plant else "")


def judge_cases(cases: list[Case], ref: str, sut: str, dtype: str, device: str, level: int, advance) -> list:
    from parity_tests.harness import verdict

    found = []
    for case in cases:
        advance(f"{case.name}: {sut} against {ref}")
        found.append(verdict.compare(case, ref, sut, dtype, device=device, level=level))
    return found


def tier_summary(results: list) -> dict[str, str]:
    """Tiers 1 to 4 of comparisons that were made tap by tap."""
    from parity_tests.harness import verdict as v

    rows = [row for result in results for row in result.rows if row["value_kind"] in ("float", "pool")]
    unjudged = any(r.verdict in (v.NOT_DETERMINISTIC, v.PERTURBED) or not r.tokens for r in results)

    def outside(row: dict, which: str) -> bool:
        band = row.get(f"band_{which}")
        return bool(band) and (row[f"rho_{which}"] is None or row[f"rho_{which}"] > band[1])

    failed = {
        "1": any(row.get("fp64", 0) > v.FP64_LIMIT for row in rows) or any(r.verdict == v.WRONG for r in results),
        "2": unjudged or any(row["verdict"] in (v.ROUNDING, v.WRONG) and not outside(row, "e2e") for row in rows),
        "3": unjudged or any(outside(row, "e2e") for row in rows if row.get("roundings") is not None),
        "4": unjudged or any(r.tokens.get("decided_unequal") for r in results),
    }
    return {tier: "fail" if bad else "pass" for tier, bad in failed.items()}


def identities(cases: list[Case], device: str, advance) -> dict[str, list[str]]:
    """Tiers 0, 1b, 5 and 6 as lines of faults."""
    from parity_tests.harness import standard, tiers

    mixed = standard.mixed()
    faults: dict[str, list[str]] = {"0": [], "1b": [], "5": [], "6": []}
    advance("packing of every tensor")
    faults["0"] = [line for case in cases for line in tiers.weights(case)]
    for sut in ("jax", "torch.eager", "torch.sdpa"):
        advance(f"exact arithmetic: {sut}")
        faults["1b"] += tiers.exact_arithmetic(sut, device)
    for sut in ("jax", "torch.eager"):
        advance(f"identities: {sut}")
        faults["5"] += (
            tiers.batch_mates(mixed, sut, "bfloat16", device) + tiers.other_bucket(mixed, sut) + tiers.in_steps(sut)
        )
    advance("identities: compiled, jit, op by op")
    faults["5"] += tiers.ahead_of_time(mixed, "bfloat16") + tiers.op_by_op(mixed)
    advance("compilations after capture")
    faults["6"] = tiers.compiles()
    return faults


@app.command()
def run(
    ref: Ref = "torch.eager",
    sut: Sut = "jax",
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    level: Level = 2,
    case: Annotated[
        list[str] | None, typer.Option(help="A standard case, or a file; default all standard cases.")
    ] = None,
    save: Save = Path("failures"),
    results: Results = None,
    allow_rounding: AllowRounding = False,
    plant: Plant = None,
    as_json: Json = False,
) -> None:
    """All tiers: do the two implementations compute the same function, and round alike? With --case or --plant the tiers
    that are judged tap by tap, 1 to 4; so with torch.graph, on the steps that one graph takes."""
    prepare(device, dtype, ref, sut, out=results)
    from parity_tests.harness import mutate as job
    from parity_tests.harness import results as kept
    from parity_tests.harness import runners, standard

    start = time.perf_counter()
    chosen = [find_case(name) for name in case or standard.CASES]
    if not case and "torch.graph" in (ref, sut):
        chosen = [step for step in chosen if runners.fits_a_graph(step)]
    whole = not case and not plant and "torch.graph" not in (ref, sut)
    with ExitStack() as stack:
        planted(stack, plant, sut)
        bar = stack.enter_context(progress())
        task = bar.add_task("", total=len(chosen) + (8 + job.steps(["torch"]) if whole else 0))

        def advance(what: str) -> None:
            bar.update(task, description=what[:40].ljust(40))
            bar.advance(task)

        found = judge_cases(chosen, ref, sut, dtype, device, level, advance)
        faults = identities(chosen, device, advance) if whole else {}
        if whole:
            missed = job.document(job.mutate(["torch"], None, advance))["missed"]
            faults["7"] = [f"planted bug missed, or found where there is none: {name}" for name in missed]
    tiers = tier_summary(found) | {tier: "fail" if lines else "pass" for tier, lines in faults.items()}
    tiers = dict(sorted(tiers.items()))
    for result in found:
        path = None if result.ok else kept.keep(result, save, device)
        line = replay_line(path, plant) if path else None
        rows = kept.rows(result, device=device, tiers=tiers, replay=line)
        report_result(result, rows, as_json, results, full=len(found) == 1 or not result.ok)
    for lines in faults.values():
        for line in lines:
            print(f"FAULT: {line}", file=sys.stderr)
    first = next((r for r in found if not r.ok), None)
    code = max((exit_code(r.verdict, allow_rounding) for r in found), key=[PASS, ROUNDING_DIFFERS, WRONG_MATHS].index)
    code = WRONG_MATHS if any(faults.values()) else code
    finish(
        {
            "job": "parity", "ok": code == PASS, "tiers": tiers, "cases": [c.name for c in chosen], "ref": ref, "sut": sut,
            "dtype": dtype, "device": device, "taps": sum(len(r.rows) for r in found),
            "first_divergence": first and first.first_divergence, "verdict": first.verdict if first else "ok",
            "worst_fp64": max((row.get("fp64") or 0.0) for r in found for row in r.rows),
            "tokens": {k: sum(r.tokens.get(k, 0) for r in found) for k in ("compared", "equal", "undecidable")},
            "faults": sum(faults.values(), []), "seconds": round(time.perf_counter() - start, 1),
        },
        code,
    )  # fmt: skip


DEFAULTS = {"ref": "torch.eager", "sut": "jax", "dtype": "bfloat16", "device": "cpu"}


def choices(case: Case, *given: str | None) -> list[str]:
    """For each of DEFAULTS an option of the command line, else what the case was judged with, else the default."""
    given = given or (None,) * len(DEFAULTS)
    return [
        value or case.meta.get(name) or default for (name, default), value in zip(DEFAULTS.items(), given, strict=True)
    ]


@app.command()
def replay(
    file: CaseFile,
    ref: Annotated[str | None, typer.Option(help="Default: as the case was judged.")] = None,
    sut: Annotated[str | None, typer.Option(help="Default: as the case was judged.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: as the case was judged.")] = None,
    device: SavedDevice = None,
    tap: Annotated[
        str | None, typer.Option(help="Say where the error of this tap sits, whatever diverges first.")
    ] = None,
    results: Results = None,
    allow_rounding: AllowRounding = False,
    plant: Plant = None,
    as_json: Json = False,
) -> None:
    """Judge a saved case again, from the file alone."""
    case = find_case(file)
    check_tap(case, tap)
    ref, sut, dtype, device = choices(case, ref, sut, dtype, device)
    prepare(device, dtype, ref, sut, out=results)
    from parity_tests.harness import results as kept
    from parity_tests.harness import verdict

    with ExitStack() as stack:
        planted(stack, plant, sut)
        result = verdict.compare(case, ref, sut, dtype, device=device)
    line = None if result.ok else replay_line(file, plant)
    report_result(result, kept.rows(result, device=device, tiers=tier_summary([result]), replay=line), as_json, results)
    where = attribution_of(result, tap) if tap else result.attribution
    if tap and where and not as_json:
        print(f"{tap}: " + "; ".join(where.lines), file=sys.stderr)
    finish(
        {
            "job": "replay", "ok": result.ok, "verdict": result.verdict, "first_divergence": result.first_divergence,
            "attribution": where.lines if where else [], "hypothesis": where.hypothesis if where else None,
            "was": {k: case.meta.get(k) for k in ("verdict", "tap")}, "ref": ref, "sut": sut, "dtype": dtype,
        },
        exit_code(result.verdict, allow_rounding),
    )  # fmt: skip


def check_tap(case: Case, tap: str | None) -> None:
    from jax_dflash.taps import tap_table

    names = [t.name for t in tap_table(case.num_layers)]
    if tap is not None and tap not in names:
        raise InputError(f"--tap {tap}: no such tap; the case has {', '.join(names[:4])}, ..., {names[-1]}")


def attribution_of(result, name: str):
    """Where the working dtype's error of one tap sits, teacher-forced; None if it has none."""
    import numpy as np

    from jax_dflash.taps import live_part, tap_table
    from parity_tests.harness.attribution import attribute

    tap = next(t for t in tap_table(result.case.num_layers) if t.name == name)
    if name not in result.traces.get("local", {}):
        return None
    ours, exact = (
        live_part(tap, result.traces[k][name], result.case.live_reqs, result.case.live_rows)
        for k in ("local", "local_exact")
    )
    return None if np.array_equal(ours, exact, equal_nan=True) else attribute(tap, ours, exact)


@app.command()
def bisect(
    file: CaseFile,
    device: SavedDevice = None,
    plant: Plant = None,
    as_json: Json = False,
    allow_rounding: AllowRounding = False,
) -> None:
    """The first diverging block, then the first diverging value inside it; by truncation where taps change the program."""
    case = find_case(file)
    ref, sut, dtype, device = choices(case, None, None, None, device)
    prepare(device, dtype, ref, sut)
    from jax_dflash.taps import tap_table
    from parity_tests.harness import results as kept
    from parity_tests.harness import shrink, verdict

    with ExitStack() as stack:
        planted(stack, plant, sut)
        result = verdict.compare(case, ref, sut, dtype, device=device)
        depth = None
        if result.verdict == verdict.PERTURBED:
            for depth in range(1, case.num_layers + 1):
                if not verdict.compare(shrink.drop_layers(case, depth), ref, sut, dtype, device=device).ok:
                    break
    table = list(tap_table(case.num_layers))
    first = next((i for i, tap in enumerate(table) if tap.name == result.first_divergence), len(table))
    block = next((tap.name for tap in table[first:] if tap.level == 1), None)
    line = None if result.ok else replay_line(file, plant)
    report_result(result, kept.rows(result, device=device, tiers=tier_summary([result]), replay=line), as_json, None)
    finish(
        {
            "job": "bisect", "ok": result.ok, "verdict": result.verdict, "block": block,
            "first_divergence": result.first_divergence, "layers_needed": depth,
            "attribution": result.attribution.lines if result.attribution else [],
            "hypothesis": result.attribution.hypothesis if result.attribution else None,
        },
        exit_code(result.verdict, allow_rounding),
    )  # fmt: skip


@app.command("shrink")
def shrink_verb(
    file: CaseFile,
    device: SavedDevice = None,
    out: Annotated[Path | None, typer.Option(help="The smaller case; default FILE.small.safetensors.")] = None,
    plant: Plant = None,
    as_json: Json = False,
) -> None:
    """A smaller case with the same verdict at the same tap, and the largest one that passes beside it."""
    case = find_case(file)
    ref, sut, dtype, device = choices(case, None, None, None, device)
    out = out or Path(file).with_suffix(".small.safetensors")
    if out.exists():
        raise InputError(f"{out}: there is a file already; pass another --out")
    prepare(device, dtype, ref, sut, out=out)
    from parity_tests.harness import case as case_files
    from parity_tests.harness import results as kept
    from parity_tests.harness import shrink, verdict

    def judge(candidate: Case):
        return verdict.compare(candidate, ref, sut, dtype, device=device, stop_early=True)

    with ExitStack() as stack:
        planted(stack, plant, sut)
        bar = stack.enter_context(progress())
        task = bar.add_task("shrinking", total=None)

        def advance(best: Case, tries: int) -> None:
            bar.update(task, completed=tries, description=f"{shrink.size(best):,} numbers".ljust(24))

        try:
            best, passing = shrink.shrink(case, judge, advance)
        except ValueError as error:
            raise InputError(str(error)) from None
    case_files.save(kept.judged(best, device), out)
    if passing is not None:
        case_files.save(passing.case, out.with_suffix(".passes.safetensors"))
    if not as_json:
        print(f"replay: {replay_line(out, plant)}", file=sys.stderr)
    finish(
        {
            "job": "shrink", "ok": True, "file": str(out), "bytes": out.stat().st_size, "numbers": shrink.size(best.case),
            "was": shrink.size(case), "verdict": best.verdict, "first_divergence": best.first_divergence,
        },
        PASS,
    )  # fmt: skip


@app.command("null")
def null_verb(
    file: CaseFile, ref: Ref = "torch.eager", dtype: Dtype = "bfloat16", device: Device = "cpu", as_json: Json = False
) -> None:
    """The reference against itself under exact symmetries: what its error does when only the order of sums changes."""
    case = find_case(file)
    prepare(device, dtype, ref)
    from parity_tests.harness import null

    found = null.Reference(case, ref, dtype, device).bands
    if not as_json:
        from rich.console import Console
        from rich.table import Table

        table = Table(
            "tap", "local", "end to end", box=None, title=f"null bands of {ref}, {dtype}", title_justify="left"
        )
        for name, pair in found.items():
            table.add_row(name, *(f"{b.low:.3f} to {b.high:.3f}" for b in pair))
        Console(stderr=True).print(table)
    bands = {name: {"local": [a.low, a.high], "e2e": [b.low, b.high]} for name, (a, b) in found.items()}
    finish(
        {"job": "null", "ok": True, "ref": ref, "dtype": dtype, "symmetries": null.NUM_SYMMETRIES, "bands": bands}, PASS
    )


@app.command()
def mutate(
    sut: Annotated[str, typer.Option(help="jax, torch, or both.")] = "both",
    only: Annotated[list[str] | None, typer.Option(help="Plant these bugs only.")] = None,
    as_json: Json = False,
) -> None:
    """Plant known bugs one at a time: is each caught, at the right tap, and nothing else?"""
    if sut not in ("jax", "torch", "both"):
        raise InputError(f"--sut {sut!r}: pass jax, torch or both")
    prepare("cpu", "bfloat16")
    from parity_tests.harness import mutate as job
    from parity_tests.harness.mutations import MUTATIONS

    for name in only or ():
        if name not in MUTATIONS:
            raise InputError(f"--only {name}: no such bug; pass one of {', '.join(MUTATIONS)}")
    frameworks = ("jax", "torch") if sut == "both" else (sut,)
    with progress() as bar:
        task = bar.add_task("", total=job.steps(frameworks, only))

        def advance(what: str) -> None:
            bar.update(task, description=what[:40].ljust(40))
            bar.advance(task)

        found = job.mutate(frameworks, only, advance)
    if not as_json:
        from rich.console import Console

        Console(stderr=True).print(job.table(found))
    document = job.document(found)
    finish(document, PASS if document["ok"] else WRONG_MATHS)


@app.command("report")
def report_verb(
    file: Annotated[Path, typer.Argument(help="A results JSONL, as `run --results` writes it.")],
    html: Annotated[Path | None, typer.Option(help="One self-contained page.")] = None,
    png: Annotated[Path | None, typer.Option(help="One picture.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="For a pull request.")] = None,
) -> None:
    """Print a results file, and draw it as a page, a picture or Markdown."""
    from rich.console import Console

    from parity_tests.harness import report

    if not file.is_file():
        raise InputError(f"{file}: no such results file")
    check_folder(html, png, markdown)
    try:
        rows = report.load(file)
    except ValueError as error:
        raise InputError(str(error)) from None
    report.terminal(rows, Console(stderr=True))
    written = {}
    for name, path, write in (("html", html, report.html), ("png", png, report.figure)):
        if path is not None:
            write(rows, path)
            written[name] = str(path)
    if markdown is not None:
        markdown.write_text(report.markdown(rows))
        written["markdown"] = str(markdown)
    finish({"job": "report", "ok": True, "rows": len(rows), "written": written}, PASS)


def main() -> None:
    """Run a verb; what cannot be used or run ends in one line."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        sys.exit(run_app(app))
    except (InputError, CaseError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except Exception as error:  # noqa: BLE001 - git bisect must skip whatever the harness itself trips over
        if os.environ.get("PARITY_TRACEBACK"):
            raise
        print(f"cannot run: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
