"""`headgate simulate`: the protocol under every fault that a seed can think of."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Annotated, Any, Literal

import typer

import headgate as hg
from headgate.cli.options import AsJson
from headgate.cli.output import print_json, print_table, screen


def simulate(
    schedules: Annotated[int, typer.Option("--schedules", min=1, help="How many.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which ones: another seed, other schedules.")] = 0,
    faults: Annotated[
        str | None, typer.Option("--faults", metavar="NAME,…", show_default=False, help="Only these kinds of fault. By default all.")
    ] = None,
    scene: Annotated[str | None, typer.Option("--scene", show_default=False, help="Only this plot. By default as the seed says.")] = None,
    mode: Annotated[
        Literal["all", "wal", "memtable", "life", "family"],
        typer.Option(
            "--mode", help="The log alone; rows in memory, in runs, and read; loads, compaction, checkpoints; or splits and clones."
        ),
    ] = "all",
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=64, help="Processes.")] = os.cpu_count() or 1,
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="SCHEDULE", min=0, show_default=False, help="Play one schedule again; show all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run writers, takeovers, readers, loads and collection on a simulated store, and check that nothing is lost or misread."""
    try:
        from headgate.simulation import family_plots, life_plots, plots, run, scenes, shrink, world
    except ImportError:
        raise hg.InvalidInputError("the simulation needs greenlet", hint="pip install 'headgate[simulation]'") from None
    known = [field.name for field in fields(world.Faults)]
    wanted = None if faults is None else frozenset(name.strip() for name in faults.split(",") if name.strip())
    if wanted is not None and not wanted <= set(known):
        raise typer.BadParameter(f"{', '.join(sorted(wanted - set(known)))}; known are {', '.join(known)}", param_hint="--faults")
    plays = [*scenes.SCENES, *plots.PLOTS, *life_plots.LIFE_PLOTS, *family_plots.FAMILY_PLOTS]
    if scene is not None and scene not in plays:
        raise typer.BadParameter(f"{scene}; known are {', '.join(plays)}", param_hint="--scene")
    out = screen()
    if replay is not None:
        outcome = run.run_schedule(replay, faults=wanted, scene=scene, trace=True, mode=mode)
        if as_json:
            print_json({"schedule": replay, "problems": outcome.problems, "faults": dict(outcome.struck), "trace": outcome.trace})
        else:
            out.print("\n".join([*outcome.trace, *(outcome.problems or ["no violation"])]))
        raise typer.Exit(0 if outcome.ok else 1)

    def tell(report: Any) -> None:
        if not as_json and out.is_terminal:
            out.print(f"{report.schedules:,} of {schedules:,} schedules, {report.seconds:.0f} s", end="\r")

    report = run.simulate(schedules, seed, faults=wanted, scene=scene, jobs=jobs, tell=tell, mode=mode)
    smallest = shrink.shrink(report.failures[0], scene=scene) if report.failures else None
    if as_json:
        document: dict[str, Any] = {
            "schedules": report.schedules,
            "seconds": round(report.seconds, 1),
            "steps": report.steps,
            "acknowledged": report.acknowledged,
            "reads": report.reads,
            "loads": report.loads,
            "splits": report.splits,
            "clones": report.clones,
            "faults": dict(sorted(report.struck.items())),
            "violations": [{"schedule": failure.seed, "problems": failure.problems} for failure in report.failures],
        }
        if smallest is not None:
            document["trace"] = shrink.readable(smallest.trace)
        print_json(document)
    else:
        counts = (
            f"{report.steps:,} steps, {report.acknowledged:,} puts acknowledged, {report.loads:,} loads, {report.reads:,} reads compared"
        )
        counts += f", {report.splits:,} splits, {report.clones:,} clones" if report.splits or report.clones else ""
        out.print(f"{report.schedules:,} schedules, {counts}, {report.seconds:.1f} s")
        struck = [[name, f"{count:,}"] for name, count in sorted(report.struck.items())]
        print_table(["fault", "struck"], struck, right=frozenset({"struck"}))
        if smallest is None:
            out.print("no violation")
        else:
            failure = report.failures[0]
            out.print(f"violation in schedule {failure.seed}: {failure.problems[0]}")
            out.print(f"a smaller schedule that violates it, {smallest.seed}: {smallest.problems[0] if smallest.problems else ''}")
            out.print("\n".join(shrink.readable(smallest.trace)))
    raise typer.Exit(1 if report.failures else 0)
