"""The `steptime` command. Imports are inside the commands, so that `steptime --help` is immediate."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from steptime.core.errors import InputError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="steptime")
def cli() -> None:
    """What does one training step cost, in which framework, on which machine, on how many of them, and why?"""


def main() -> None:
    """Run the command; bad input is one line and exit status 2, an interruption one line and 130."""
    try:
        status = cli(standalone_mode=False)
        sys.stdout.flush()
    except InputError as error:
        status = _say(str(error), 2)
    except ModuleNotFoundError as error:
        status = _say(f"package {error.name!r} is missing from this environment; mend it: make env", 2)
    except click.ClickException as error:
        status = _say(error.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        status = _say("interrupted", 130)
    except BrokenPipeError:
        # The reader has gone (`steptime ... | head`); Python's own flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        status = _say(f"{error.filename or 'a file'}: {error.strerror or error}; choose another place or free it", 2)
    sys.exit(status)


def _say(message: str, status: int) -> int:
    click.echo(f"steptime: {message}", err=True)
    return status


def _root() -> Path:
    from steptime.core.files import project_root

    return project_root()


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str], None]]:
    """A function that shows a line of progress: on a terminal as a bar ("round 2/5 run 3/17"), else in a log."""
    if not sys.stderr.isatty():
        yield lambda line: click.echo(f"{name}: {line}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn(name), BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
    # Redrawn once a second only: whatever runs beside a measurement can disturb it.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=1) as bar:
        task = bar.add_task("", total=None)

        def show(line: str) -> None:
            bar.update(task, description=line)
            done, total = 0, 1
            for number, of in re.findall(r"(\d+)/(\d+)", line):
                done, total = done * int(of) + int(number) - 1, total * int(of)
            if total > 1:
                bar.update(task, completed=done + 1, total=total)

        yield show


# -------------------------------------------------------------------------------------------------- the pipeline's


@cli.command()
@click.argument("name")
def run(name: str) -> None:
    """Run the notebook NAME of the pipeline with its parameters from params.yaml."""
    from steptime import notebook

    root = _root()
    _check_installation(root)
    try:
        with _progress(name) as log:
            notebook.run(root, name, log)
    except notebook.NotebookFailed as error:
        sys.exit(_say(str(error), 1))


def _check_installation(root: Path) -> None:
    """DVC hashes the checkout's code, so the checkout's code must be what runs."""
    here = Path(__file__).resolve().parent
    if here != root / "lib/steptime":
        raise InputError(
            f"run: steptime is installed from {here}, not from {root}; activate this checkout's environment"
        )


@cli.command()
def fingerprint() -> None:
    """Write this machine's fingerprints, which decide whether the pipeline measures again.

    The pipeline's first stage: params.yaml is checked here, because DVC deletes a stage's outs before it runs.
    """
    from steptime.measure import write_fingerprints
    from steptime.notebook import check_parameters

    root = _root()
    check_parameters(root)
    write_fingerprints(root / "data/raw/fingerprint")


@cli.command()
def site() -> None:
    """Build the report's pages, and README's figure and table, from what the notebooks wrote."""
    from steptime.report.readme import update_readme
    from steptime.report.site import build_site

    root = _root()
    build_site(root)
    update_readme(root)


# -------------------------------------------------------------------------------------------- measure and predict


@cli.command()
@click.option("--framework", "frameworks", multiple=True, help="Framework to measure; may be repeated.")
@click.option("--network", "networks", multiple=True, help="Network to train; may be repeated.")
@click.option("--size", help="quick or full: the size of the networks and which section of params.yaml is the default.")
@click.option("--batch", type=int, multiple=True, help="Batch for every network; may be repeated.")
@click.option("--threads", type=int, multiple=True, help="Threads of a framework; may be repeated.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    help="sequential, prefetch, jpeg-0, jpeg-1 or jpeg-2; may be repeated. With --torch: the shape of one sample, "
    "e.g. 3,224,224, or 128:1000 for whole numbers below 1000; one for each argument.",
)
@click.option("--dtype", "dtypes", multiple=True, help="float32 or bfloat16; may be repeated.")
@click.option("--device", "devices", multiple=True, help="cpu or cuda; may be repeated.")
@click.option("--rounds", type=int, help="Most fresh processes per case, at least 2.")
@click.option(
    "--budget",
    "budget_s",
    type=float,
    help="Seconds within which a third or later round must end; two are always measured.",
)
@click.option("--memory-limit", "memory_limit_gib", type=float, help="GiB of private memory for each process.")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), help="A campaign's plan.json, to measure it again."
)
@click.option("--torch", "module", help="A torch module of your own instead: my_module:make_model, or a file's.")
@click.option("--link", "link_name", help="With --torch: link of the prediction [10gbe].")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for runs.csv and samples.csv.")
@click.option("--fresh", is_flag=True, help="Discard the cases that an interrupted measurement finished.")
def measure(
    size: str | None,
    batch: tuple[int, ...],
    plan_file: Path | None,
    module: str | None,
    link_name: str | None,
    out: Path | None,
    fresh: bool,
    **chosen: Any,
) -> None:
    """Measure step times here; what is not given is as in params.yaml or in the plan.

    Interrupted, it goes on where it stopped. With --torch a module of your own is measured as it is, layer by layer,
    and its step on more workers predicted; it needs --input and --batch.
    """
    if module is not None:
        others = {"--size": size, "--plan": plan_file, **{f"--{name[:-1]}": chosen[name] for name in _NOT_A_MODULES}}
        _measure_module(module, batch, out, link_name or "10gbe", others | {"--fresh": fresh}, chosen)
        return
    if link_name is not None:
        raise InputError(f"measure: --link = {link_name!r}: only a module of your own is predicted here; give --torch")
    from steptime import measure as measuring
    from steptime.notebook import stage_parameters

    root = _root()
    if plan_file is None:
        values = stage_parameters(root, "measure", size)
    elif size is not None:
        raise InputError(f"measure: --size = {size!r}: is in the plan already; leave it out")
    else:
        values = measuring.read_plan_file(plan_file).model_dump(mode="json")
    given = {key: value for key, value in chosen.items() if value not in (None, ())}
    values |= {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    if batch:
        values["batch"] = {name: list(batch) for name in values["networks"]}
    plan = measuring.read_plan(values, "measure")
    out = _folder_for(out, root / "data/.scratch/measure")
    with _progress("measure") as log:
        campaign = measuring.measure(plan, out, out.with_name(f"{out.name}.partial"), fresh=fresh, report=log)
    statuses = campaign.runs["status"].value_counts().to_dict()
    counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    click.echo(_step_times(campaign).to_string(index=False))
    click.echo(f"{out}: {counts}; {len(campaign.samples)} samples")
    without = campaign.runs[campaign.runs["status"] != "finished"].drop_duplicates("case_id")
    for row in without.itertuples():
        click.echo(f"{row.case_id}: {row.status.replace('_', ' ')}: {row.reason}")
    if "finished" not in statuses:
        raise InputError(f"{out}: no run finished; the reasons are above and in runs.csv")


def _folder_for(out: Path | None, default: Path) -> Path:
    out = default if out is None else out
    if not out.name or (out.exists() and not out.is_dir()):
        raise InputError(f"measure: --out = {str(out)!r}: must name a folder, one that is there or a new one")
    return out


_NOT_A_MODULES = ("frameworks", "networks")


def _measure_module(
    module: str,
    batch: tuple[int, ...],
    out: Path | None,
    link_name: str,
    others: dict[str, Any],
    chosen: dict[str, Any],
) -> None:
    """`steptime measure --torch`: the module's campaign, its layers and its prediction, on the terminal and in OUT."""
    from steptime.core.machine import read_link
    from steptime.measure import measure_module, module_network
    from steptime.notebook import stage_parameters
    from steptime.report import own_network

    for option, value in others.items():
        if value:
            raise InputError(f"measure: {option}: says nothing of a module of your own; leave it out, or --torch")
    for option, values in {
        "--batch": batch,
        "--dtype": chosen["dtypes"],
        "--device": chosen["devices"],
        "--threads": chosen["threads"],
    }.items():
        if len(values) > 1 or (option == "--batch" and (not values or values[0] < 1)):
            raise InputError(f"measure: {option} = {list(values)}: with --torch it is one value, above 0 for a batch")
    root = _root()
    link = read_link(root / "data/machines/links", link_name)
    network = module_network(module, chosen.pop("inputs"), Path.cwd())
    defaults = stage_parameters(root, "measure", None)
    kept = ("rounds", "min_rounds", "warmups", "samples", "layer_samples", "phase_samples", "target_half_width",
            "budget_s", "seed", "threads")  # fmt: skip
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in chosen.items() if value}
    values = {key: defaults[key] for key in kept} | {"dtypes": ["float32"], "devices": ["cpu"]} | given
    values = {key: value for key, value in values.items() if key not in _NOT_A_MODULES}
    out = _folder_for(out, root / "data/.scratch/module")
    with _progress("measure") as log:
        campaign, found = measure_module(network, values | {"batch": batch[0]}, out, report=log)
    result = own_network.result(campaign, found.network, found.lines(), link)
    own_network.write(result, out)
    for line in own_network.lines(result):
        click.echo(line)
    click.echo(f"{out}: runs.csv, samples.csv, profile.csv, predictions.csv and the page index.html")


def _step_times(campaign: Any) -> Any:
    """A row a case: median step and its 95 % interval in ms, and what they rest on."""
    from steptime.core.statistics import case_table

    cases = case_table(campaign.joined())
    shown = {"step, ms": "median_s", "low": "lo_s", "high": "hi_s"}
    for name, column in shown.items():
        cases[name] = [f"{1e3 * value:.4g}" if value == value else "–" for value in cases[column]]
    return cases.rename(columns={"case_id": "case"})[["case", *shown, "processes"]]


@cli.command()
@click.argument("network")
@click.option("--framework", default="torch", show_default=True, help="Framework whose layer profile is taken.")
@click.option("--campaign", "name", help="Campaign to take it from [the one that has NETWORK in the most settings].")
@click.option("--link", "link_name", default="10gbe", show_default=True, help="Link of data/machines/links.")
@click.option(
    "--workers",
    type=click.IntRange(1, 1_000_000),
    multiple=True,
    default=(1, 2, 4, 8, 16),
    show_default=True,
    help="May be repeated.",
)
@click.option("--schedule", "schedules", multiple=True, help="end_of_backward, wait_free, merged; all by default.")
@click.option("--prefetch", is_flag=True, help="Read the next batch while computing this one.")
@click.option("--csv", "as_csv", is_flag=True, help="All columns as CSV, in seconds.")
def predict(
    network: str,
    framework: str,
    name: str | None,
    link_name: str,
    workers: tuple[int, ...],
    schedules: tuple[str, ...],
    prefetch: bool,
    as_csv: bool,
) -> None:
    """Predict the step time of NETWORK on many workers from its measured layer profile."""
    from steptime import networks
    from steptime.core.machine import read_link
    from steptime.core.statistics import estimate, usable
    from steptime.core.step import SCHEDULES, Schedule
    from steptime.model.fitting import find_case, layer_profile
    from steptime.model.step import predict_step, predict_table

    root = _root()
    networks.build(network)  # an unknown name is refused by what knows the names
    link = read_link(root / "data/machines/links", link_name)
    chosen = [Schedule(schedule, prefetch) for schedule in schedules or SCHEDULES]
    campaign, _, _ = _recorded("predict", name, network)
    name = campaign.name
    case_id = find_case(campaign, network, framework)
    (size,) = campaign.runs.loc[campaign.runs["case_id"] == case_id, "size"].unique()
    profile = layer_profile(campaign, networks.build(network, size=size), case_id)
    table = predict_table(profile, chosen, sorted(set(workers)), link)
    if as_csv:
        click.echo(table.to_csv(index=False, float_format="%.6g"), nl=False)
        return
    one = predict_step(profile, Schedule(prefetch=case_id.endswith("prefetch")), 1, link).step_s
    measured = estimate(usable(campaign.joined()).query("case_id == @case_id"))
    click.echo(
        f"{case_id} ({name}), {link.name}, modelled: weak scaling, {profile.batch} samples a worker; speed-up over one "
        f"worker.\nOne worker: {1e3 * one:.4g} ms modelled, {1e3 * measured.median_s:.4g} ms measured "
        f"({1e3 * measured.lo_s:.4g} to {1e3 * measured.hi_s:.4g}, 95 %): the model is "
        f"{one / measured.median_s - 1:+.0%} off."
        + ("\nThe quick network is a narrow version of the published one: its seconds are its own." * (size == "quick"))
    )
    shown = {
        "step, ms": table["step_s"] * 1e3,
        "not hidden, ms": table["t_c_no_s"] * 1e3,
        "speed-up": table["speed_up"],
    }
    text = table[["schedule", "workers"]].assign(**{key: value.map("{:.4g}".format) for key, value in shown.items()})
    click.echo(text.to_string(index=False))


@cli.command()
@click.argument("network")
@click.option("--framework", default="torch", show_default=True, help="Framework whose layer profile is taken.")
@click.option("--campaign", "name", help="Campaign to take it from [the one that has NETWORK in the most settings].")
@click.option("--link", "link_name", default="10gbe", show_default=True, help="Link of data/machines/links.")
@click.option("--workers", type=click.IntRange(1, 1_000_000), default=16, show_default=True)
@click.option("--schedule", default="wait_free", show_default=True, help="How gradients are aggregated.")
@click.option("--prefetch", is_flag=True, help="Read the next batch while computing this one.")
@click.option(
    "--late", type=(int, float), multiple=True, help="WORKER and the seconds by which it is late; repeatable."
)
@click.option("--slow-link", type=(int, float), multiple=True, help="WORKER, and how much slower it sends; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), help="File for the timeline, which opens in ui.perfetto.dev.")
def simulate(
    network: str,
    framework: str,
    name: str | None,
    link_name: str,
    workers: int,
    schedule: str,
    prefetch: bool,
    late: tuple[tuple[int, float], ...],
    slow_link: tuple[tuple[int, float], ...],
    out: Path | None,
) -> None:
    """Simulate a step of NETWORK on a ring of workers: its critical path, and the step without each resource."""
    from steptime import networks
    from steptime.core.machine import read_link
    from steptime.core.step import Schedule
    from steptime.model.fitting import find_case, layer_profile
    from steptime.model.schedules import Late, ring_graph
    from steptime.model.simulation_report import report_lines, slower_link
    from steptime.model.simulator import simulate as simulated
    from steptime.traces.perfetto import write_timeline

    networks.build(network)  # an unknown name is refused by what knows the names
    link = read_link(_root() / "data/machines/links", link_name)
    campaign, _, _ = _recorded("simulate", name, network)
    case_id = find_case(campaign, network, framework)
    (size,) = campaign.runs.loc[campaign.runs["case_id"] == case_id, "size"].unique()
    profile = layer_profile(campaign, networks.build(network, size=size), case_id)
    graph = ring_graph(
        profile,
        Schedule(schedule, prefetch),
        workers,
        link,
        late={worker: Late(delay_s=seconds) for worker, seconds in late},
        slow_links={worker: slower_link(link, factor) for worker, factor in slow_link},
    )
    found = simulated(graph)
    if out is not None:
        write_timeline(out, found.timeline())
    click.echo(f"{case_id} ({campaign.name}), {link.name}, {workers} workers, {schedule}; simulated")
    for line in report_lines(found):
        click.echo(line)
    if out is not None:
        click.echo(f"{out}: the timeline, for ui.perfetto.dev")


@cli.command()
@click.argument("network")
@click.option("--campaign", "name", help="Campaign to ask [the one that has NETWORK in the most settings].")
@click.option("--batch", type=int, help="Batch [the one that most settings ran].")
def choose(network: str, name: str | None, batch: int | None) -> None:
    """Which framework for NETWORK: the fastest setting, by how much, tied with which, and what limits it."""
    from steptime.core.parity import comparable
    from steptime.model import choosing

    campaign, folder, machine = _recorded("choose", name, network)
    campaign = comparable(campaign, folder)
    choice, best = choosing.choose(campaign, network, machine, batch)
    click.echo(f"{choosing.conditions_words(choice.conditions)}; campaign {campaign.name}, measured")
    for line in choosing.answer_lines(choice):
        click.echo(f"  {line}")
    click.echo(
        f"most samples a second: {best['setting']}, batch {best['batch']}, {best['device']}, "
        f"{best['threads']} thread{'s' if best['threads'] > 1 else ''}, {best['input']} input: "
        f"{best['samples_per_s']:.4g} ({best['batch'] / best['hi_s']:.4g} to {best['batch'] / best['lo_s']:.4g}, 95 %)"
    )


@cli.command()
@click.argument("network")
@click.option("--framework", default="torch", show_default=True, help="Setting whose memory is predicted.")
@click.option("--memory", "memory_gib", type=float, required=True, help="Memory that it must fit in, GiB.")
@click.option("--campaign", "name", help="Campaign to learn from [the one that has NETWORK in the most settings].")
@click.option("--size", default="quick", show_default=True, help="quick or full network.")
def fits(network: str, framework: str, memory_gib: float, name: str | None, size: str) -> None:
    """The largest batch of NETWORK whose training step fits, modelled from measured peaks of memory."""
    from steptime import networks
    from steptime.model import memory

    described = memory.described_bytes(networks.build(network, size=size))
    if not 0 < memory_gib < 1e6:
        raise InputError(f"fits: --memory = {memory_gib}: must be above 0 and below 1e6, in GiB")
    campaign, _, _ = _recorded("fits", name, network)
    fit, error, largest = memory.fit_setting(campaign, framework)
    batch = memory.largest_batch(fit, described, memory_gib * 2**30)
    one = fit.predict(described.at(1)) / 2**20
    told = "its network left out" if error is not None else "not tested: fewer than three networks"
    click.echo(
        f"{network} ({size}), {framework}, float32, {memory_gib:g} GiB; campaign {campaign.name}, modelled\n"
        f"  base {fit.base_bytes / 2**20:.0f} MiB, {fit.factor:.2f} bytes a described byte; one sample: {one:.0f} MiB"
    )
    if batch is None:
        click.echo("  the measured peaks do not grow with what is described: nothing can be said of the batch")
    else:
        click.echo(f"  largest batch: {batch}" + ("" if batch else ": not even one sample fits"))
    worst = "" if error is None else f"worst error of a measured peak {error:.1%}, "
    click.echo(f"  {worst}{told}; largest batch measured {largest}")


def _recorded(command: str, name: str | None, network: str) -> tuple[Any, Path, Any]:
    """A campaign, its folder, and its machine's peaks, or None.

    The one asked for, else the one that has the network in the most settings; this machine's own where that is equal.
    """
    from steptime.core.campaign import RUNS, campaign_folders, read_campaign, read_table
    from steptime.model.choosing import machine_of

    root = _root()
    folders = campaign_folders(root)
    if name is None:

        def breadth(name: str) -> tuple[int, int, bool]:
            runs = read_table(folders[name] / "runs.csv", RUNS).query("status == 'finished'")
            settings = runs.loc[runs["network"] == network, ["framework", "dtype"]].drop_duplicates()
            return len(settings), runs["network"].nunique(), name == "local"

        name = max(folders, key=breadth, default="local")
    if name not in folders:
        known = ", ".join(folders) or "none; measure with steptime run measure"
        raise InputError(f"{command}: --campaign = {name!r}: there is no such campaign; known: {known}")
    own = root / "data/raw/machine/machine.json" if name == "local" else None
    return read_campaign(folders[name]), folders[name], machine_of(folders[name], own)


def _tables(command: Callable[..., None]) -> Callable[..., None]:
    """The options of the commands that fit observed times and predict others."""
    file = click.Path(path_type=Path)
    for name, what in (("out", "to write"), ("at", "of the points to predict"), ("observed", "of observed times")):
        command = click.option(f"--{name}", type=file, required=True, help=f"CSV {what}.")(command)
    return command


def _fit_and_predict(kind: str, observed: Path, at: Path, out: Path) -> None:
    # One thread is several times faster on these many small systems; read by OpenBLAS when numpy is first imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from steptime.core.files import write_table
    from steptime.model import extrapolation, observations, platforms

    table, model = {
        "steps": (observations.STEPS, extrapolation.extrapolate),
        "collectives": (observations.COLLECTIVES, platforms.predict_collectives),
    }[kind]
    predicted = model(observations.read_observed(observed, table), observations.read_points(at, table))
    write_table(out, predicted)
    click.echo(f"{out}: {len(predicted)} points predicted (modelled), with 90 % intervals")


@cli.command()
@_tables
def extrapolate(observed: Path, at: Path, out: Path) -> None:
    """Predict step times at unmeasured numbers of workers from measured ones.

    Columns: group, workers, nodes, local_batch, step_time_s, step_time_std_s (may be empty); the points without times.
    """
    _fit_and_predict("steps", observed, at, out)


@cli.group()
def collectives() -> None:
    """Times of collectives."""


@collectives.command("run")
@click.option(
    "--operation",
    "operations",
    multiple=True,
    help="all_reduce, all_gather, reduce_scatter, all_to_all or broadcast; may be repeated [all_reduce].",
)
@click.option(
    "--bytes",
    "sizes",
    type=int,
    multiple=True,
    help="Bytes of a rank's whole buffer; may be repeated [1 KiB to 16 MiB].",
)
@click.option("--workers", type=int, multiple=True, help="May be repeated [2, 4].")
@click.option(
    "--rate", "rates", multiple=True, help="Rate of the links, e.g. 1gbit; may be repeated; needs root [loopback]."
)
@click.option("--library", type=click.Choice(["gloo", "mpi"]), default="gloo", show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True, help="Fresh ranks, in another order.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for collectives.csv, samples.csv and links.csv.",
)
def collectives_run(
    operations: tuple[str, ...],
    sizes: tuple[int, ...],
    workers: tuple[int, ...],
    rates: tuple[str, ...],
    library: str,
    rounds: int,
    out: Path,
) -> None:
    """Measure collectives here, over the loopback interface or over links of a given rate.

    OUT/collectives.csv has the columns that `collectives fit` reads; the group is operation, library and link.
    """
    from steptime.cluster.collectives import CollectivesPlan, run_collectives, write_collectives
    from steptime.cluster.launcher import RunFailed
    from steptime.cluster.links import rate_of
    from steptime.core.files import validated

    if library == "mpi":
        raise InputError(
            "collectives run: --library = 'mpi': mpi4py is not in the lock of this environment, only in Chainer's; "
            "take gloo"
        )
    given = {"operations": operations, "bytes": sizes, "workers": workers, "rates": [rate_of(rate) for rate in rates]}
    chosen = {key: value for key, value in given.items() if value}
    plan = validated(CollectivesPlan, {**chosen, "rounds": rounds}, "collectives run")
    try:
        with _progress("collectives") as log:
            found = run_collectives(plan, log)
    except RunFailed as error:
        sys.exit(_say(f"collectives run: {error}", 1))
    write_collectives(found, plan, out)
    shown = found.points.assign(ms=(1e3 * found.points["time_s"]).map("{:.4g}".format))
    click.echo(shown[["group", "workers", "nodes", "n_bytes", "ms"]].to_string(index=False))
    click.echo(f"{out}: {len(found.points)} points, {len(found.samples)} repetitions (measured)")


@collectives.command("fit")
@_tables
def collectives_fit(observed: Path, at: Path, out: Path) -> None:
    """Predict all-reduce times at unmeasured sizes and placements from measured ones.

    Columns: group (the platform), workers, nodes, n_bytes, time_s, time_std_s (may be empty); the points without times.
    """
    _fit_and_predict("collectives", observed, at, out)


@cli.group()
def megatron() -> None:
    """Iteration times of Megatron with data, tensor and pipeline parallelism."""


@megatron.command("fit")
@_tables
def megatron_fit(observed: Path, at: Path, out: Path) -> None:
    """Predict iteration times of unmeasured configurations from measured ones, on A100 GPUs.

    Columns: # GPUs, global batch, micro batch, hidden size, attention heads, # layers, sequence length, tensor
    parallelism, data parallelism, pipeline parallelism, iteration time (ms). Written: the points' configurations with
    their time, its 90 % interval (iteration time low (ms), iteration time high (ms)) and a note of what was assumed.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from steptime.core.files import write_table
    from steptime.model import megatron as model

    points = model.read_points(at)
    predicted = model.fit_and_predict(model.read_observed(observed), points)
    write_table(out, predicted)
    click.echo(f"{out}: {len(predicted)} configurations predicted (modelled), with 90 % intervals")


@collectives.command("read")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--group", help="Name of the platform, where a file does not say it.")
@click.option("--workers", type=int, help="Workers, where a file does not say them.")
@click.option("--nodes", type=int, help="Nodes, where a file does not say them.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="CSV to write.")
def collectives_read(
    files: tuple[Path, ...], group: str | None, workers: int | None, nodes: int | None, out: Path
) -> None:
    """Make one table of what nccl-tests (text or -J), OSU benchmarks and CSV files measured, for `collectives fit`."""
    from steptime.core.files import write_table
    from steptime.traces.collectives import Placement, read_collectives

    table = read_collectives(files, Placement(group, workers, nodes))
    write_table(out, table)
    click.echo(f"{out}: {len(table)} points (measured)")


# ---------------------------------------------------------------------------------------------------------- traces


@cli.group()
def trace() -> None:
    """Traces that PyTorch's profiler recorded: one file a rank, plain or gzip."""


@trace.command("show")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Step whose critical path is shown [all].")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Lines of the critical path.")
def trace_show(files: tuple[Path, ...], step: int | None, top: int) -> None:
    """Where each step's time goes on each rank, what waited for whom, and the critical path over all ranks."""
    from steptime.traces.kineto import read_traces
    from steptime.traces.report import show_lines
    from steptime.traces.steps import aligned

    for line in show_lines(aligned(read_traces(files)), step, top):
        click.echo(line)


@trace.command("add")
@click.argument("name")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def trace_add(name: str, files: tuple[Path, ...]) -> None:
    """Keep the traces of one job with the study, as data/traces/NAME, without host, user, paths and time of day."""
    from steptime.traces.scrub import add_traces

    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(f"trace add: name {name!r}: use small letters, digits and hyphens")
    written = add_traces(files, _root() / "data/traces" / name)
    size = sum(path.stat().st_size for path in written)
    click.echo(
        f"data/traces/{name}: {len(written)} ranks, {size / 1e3:.0f} kB; say in a README.md there what was recorded"
    )


@trace.command("grow")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--workers", type=int, multiple=True, required=True, help="Workers to grow to; may be repeated.")
@click.option("--link", required=True, help="Link between them: a name in data/machines/links.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="CSV, or .json: a timeline for Perfetto.")
def trace_grow(files: tuple[Path, ...], workers: tuple[int, ...], link: str, out: Path) -> None:
    """Predict the recorded steps on more workers: a rank's computing as recorded, its collectives costed anew."""
    from steptime.core.files import write_table
    from steptime.core.machine import read_link
    from steptime.model.growing import grow, grow_table, grown_timeline
    from steptime.traces.kineto import read_traces
    from steptime.traces.perfetto import write_timeline
    from steptime.traces.recorded import recorded_steps
    from steptime.traces.steps import aligned

    found = read_link(_root() / "data/machines/links", link)
    is_timeline = out.suffix == ".json"
    if is_timeline and len(workers) > 1:
        raise InputError(f"trace grow: {len(workers)} numbers of workers do not fit one timeline; give one, or a CSV")
    recorded = recorded_steps(aligned(read_traces(files)).traces)
    table = grow_table(recorded, workers, found)
    if is_timeline:
        middle = sorted(recorded, key=lambda one: one.step_s)[len(recorded) // 2]
        write_timeline(out, grown_timeline(middle, grow(middle, workers[0], found)))
        click.echo(
            f"{out}: step {middle.step} on {workers[0]} workers over {link}, modelled; open it in ui.perfetto.dev"
        )
    else:
        write_table(out, table)
        click.echo(f"{out}: {len(recorded)} recorded steps on {len(workers)} numbers of workers, modelled")
    for count, part in table.groupby("workers"):
        middles = part[["step_time_s", "exposed_s", "recorded_s"]].median() * 1e3
        click.echo(
            f"  {count} workers: {middles['step_time_s']:.4g} ms a step (median), {middles['exposed_s']:.4g} ms of it "
            f"waiting for collectives; recorded {middles['recorded_s']:.4g} ms"
        )


# ---------------------------------------------------------------------------------------------------- many workers


@cli.group()
def workers() -> None:
    """Training by many workers, really run on this machine."""


@workers.command("run")
@click.option("--network", required=True, help="Network to train.")
@click.option("--workers", "counts", type=int, multiple=True, help="Number of workers; may be repeated [1, 2].")
@click.option("--engine", help="Engine of the schedules that name none [torch_gloo].")
@click.option("--schedule", "schedules", multiple=True, help="NAME or NAME=VALUE, as below; may be repeated.")
@click.option(
    "--rate", "rates", multiple=True, help="Rate of the links, e.g. 1gbit, or loopback; may be repeated [loopback]."
)
@click.option("--emulate", help="A setting, whose recorded layer profile is replayed, or a CSV file with one.")
@click.option("--campaign", "name", help="Campaign to take the setting's profile from.")
@click.option("--batch", type=int, help="Batch of one worker [the profile's, or 16].")
@click.option("--size", default="quick", show_default=True, help="quick or full network.")
@click.option("--threads", type=int, help="Threads of one worker [1].")
@click.option("--rounds", type=int, help="Fresh starts of each cell [3].")
@click.option("--steps", type=int, help="Timed steps of a start [20].")
@click.option("--warmups", type=int, help="Steps before them [3].")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the campaign [data/.scratch/workers].")
@click.option("--fresh", is_flag=True, help="Discard the runs that an interrupted measurement finished.")
def workers_run(
    network: str,
    counts: tuple[int, ...],
    engine: str | None,
    schedules: tuple[str, ...],
    rates: tuple[str, ...],
    emulate: str | None,
    name: str | None,
    size: str,
    out: Path | None,
    fresh: bool,
    **chosen: int | None,
) -> None:
    """Measure synchronous training of NETWORK by many workers, with torch.distributed over gloo or the framework's own
    engine.

    \b
    Schedules: end_of_backward, layers_after_backward, wait_free, buckets=BYTES,
    lazy=BYTES, merged=FILE (JSON, {"groups": [[layer, ...], ...]}, the last layer
    first), ps_central, ps_sharded, sufficient_factors, sparse=SHARE,
    hierarchical=RANKS (of a node), local_sgd=STEPS.
    Other engines and theirs, also written ENGINE/SCHEDULE:
    tensorflow_multiworker  pack=BYTES (joined into a message; 0: all)
    mxnet_kvstore           dist_sync=SERVERS, dist_device_sync=SERVERS
    cntk_mpi                bits=32, bits=1
    chainermn_mpi           naive
    caffe_mpi               end_of_backward, wait_free

    Links of a given rate need root. With --emulate the workers wait as long as the layers of the profile took, while
    gradients of their sizes really travel. Interrupted, it goes on where it stopped.
    """
    from steptime.cluster.campaigns import WorkersPlan, measure_workers
    from steptime.cluster.engines import by_engine
    from steptime.cluster.links import rate_of
    from steptime.core.files import validated

    root = _root()
    profile = None if emulate is None else _profile(emulate, name, network, size, chosen["batch"])
    given = {
        "workers": counts,
        "schedules": by_engine(engine, schedules),
        **chosen,
        "emulate": profile and profile.source,
    }
    given["rates"] = [None if rate == "loopback" else rate_of(rate) for rate in rates]
    if profile is not None:
        given["batch"] = profile.batch
    values = {key: value for key, value in given.items() if value not in (None, (), [])}
    plan = validated(WorkersPlan, {**values, "network": network, "size": size}, "workers run")
    out = root / "data/.scratch/workers" if out is None else out
    with _progress("workers") as log:
        campaign = measure_workers(plan, out, profile, fresh=fresh, report=log)
    click.echo(_step_times(campaign).to_string(index=False))
    for row in campaign.runs[campaign.runs["status"] != "finished"].drop_duplicates("case_id").itertuples():
        click.echo(f"{row.case_id}: {row.status}: {row.reason}")
    if not (campaign.runs["status"] == "finished").any():
        raise InputError(f"{out}: no run finished; the reasons are above and in runs.csv")
    compute = "emulated" if profile is not None else "real"
    click.echo(f"{out}: {len(campaign.runs)} runs, {compute} compute, real communication")


@workers.command("job")
@click.option("--network", required=True, help="Network to train.")
@click.option("--workers", "count", type=int, required=True, help="Number of workers, one a rank.")
@click.option("--schedule", required=True, help="As for `workers run`, of torch_gloo or caffe_mpi.")
@click.option("--emulate", help="A setting, whose recorded layer profile is replayed, or a CSV file with one.")
@click.option("--campaign", "name", help="Campaign to take the setting's profile from.")
@click.option("--batch", type=int, help="Batch of one worker [the profile's, or 16].")
@click.option("--size", default="quick", show_default=True, help="quick or full network.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of one worker.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="Timed steps.")
@click.option("--warmups", type=click.IntRange(0), default=3, show_default=True, help="Steps before them.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The job's JSON file.")
def workers_job(
    network: str,
    count: int,
    schedule: str,
    emulate: str | None,
    name: str | None,
    batch: int | None,
    size: str,
    threads: int,
    steps: int,
    warmups: int,
    out: Path,
) -> None:
    """Write a job for ranks that a cluster's own launcher starts, and say how.

    Each rank runs the program that is printed with the file as its argument, under torchrun, Slurm or mpirun. The file
    names programs by this checkout's path: all hosts need it at that path.
    """
    from steptime import networks
    from steptime.cluster.engines import cluster_job

    profile = None if emulate is None else _profile(emulate, name, network, size, batch)
    described = networks.build(network, size=size) if profile is None or network in networks.NAMES else None
    timed = {"batch": profile.batch if profile else batch or 16, "warmups": warmups, "steps": steps, "threads": threads}
    click.echo(cluster_job(described, profile, schedule, count, timed, out))


def _profile(emulate: str, name: str | None, network: str, size: str, batch: int | None) -> Any:
    """The layer profile in the CSV file `emulate`, or the one recorded of the setting of that name."""
    from steptime import frameworks, networks
    from steptime.core.workers import read_profile
    from steptime.model.fitting import find_case, layer_profile

    if emulate not in frameworks.SETTINGS:
        return read_profile(Path(emulate), network, batch or 16)
    campaign, _, _ = _recorded("workers run", name, network)
    case_id = find_case(campaign, network, emulate)
    recorded = campaign.runs.loc[campaign.runs["case_id"] == case_id].iloc[0]
    for what, asked in (("size", size), ("batch", batch)):
        if asked is not None and asked != recorded[what]:
            raise InputError(
                f"workers run: --{what} = {asked}: the profile is of {recorded[what]} ({case_id} of campaign "
                f"{campaign.name}); give --{what} {recorded[what]}, or a profile of your own"
            )
    return layer_profile(campaign, networks.build(network, size=size), case_id)


@cli.group()
def links() -> None:
    """Links between workers on this machine: network namespaces on a switch, at a given rate. Needs root."""


@links.command("up")
@click.option("--workers", type=int, required=True, help="Namespaces to make, one a worker.")
@click.option("--rate", help="Rate of each link, both ways, e.g. 1gbit [not held back].")
def links_up(workers: int, rate: str | None) -> None:
    """Make links that stay until `steptime links down`, and measure them.

    A command runs in one by: ip netns exec NAME COMMAND.
    """
    from steptime.cluster.links import rate_of, up

    made = up(workers, None if rate is None else rate_of(rate))
    for place in made.places:
        click.echo(f"{place.namespace}  {place.interface}  {place.address}")
    rates = {name: 8e-9 / of.beta_s_per_byte for name, of in (("link", made.link), ("not held back", made.unshaped))}
    click.echo(
        f"a message, measured: {1e6 * made.link.alpha_s:.3g} us and its bytes at {rates['link']:.4g} Gbit/s; "
        f"not held back {rates['not held back']:.3g} Gbit/s"
    )


@links.command("down")
def links_down() -> None:
    """Remove the links that `up` made, and what killed runs left; those of a run under way stay."""
    from steptime.cluster.links import down

    for name in down():
        click.echo(f"{name}: removed")


@links.command("list")
def links_list() -> None:
    """Say which links of this project are up, and whose."""
    from steptime.cluster.links import HELD, list_links

    for found in list_links():
        owner = "held, until links down" if found.owner == HELD else f"process {found.owner}"
        for name in found.namespaces:
            click.echo(f"{name}  {owner}{'' if found.is_alive else ', which is gone: the next start removes it'}")


# ------------------------------------------------------------------------------------------------------ campaigns


@cli.group()
def campaign() -> None:
    """Recorded sets of measurements: data/campaigns."""


@campaign.command("add")
@click.argument("name")
@click.option("--from", "source", type=click.Path(path_type=Path), help="Folder to take it from [data/raw/local].")
def campaign_add(name: str, source: Path | None) -> None:
    """Make the measured campaign part of the study, as data/campaigns/NAME, without host and user names."""
    from steptime.measure import add_campaign

    root = _root()
    add_campaign(source or root / "data/raw/local", name, root)
    _warn_of_names(root / "data/campaigns" / name)
    click.echo(f"{name}: {_summary(root / 'data/campaigns' / name)}")
    click.echo(
        f"data/campaigns/{name}: now `make study`, then commit it with what that wrote:\n"
        f"git add data/campaigns/{name} README.md data/headline.svg dvc.lock"
    )


@campaign.command("list")
def campaign_list() -> None:
    """List the campaigns that the notebooks read."""
    from steptime.core.campaign import recorded_folders

    root = _root()
    folders = recorded_folders(root)
    for name, folder in folders.items():
        click.echo(f"{name:20} {_summary(folder)}")
    if not folders:
        click.echo("no campaign yet: make study measures this machine")


@campaign.command("check")
@click.argument("path", type=click.Path(path_type=Path))
def campaign_check(path: Path) -> None:
    """Check the campaign in PATH: columns, rows, keys, names, times; links and timelines where there are many workers.

    A framework of another name is only told.
    """
    from steptime.core.workers import is_of_workers, read_workers

    if is_of_workers(path):
        read_workers(path)
    _warn_of_names(path)
    click.echo(f"{path}: {_summary(path)}")


def _warn_of_names(folder: Path) -> None:
    from steptime.core.campaign import read_campaign
    from steptime.measure import check_names

    for line in check_names(read_campaign(folder), folder):
        click.echo(f"warning: {line}", err=True)


def _summary(folder: Path) -> str:
    from steptime.core.campaign import read_campaign

    found = read_campaign(folder)
    finished = found.runs[found.runs["status"] == "finished"]
    steps = found.samples[(found.samples["phase"] == "step") & ~found.samples["is_warmup"]]
    fewest, disturbed = finished.groupby("case_id").size().min(), steps["is_disturbed"].mean()
    warning = " - too little for a verdict" if not fewest >= 3 or disturbed > 0.5 else ""
    return (
        f"{finished['case_id'].nunique()} cases, {len(finished)} of {len(found.runs)} runs finished, "
        f"{len(found.samples)} samples, {', '.join(sorted(finished['framework'].unique()))}; "
        f"at least {fewest} processes a case, {disturbed:.0%} of steps disturbed{warning}"
    )


@cli.command()
@click.argument("a")
@click.argument("b")
@click.option("--out", type=click.Path(path_type=Path), help="File to write: a table (.csv) or a page (.html).")
def compare(a: str, b: str, out: Path | None) -> None:
    """Which cases changed from campaign A to campaign B: by how much, corrected for the number of cases.

    A and B are names of campaigns or folders: of two commits, two versions of a framework, two machines. Exits with 3
    when a case takes longer in B or no longer runs, and with 4 when there is no verdict, which it explains.
    """
    from steptime.core.comparing import NotComparable, compare_campaigns, summary_lines
    from steptime.core.errors import NOT_COMPARABLE
    from steptime.core.files import write_text

    if out is not None and out.suffix not in (".csv", ".html"):
        raise InputError(f"compare: --out = {str(out)!r}: its name must end in .csv or .html")
    try:
        compared = compare_campaigns(_campaign_at(a, "A"), _campaign_at(b, "B"))
    except NotComparable as error:
        sys.exit(_say(f"compare: {error}", NOT_COMPARABLE))
    first, *others = summary_lines(compared)
    click.echo(first)
    shown = {
        "case": compared.table["case_id"],
        "A, ms": (1e3 * compared.table["a_s"]).map("{:.4g}".format),
        "B, ms": (1e3 * compared.table["b_s"]).map("{:.4g}".format),
        "measured": compared.table["measured"].map("{:.3f}".format),
        "ratio": compared.table["ratio"].map("{:.3f}".format),
        "low": compared.table["lo"].map("{:.3f}".format),
        "high": compared.table["hi"].map("{:.3f}".format),
        "verdict": compared.table["verdict"].replace("", "–"),
    }
    click.echo(compared.table[[]].assign(**shown).to_string(index=False))
    for line in others:
        click.echo(line)
    if out is not None and out.suffix == ".csv":
        write_text(out, compared.table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    elif out is not None:
        from steptime.report.alone import write_comparison

        write_comparison(compared, out)
    if out is not None:
        click.echo(f"{out}: {len(compared.table)} cases compared (measured)")
    sys.exit(compared.status)


def _campaign_at(given: str, which: str) -> Any:
    """The campaign of that name, or in that folder."""
    from steptime.core.campaign import campaign_folders, read_campaign

    folders = {} if (Path(given) / "runs.csv").is_file() else campaign_folders(_root())
    if given in folders:
        return read_campaign(folders[given])
    if not (Path(given) / "runs.csv").is_file():
        raise InputError(
            f"compare: {which} = {given!r}: is neither a folder with a runs.csv nor a campaign; known: "
            f"{', '.join(folders) or 'none'}"
        )
    return read_campaign(Path(given).resolve())


@cli.command()
@click.option("--framework", "settings", multiple=True, help="Setting to compare; may be repeated [all].")
@click.option("--network", "names", multiple=True, help="Network to compare; may be repeated [all].")
@click.option("--out", type=click.Path(path_type=Path), help="CSV file to write.")
def parity(settings: tuple[str, ...], names: tuple[str, ...], out: Path | None) -> None:
    """Compare every setting with torch on every network: parameters, shapes, operations, outputs, gradients; and train.

    Small variants, same weights. Interrupted, it goes on where it stopped. Exits with 1 when a pair differs or fails.
    """
    from steptime.measure.parity import parity as compare
    from steptime.measure.parity import write_parity

    with _progress("parity") as log:
        table = compare(settings, names, log, partial=_root() / "data/.partial/parity")
    if out is not None:
        write_parity(table, out)
    for verdict, count in table["verdict"].value_counts().items():
        click.echo(f"{count} pairs: {verdict}")
    sys.exit(1 if table["verdict"].isin(["differs", "failed"]).any() else 0)


# ------------------------------------------------------------------------------------------------------ notebooks


@cli.group()
def notebooks() -> None:
    """The notebooks' two forms: .ipynb to open, text for Git and DVC."""


@notebooks.command("sync")
@click.option("--prefer", type=click.Choice(["text", "ipynb"]), help="Which one to keep where both were edited.")
def notebooks_sync(prefer: str | None) -> None:
    """Make each .ipynb and its text equal; the one edited since the last sync wins."""
    from steptime.pairs import sync

    for line in sync(_root(), prefer):
        click.echo(line)


@notebooks.command("strip")
def notebooks_strip() -> None:
    """Take outputs and metadata out of every .ipynb."""
    from steptime.pairs import strip

    for name in strip(_root()):
        click.echo(f"{name}: outputs taken out")


@notebooks.command("check")
def notebooks_check() -> None:
    """Say which pairs differ or hold outputs."""
    from steptime.pairs import faults

    found = faults(_root())
    for line in found:
        click.echo(line, err=True)
    sys.exit(1 if found else 0)


# --------------------------------------------------------------------------------------------------- environments


@cli.group()
def env() -> None:
    """Environments of frameworks that need their own Python: .envs."""


@env.command("create")
@click.argument("names", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every environment that there is a recipe for.")
def env_create(names: tuple[str, ...], every: bool) -> None:
    """Make the environments NAMES, or go on where making them was interrupted. Needs a package index and minutes."""
    from steptime.frameworks.creation import CreationFailed, create_environment, find_environment
    from steptime.frameworks.environments import ENVIRONMENTS

    if every == bool(names):
        raise InputError(f"env create: give names or --all; known: {', '.join(ENVIRONMENTS)}")
    chosen = tuple(ENVIRONMENTS) if every else names
    for name in chosen:
        find_environment(name)
    status = 0
    for name in chosen:
        try:
            create_environment(name, lambda line, name=name: click.echo(f"{name}: {line}", err=True))  # type: ignore[misc]
        except InputError as error:
            status = max(status, _say(str(error), 2))
        except CreationFailed as error:
            status = max(status, _say(str(error), 1))
    sys.exit(status)


@env.command("list")
def env_list() -> None:
    """Say which environments are there, and the one command that mends what is not."""
    from steptime.frameworks.creation import environment_states

    for found in environment_states():
        environment = found.environment
        state = f"{found.state}: {found.why}" if found.why else found.state
        mend = f"; mend: {found.mend}" if found.mend else ""
        click.echo(f"{environment.name:12} {environment.version:10} Python {environment.python:5} {state}{mend}")


# ---------------------------------------------------------------------------------------------- doctor, benchmarks


@cli.command()
def doctor() -> None:
    """Say what is missing here, and the one command that mends it."""
    from steptime.doctor import findings

    broken = False
    for finding in findings(_root()):
        mark = "ok" if finding.ok else "MISSING" if finding.required else "note"
        mend = "" if finding.ok else f"\n         mend: {finding.mend}"
        click.echo(f"{mark:8} {finding.what}: {finding.found}{mend}")
        broken = broken or (finding.required and not finding.ok)
    sys.exit(1 if broken else 0)


@cli.group()
def benchmarks() -> None:
    """What the procedure itself costs and how often it errs."""


@benchmarks.command("harness")
def benchmarks_harness() -> None:
    """Step time through the harness over a bare loop in the same child, in alternation."""
    from steptime.measure.benchmarks import harness_cost

    harness_cost()


@benchmarks.command("interference")
def benchmarks_interference() -> None:
    """How many of the steps that a process on the same core disturbs are seen, and whether the estimate moves."""
    from steptime.measure.interference import interference

    interference()


@benchmarks.command("a-a")
def benchmarks_a_a() -> None:
    """How often the same case, measured twice, is called different; and how often a planted 3 % is found."""
    from steptime.measure.benchmarks import a_a

    a_a()


@benchmarks.command("examples")
@click.option("--pairs", type=click.IntRange(min=3), default=8, show_default=True, help="Pairs of fresh processes.")
def benchmarks_examples(pairs: int) -> None:
    """Step time of the frameworks' own example programs over that of the adapters, in alternation.

    Exits with 1 when an interval does not lie above the goal.
    """
    from steptime.measure.example_ratio import example_ratios

    sys.exit(0 if all(found["met"] for found in example_ratios(pairs).values()) else 1)


@benchmarks.command("simulator")
def benchmarks_simulator() -> None:
    """One step at 1,024 and 16,384 workers, events and what-if a second, beside plain Python doing the same work.

    Exits with 1 when a goal is missed.
    """
    from steptime.model.simulator_benchmark import simulator_speed

    sys.exit(0 if simulator_speed(click.echo)["met"] else 1)


@benchmarks.command("extrapolation")
def benchmarks_extrapolation() -> None:
    """Fitting 2,526 steps and predicting 490, beside a simple fit of the same table.

    Exits with 1 when the goal is missed.
    """
    # As `steptime extrapolate` does.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from steptime.model.extrapolation_benchmark import extrapolation_speed

    sys.exit(0 if extrapolation_speed(report=click.echo)["met"] else 1)


@benchmarks.command("planner")
def benchmarks_planner() -> None:
    """How long the report's planner takes to redraw after a change at 1,024 workers, in headless Chromium.

    Exits with 1 when the goal is missed.
    """
    from steptime.report.planner_benchmark import planner_speed

    sys.exit(0 if planner_speed(_root(), click.echo)["met"] else 1)


@benchmarks.command("trace")
def benchmarks_trace() -> None:
    """Reading a trace of 200,000 events and its critical path, beside plain Python doing the same work.

    Exits with 1 when a goal is missed.
    """
    from steptime.traces.benchmark import trace_speed

    sys.exit(0 if trace_speed()["met"] else 1)


@benchmarks.command("compare")
@click.option("--campaign", "name", default="epyc-2core-settings", show_default=True, help="Whose noise is taken.")
@click.option("--pairs", type=click.IntRange(min=20), default=400, show_default=True, help="Pairs of campaigns.")
def benchmarks_compare(name: str, pairs: int) -> None:
    """How often `steptime compare` calls equal campaigns different, and how often it finds a planted 3 %; simulated.

    Exits with 1 when a goal is missed at the number of rounds that the noise asks for.
    """
    from steptime.measure.compare_benchmark import compare_rates

    sys.exit(0 if compare_rates(_campaign_at(name, "--campaign"), pairs, click.echo)["met"] else 1)
