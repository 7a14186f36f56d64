"""The `partway` command. Only the commands that need torch import it: `--help` and completion answer at once."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from partway.strategy.basics.files import FOREIGN, is_foreign, save
from partway.strategy.errors import PartwayError, RuntimeStateError

# The words of completion. They are repeated here, because completion must not import torch.
PROFILES = ("a100", "a100_40", "ascend910", "b200", "cpu", "h100", "h200", "mi300x")
SEARCH_MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation")
DEVICES = ("cpu", "cuda")
MODELS = ("gpt2", "mlp", "resnet50")
CONTENDERS = (
    "auto", "index eighths", "index thirds", "overlap", "size 1", "size 16", "size 4", "size 64", "unfused",
)  # fmt: skip


def _offers(words: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A completion function that offers these words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


app = typer.Typer(
    name="partway",
    help="Plan how a PyTorch model is split over devices.",
    no_args_is_help=True,
    add_completion=True,
)

bench = typer.Typer(help="Measure Partway on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class _ScriptOrCommand(TyperGroup):
    """`partway ps train.py` is `partway ps run train.py`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read arguments that do not begin with a command as those of the default command."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "--install-completion"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


servers = typer.Typer(
    help="Train a script with parameter servers on this machine: partway ps --workers 3 --servers 2 train.py",
    cls=_ScriptOrCommand,
    no_args_is_help=True,
)
app.add_typer(servers, name="ps")

kubernetes = typer.Typer(
    help="Train on Kubernetes: yaml of kind PartwayJob (docs/kubernetes.md).", no_args_is_help=True
)
app.add_typer(kubernetes, name="operator")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `partway` itself."""


@app.command()
def version() -> None:
    """Print the version of Partway."""
    typer.echo(f"partway {installed_version('partway')}")


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="seconds that ranks wait for each other")] = 30,
    profile: Annotated[
        str | None,
        typer.Option(help="look at this device profile, too: a preset, or a file", autocompletion=_offers(PROFILES)),
    ] = None,
) -> None:
    """Check versions, devices, backends, variables and the cache of this machine; print problems and their fixes.

    Under a launcher every rank runs it, and checks whether ranks reach each other. Rank 0 prints what all ranks found,
    the others their own problems. The exit status is 1 if there is a problem; advice does not count.
    """
    from partway.runtime.launching.launchers import launch

    try:
        found = launch()
    except PartwayError as error:
        _print_facts(f"unclear: {error}")
        _print_findings(1, profile)
        raise typer.Exit(1) from None
    if found is None:
        _print_facts("none: models run on virtual devices in this process")
        raise typer.Exit(1 if _print_findings(1, profile) else 0)
    from partway.doctor import reach

    wrong = False
    try:
        met = reach.join(found, timeout)
        found = met.launch
        if found.rank == 0:
            _print_facts(f"{found.launcher}: {found.size} processes, which meet at {found.where}")
        if found.rank == 0 or not found.local_rank:  # once per host
            where = "" if found.rank == 0 else f"{platform.node()}: "
            wrong = _print_findings(found.size if found.one_host else 1, profile, where)
        health = reach.check(met, timeout)
    except PartwayError as error:
        typer.echo(f"partway doctor: {error}", err=True)
        raise typer.Exit(1) from None
    if found.rank == 0:
        typer.echo(f"\n{health.table()}\n")
    for problem in health.problems:
        if found.rank in (0, problem.rank):
            typer.echo(f"partway doctor: {problem.text}", err=True)
    if found.rank == 0 and not health.problems:
        typer.echo(health.well)
    raise typer.Exit(1 if health.problems or wrong else 0)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="the script; what follows it are its own arguments")],
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False, metavar="[ARGS]...")] = None,
    workers: Annotated[int, typer.Option(help="how many processes, on each host")] = 1,
    simulate: Annotated[int | None, typer.Option(help="run it alone instead, on as many virtual devices")] = None,
    hosts: Annotated[str, typer.Option(help="print what to start on each of these hosts, such as a,b")] = "",
    nodes: Annotated[int, typer.Option(help="on how many hosts this is started")] = 1,
    meet: Annotated[str, typer.Option(help="host:port of one of the hosts, where they find each other")] = "",
    restarts: Annotated[int, typer.Option(help="how often to start all processes again after one failed")] = 0,
    logs: Annotated[Path, typer.Option(help="the folder for <run>/rank.N/stdout and stderr")] = Path("log_output"),
    tail: Annotated[list[int] | None, typer.Option(help="show the output of this rank only; may be repeated")] = None,
) -> None:
    """Run a script in several processes, one for each rank; torch's elastic launcher starts and watches them."""
    from partway.commands import jobs

    job = jobs.LocalJob(script, tuple(arguments or ()), workers, nodes, meet, restarts, logs, tail or None)
    try:
        if hosts:
            typer.echo(jobs.commands(job, [host.strip() for host in hosts.split(",")]))
            return
        job.check()
        status = jobs.run(job) if simulate is None else jobs.simulate(job, simulate)
    except PartwayError as error:
        typer.echo(f"partway run: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


@servers.command(name="run", context_settings={"allow_interspersed_args": False})
def run_servers(
    script: Annotated[Path, typer.Argument(help="the script; what follows it are its own arguments")],
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False, metavar="[ARGS]...")] = None,
    workers: Annotated[int, typer.Option(help="how many workers")] = 1,
    servers: Annotated[int, typer.Option(help="how many servers")] = 1,
    restarts: Annotated[int, typer.Option(help="how often to start a worker again that fails within a minute")] = 10,
    port: Annotated[int, typer.Option(help="of the scheduler [a free one]")] = 0,
    logs: Annotated[Path, typer.Option(help="the folder for <run>/worker.N and <run>/scheduler")] = Path("log_output"),
    shards: Annotated[Path | None, typer.Option(help="where the servers keep their parameters after the job")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="show nothing")] = False,
) -> None:
    """Start the scheduler, servers and workers of a script on this machine, and watch them."""
    from partway.ps import jobs

    job = jobs.ServedJob(script, tuple(arguments or ()), workers, servers, restarts, port, logs, shards, quiet)
    try:
        job.check()
        status = jobs.run(job)
    except PartwayError as error:
        typer.echo(f"partway ps: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


@servers.command()
def scale(
    workers: Annotated[int | None, typer.Option(help="how many workers there are to be")] = None,
    servers: Annotated[int | None, typer.Option(help="how many servers")] = None,
    address: Annotated[
        str, typer.Option(help="host:port of the scheduler [that of the environment, or the last job]")
    ] = "",
) -> None:
    """Change the number of workers and servers of a running job without restarting it."""
    from partway.ps import jobs

    try:
        typer.echo(jobs.scale(workers, servers, address))
    except PartwayError as error:
        typer.echo(f"partway ps scale: {error}", err=True)
        raise typer.Exit(2) from None


@kubernetes.command()
def manifests(
    namespace: Annotated[str, typer.Option(help="where the operator runs")] = "partway-system",
    image: Annotated[str, typer.Option(help="its image, as kits/operator/Dockerfile makes it")] = "partway-operator",
    watch: Annotated[
        list[str] | None,
        typer.Option(help="serve the jobs of this namespace, with rights in it alone [all]; may be repeated"),
    ] = None,
) -> None:
    """Print the manifests that install the operator: kubectl apply -f <(partway operator manifests)."""
    from partway.operator import manifests as written

    try:
        typer.echo(written.text(written.installation(namespace, image, watch or ())), nl=False)
    except PartwayError as error:
        typer.echo(f"partway operator manifests: {error}", err=True)
        raise typer.Exit(2) from None


@kubernetes.command(name="job")
def write_job(
    script: Annotated[str, typer.Argument(help="the script, as a path in the image; what follows are its arguments")],
    image: Annotated[str, typer.Option(help="the image with the script")],
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False, metavar="[ARGS]...")] = None,
    workers: Annotated[int, typer.Option(min=1, help="how many workers")] = 1,
    servers: Annotated[int, typer.Option(min=0, help="how many servers of parameters")] = 0,
    name: Annotated[str, typer.Option(help="of the job [that of the script]")] = "",
    namespace: Annotated[str, typer.Option(help="of the job [kubectl's]")] = "",
) -> None:
    """Print the yaml of a job that runs a script."""
    from partway.operator import manifests as written

    try:
        made = written.job(script, arguments or (), workers, servers, image, name, namespace)
        typer.echo(written.text([made]), nl=False)
    except PartwayError as error:
        typer.echo(f"partway operator job: {error}", err=True)
        raise typer.Exit(2) from None


@kubernetes.command()
def check(
    files: Annotated[list[typer.FileBinaryRead], typer.Argument(help="yaml with jobs; - reads what is piped in")],
) -> None:
    """Check the yaml of a job and print its problems. The exit status is 1 if there are any."""
    from partway.operator import manifests as written

    wrong = False
    for file in files:
        try:
            problems = written.check(file.read())
        except PartwayError as error:
            typer.echo(f"partway operator check: {error}", err=True)
            raise typer.Exit(2) from None
        wrong = wrong or bool(problems)
        for problem in problems:
            typer.echo(f"{file.name}: {problem}", err=True)
    if wrong:
        raise typer.Exit(1)
    typer.echo("nothing is wrong with it")


@kubernetes.command(name="run")
def run_operator(
    namespace: Annotated[list[str] | None, typer.Option(help="serve this namespace [all]; may be repeated")] = None,
    lease: Annotated[
        str | None, typer.Option(help="NAMESPACE/NAME of a Lease: the operator that holds it works")
    ] = None,
    health: Annotated[
        str | None, typer.Option(help="where to answer that it works: http://0.0.0.0:8080/healthz")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="log what it watches")] = False,
) -> None:
    """Run the operator, as its Deployment does. Outside of a cluster it uses your kubeconfig."""
    import logging

    from partway.operator import shell

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns at each retry; the operator reports failures itself
    logging.getLogger("partway.operator").setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        shell.run(tuple(namespace or ()), lease, health)
    except PartwayError as error:
        typer.echo(f"partway operator run: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="module:function or file.py:function, which makes the model")],
    mesh: Annotated[str, typer.Option(help="the axes and their sizes, such as dp=2,tp=4")] = "",
    devices: Annotated[
        int | None, typer.Option(min=1, help="how many: the mesh is the cheapest that they form")
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option(help="an argument, such as float32[16,64] or mask=bool[16]; repeated", metavar="TEXT"),
    ] = None,
    in_strategy: Annotated[
        list[str] | None, typer.Option("--in", help="how an argument is split, such as dp,None; repeated, in order")
    ] = None,
    out_strategy: Annotated[list[str] | None, typer.Option("--out", help="how a result is split; repeated")] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="how parameters are split: NAME=STRATEGY, such as *.up.weight=tp,None")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="a preset, or a file; by default h100", autocompletion=_offers(PROFILES))
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(help="of a device, such as 40GB; inf: none")] = None,
    search_mode: Annotated[
        str | None, typer.Option(help="how it is searched for", autocompletion=_offers(SEARCH_MODES))
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="without a backward")] = False,
    real: Annotated[bool, typer.Option("--real", help="make the model with values, on the CPU, not without")] = False,
    every: Annotated[bool, typer.Option("--every", help="show operators that take next to no time, too")] = False,
    save: Annotated[Path | None, typer.Option(help="where to write the plan, as JSON")] = None,
    html: Annotated[Path | None, typer.Option(help="where to write it as a page, for a browser")] = None,
) -> None:
    """Plan your own model without a script, and print its layouts, its communication and the time of a step.

    The function takes no arguments, and returns the model and its arguments, (model, (x, y)), or the model alone, with
    --input for each argument. It may also be a class of modules. The model is made on the meta device, where it takes
    no memory, and nothing runs.

    partway plan train.py:build --mesh dp=2,tp=4 --in dp,None
    """
    from partway.commands.plan_command import CommandLine, planned

    try:
        check_paths({"the plan": save, "the page": html})
        made = planned(
            CommandLine(
                model=model,
                mesh=mesh,
                devices=devices,
                inputs=input or (),
                in_strategy=in_strategy or (),
                out_strategy=out_strategy or (),
                parameters=param or (),
                profile=profile,
                memory_limit=memory_limit,
                search_mode=search_mode,
                inference=inference,
                real=real,
            )
        )
        typer.echo(made.table(every=every))
        for path, write in ((save, made.save), (html, made.save_html)):
            if path is not None:
                write(path)
                typer.echo(f"wrote {path}")
    except PartwayError as error:
        typer.echo(f"partway plan: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("profile.json"),
    processes: Annotated[
        int | None, typer.Option(help="how many devices; 1 measures no collectives [2, or those of the launcher]")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu (gloo) or cuda (NCCL, a GPU for each process)", autocompletion=_offers(DEVICES))
    ] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="fewer and smaller cases: less than a minute")] = False,
    preset: Annotated[
        str | None,
        typer.Option(help="take what joins more devices from this profile", autocompletion=_offers(PROFILES)),
    ] = None,
) -> None:
    """Measure this machine and write a device profile: compute, memory, and collectives between processes.

    Under a launcher its processes measure together, on all of its hosts, and rank 0 writes the profile.
    """
    from partway.measure.calibrate import calibrate as measure
    from partway.measure.calibrate import join
    from partway.runtime import shutdown

    try:
        first = join(device)
        if first:
            check_paths({"the device profile": out})
        calibration = measure(processes, device, quick, out.stem, preset)
        if first:
            calibration.profile.save(out)
        shutdown()
    except PartwayError as error:
        typer.echo(f"partway calibrate: {error}", err=True)
        raise typer.Exit(2) from None
    if not first:
        return
    typer.echo(calibration.report())
    typer.echo(f"wrote {out}; use it with set_auto_parallel_context(device_profile={str(out)!r})")


@bench.command()
def fusion(
    model: Annotated[
        str,
        typer.Option(help="gpt2, resnet50, mlp, or module:function of your own", autocompletion=_offers(MODELS)),
    ] = "gpt2",
    world: Annotated[int, typer.Option(help="how many processes")] = 2,
    rounds: Annotated[int | None, typer.Option(help="steps of each contender [15; quick: 3]")] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda [cuda where there are several GPUs, and enough]", autocompletion=_offers(DEVICES)
        ),
    ] = "",
    profile: Annotated[
        str | None,
        typer.Option(help="predict with this device profile instead of calibrating", autocompletion=_offers(PROFILES)),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="where to write all figures, as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="where to save a plot of them (needs matplotlib)")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="where to write a timeline of one step, predicted and measured")
    ] = None,
    of: Annotated[
        str, typer.Option(help="the contender whose timeline is written", autocompletion=_offers(CONTENDERS))
    ] = "overlap",
    html: Annotated[Path | None, typer.Option(help="where to write all of it as a page, with that timeline")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a small model and few rounds: the times mean nothing")
    ] = False,
) -> None:
    """Train a data-parallel model with every fusion policy and with DDP, in turns, and compare their step times."""
    import json as notation

    from partway.measure.bench import bench_fusion, check_plot
    from partway.propagation.program.timeline import save_chrome_trace

    try:
        check_paths({"the figures": json, "the plot": plot, "the timeline": timeline, "the page": html})
        check_plot(plot)
        rounds = rounds if rounds is not None else (3 if quick else 15)
        comparison = bench_fusion(
            model,
            world,
            rounds,
            device=device,
            quick=quick,
            profile=profile,
            timed=timeline is not None or html is not None,
            traced=of,
        )
        typer.echo(comparison.report())
        if json is not None:
            save("the figures", json, notation.dumps(comparison.data(), indent=1) + "\n")
        if plot is not None:
            comparison.draw(plot)
        if timeline is not None:
            save_chrome_trace(timeline, comparison.timelines)
        if html is not None:
            comparison.save_html(html)
    except PartwayError as error:
        typer.echo(f"partway bench fusion: {error}", err=True)
        raise typer.Exit(2) from None
    for path in (json, plot, timeline, html):
        if path is not None:
            typer.echo(f"wrote {path}")


@bench.command()
def experts(
    world: Annotated[int, typer.Option(help="how many processes")] = 2,
    rounds: Annotated[int, typer.Option(help="steps of each contender")] = 15,
    tokens: Annotated[int, typer.Option(help="on each process")] = 1024,
    width: Annotated[int, typer.Option(help="features of a token")] = 256,
    hidden: Annotated[int, typer.Option(help="features inside of an expert")] = 896,
    experts: Annotated[int, typer.Option(help="how many there are")] = 8,
    k: Annotated[int, typer.Option("-k", help="experts of each token")] = 2,
    json: Annotated[Path | None, typer.Option(help="where to write all figures, as JSON")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a small layer and few rounds: the times mean nothing")
    ] = False,
) -> None:
    """Train a layer of experts in each form that it can be split in, by hand, and with DDP and FSDP2, in turns."""
    import json as notation

    from partway.measure.bench_experts import bench_experts

    try:
        check_paths({"the figures": json})
        result = bench_experts(
            world, rounds, tokens=tokens, width=width, hidden=hidden, experts=experts, k=k, quick=quick
        )
        typer.echo(result.report())
        if json is not None:
            save("the figures", json, notation.dumps(result.data(), indent=1) + "\n")
            typer.echo(f"wrote {json}")
    except PartwayError as error:
        typer.echo(f"partway bench experts: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="a folder that PARTWAY_SAVE_GRAPHS has written, or a plan's file")],
    b: Annotated[Path, typer.Argument(help="another one")],
    rows: Annotated[int, typer.Option(min=0, help="how many lines to show of each pass; 0: all")] = 20,
) -> None:
    """Show how two plans differ: the operators that differ after each pass, and a verdict at the end.

    A and B are plans that `plan.save` wrote, or folders of PARTWAY_SAVE_GRAPHS: of a call, of a rank, or of a run,
    whose calls are compared by name. The exit status is 0 if nothing differs, 1 if something does, 2 for an error.
    """
    from partway.commands.compare_graphs import compared, saved_calls

    try:
        same, text = compared(saved_calls(a), saved_calls(b), rows)
    except PartwayError as error:
        typer.echo(f"partway diff: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(text)
    raise typer.Exit(0 if same else 1)


@app.command()
def show(
    a: Annotated[
        Path, typer.Argument(help="a plan's file, or a folder of a call that PARTWAY_SAVE_GRAPHS has written")
    ],
    b: Annotated[Path | None, typer.Argument(help="another one, to see what differs", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="the page [beside A, as .html]")] = None,
    open: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
) -> None:
    """Make an HTML page of a plan, or of two plans and their differences: one file, which works offline."""
    import webbrowser

    from partway.show.pages import page, page_path

    try:
        target = out or page_path(a, b)
        check_paths({"the page": target})
        save("the page", target, page([a, b] if b else [a]))
    except PartwayError as error:
        typer.echo(f"partway show: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"wrote {target}")
    if open and not webbrowser.open(target.resolve().as_uri()):
        typer.echo("partway show: there is no browser here that can be started; open the file in one", err=True)
        raise typer.Exit(1)


def check_paths(paths: Mapping[str, Path | None]) -> None:
    """Raise RuntimeStateError if a path cannot be written. `paths`: by the kind of file, a key of MARKS."""
    for what, path in paths.items():
        if path is not None and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path)))):
            raise RuntimeStateError(f"cannot write {str(path)!r}; give the path of a file in a folder that exists")
        if path is not None and is_foreign(what, path):
            raise RuntimeStateError(f"cannot write {str(path)!r}: {FOREIGN}")


def _devices() -> list[str]:
    """The CPU with its threads, then each GPU with its memory."""
    import torch

    devices = [f"cpu ({torch.get_num_threads()} threads)"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)")
    return devices


def _print_findings(processes: int, profile: str | None, where: str = "") -> bool:
    """Print the findings on this host, and return whether any is a problem and not only advice. `where`: a prefix that
    names the host, if it is not rank 0's."""
    from partway.doctor.findings import findings

    found = findings(processes, profile)
    for finding in found:
        typer.echo(f"{where}{finding}")
    return any(finding.wrong for finding in found)


def _print_facts(launcher: str) -> None:
    import torch

    from partway.doctor.findings import has_backend

    facts = {
        "partway": installed_version("partway"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "devices": "; ".join(_devices()),
        "gloo": "available" if has_backend("gloo") else "missing: processes cannot talk on the CPU",
        "nccl": "available" if has_backend("nccl") else "missing: processes cannot talk on GPUs",
        "launcher": launcher,
    }
    width = max(map(len, facts))
    for name, fact in facts.items():
        typer.echo(f"{name:<{width}}  {fact}")


if __name__ == "__main__":
    app()
