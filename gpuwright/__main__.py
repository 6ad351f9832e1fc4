"""The command line of the core: python -m gpuwright --help"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpuwright import REPOSITORY, checks, compare, diagnose, drift, evidence, series, tiers
from gpuwright.acceptance import judge_file
from gpuwright.catalogue import Stack, flags_path, load_catalogue
from gpuwright.cli import Parser
from gpuwright.errors import GpuwrightError, nearest
from gpuwright.flags import dump_flags, read_flags
from gpuwright.lockfile import LOCKS, TOOLS_LOCK, compile_lock, lock_path, read_lock
from gpuwright.plan import examine_node
from gpuwright.record import RESULTS, SCHEMA, Record, folder_name, read_record, read_records, schema
from gpuwright.state import read_observation
from gpuwright.wheelhouse import WHEELHOUSE, brought_by, gather
from gpuwright.yamlfile import load_yaml, shown


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0, 1 with the reason on stderr, or 2 where a command says so."""
    parser = Parser(prog="python -m gpuwright", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="read and cross-check the whole catalogue")
    wheels = commands.add_parser(
        "wheelhouse",
        help="gather the wheels of a stack's lock in a folder, for nodes without an index",
        description="Have every wheel of a stack's lock, and of the tools', in a folder of this machine. What is there "
        "already is not asked for.",
    )
    wheels.add_argument("stack", metavar="STACK")
    wheels.add_argument("--python", required=True, metavar="3.X", help="the venv's Python")
    wheels.add_argument("--to", type=Path, default=WHEELHOUSE, metavar="FOLDER", help="default: wheelhouse/")
    wheels.add_argument(
        "--beside", type=Path, metavar="FILE",
        help="leave out what an interpreter that is to be adopted has: what its `pip list --format json` printed",
    )  # fmt: skip
    wheels.add_argument("--prune", action="store_true", help="remove wheels of no lock of files/locks/")
    for name, text in (
        ("lock", "compile the lock files of the stacks (needs the package index)"),
        ("flags", "read the engine's argument definitions from its pinned wheel (needs the package index)"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("stacks", nargs="*", metavar="STACK", help="default: every stack of catalog/stacks/")
    _tier_commands(
        commands.add_parser("tiers", help="print the ladders; compare tiers or stacks; render a script; add evidence")
    )
    command = commands.add_parser("diagnose", help="say why a server ended, by its log")
    command.add_argument("log", metavar="LOGFILE", help="any log of an SGLang server; - for stdin")
    command.add_argument("--stack", help="by what is known of this stack's engine (default: of any)")
    command.add_argument("--json", action="store_true", help="print JSON")
    doctor = commands.add_parser(
        "doctor",
        help="say whether a node can do the job, by a saved observation",
        description="Judge an observation that `pyinfra INVENTORY doctor.py --data save_observation=FOLDER` kept, with "
        "no node. Exit code 0: every `must` holds; 2: one does not, or could not be observed; 1: an error.",
    )
    doctor.add_argument("observation", metavar="OBSERVATION.json", type=Path)
    doctor.add_argument("--group", default="gpu", help="whose group_data it is held against (default: gpu)")
    doctor.add_argument("--all", action="store_true", help="print the checks that hold, too")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    _benchmark_commands(commands)
    _patch_commands(
        commands.add_parser("patches", help="list and check the patch series; make a patch; print a waiver")
    )
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            catalogue = load_catalogue()
            counts = {
                "stacks": len(catalogue.stacks),
                "tiers": sum(len(each.tiers) for ladders in catalogue.ladders.values() for each in ladders.values()),
                "rules": len(catalogue.rules),
                "patches": len(catalogue.patches),
                "signatures": len(catalogue.signatures.signatures),
                "acceptance rules": len(catalogue.acceptance.rules),
                "checks": len(catalogue.checks.checks),
                "settings": len(catalogue.system),
            }
            print(", ".join(f"{count} {name}" for name, count in counts.items()) + ": no problem found")
        elif options.command == "lock":
            lock(_stacks(options.stacks))
        elif options.command == "wheelhouse":
            print(wheelhouse_command(options))
        elif options.command == "flags":
            flags(_stacks(options.stacks))
        elif options.command == "schema":
            for path, text in ((SCHEMA, schema()), (drift.SCHEMA, drift.schema())):
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
                print(f"wrote {shown(path)}")
        elif options.command == "judge":
            return judge_command(options)
        elif options.command == "compare":
            return compare_command(options)
        elif options.command == "report":
            return report_command(options)
        elif options.command == "tiers" and options.action == "record":
            print(record_command(options), end="")
        elif options.command == "tiers":
            print(tiers_command(options), end="" if options.action == "render" else "\n")
        elif options.command == "diagnose":
            return diagnose_command(options)
        elif options.command == "doctor":
            return doctor_command(options)
        else:
            return patches(options)
    except GpuwrightError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _tier_commands(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ladder", help="print this ladder alone, of every stack that has it")
    parser.add_argument("--stack", help="print the ladders of this stack alone")
    parser.set_defaults(group="gpu")
    actions = parser.add_subparsers(dest="action")
    diff = actions.add_parser(
        "diff",
        help="what changes from tier A to tier B, or with the same ladder and tier from one stack to another",
        usage="%(prog)s [options] A B\n       %(prog)s --stacks A B [LADDER]",
        description="Print a line for each change: + comes, - goes, ~ differs. A and B are tiers of a group's ladder, "
        "or, after --stacks, stacks of catalog/stacks/: then the ladders that both have are compared tier by tier.",
    )
    diff.add_argument("names", nargs="*", metavar="NAME", help="two tiers; with --stacks the one ladder to print")
    diff.add_argument("--stacks", nargs=2, metavar=("A", "B"), help="compare the ladders of two stacks")
    render = actions.add_parser("render", help="print a tier's launch script as a node would get it")
    render.add_argument("tier", metavar="TIER")
    render.add_argument("--unit", action="store_true", help="print its systemd unit instead")
    record = actions.add_parser(
        "record",
        help="propose a benchmark run as a tier's evidence: a diff of its stack's tiers file",
        description="Print a diff of catalog/tiers/STACK.yaml, for `git apply`, that adds a run to its tier's evidence "
        "and sets the status. It is compared with the runs beside it, or with those of results/.",
    )
    record.add_argument("result", metavar="RESULT.json", type=Path, help="a record, such as results/HOST/RUN.json")
    record.add_argument(
        "--status", choices=("works", "rejected", "blocked"), help="default: by the run and its comparison"
    )
    for action in (diff, render):
        action.add_argument("--group", default="gpu", help="whose group_data, and so which ladder (default: gpu)")
        action.add_argument(
            "--members", default="", help="for a cluster: the addresses of its hosts, by rank, with commas"
        )
        action.add_argument("--rank", type=int, default=0, help="which of them (default: 0)")
        action.add_argument("--stack", help="another stack than the group's")


def tiers_command(options: argparse.Namespace) -> str:
    """The ladders, the difference of two tiers or stacks, or a rendered file. Raises GpuwrightError."""
    catalogue = load_catalogue()
    if options.action is None:
        return tiers.listing(catalogue, options.ladder, options.stack)
    if options.action == "diff" and options.stacks:
        if len(options.names) > 1:
            raise GpuwrightError(f"--stacks compares one ladder, or all; found {' '.join(options.names)}")
        return tiers.between_stacks(catalogue, *options.stacks, *options.names)
    if options.action == "diff" and len(options.names) != 2:
        raise GpuwrightError(f"name two tiers, or two stacks with --stacks; found {' '.join(options.names) or 'none'}")
    members = [member for member in options.members.split(",") if member]
    if options.action == "render":
        spec = tiers.spec_of(catalogue, options.group, options.tier, members, options.rank, options.stack)
        return (spec.systemd_files[0] if options.unit else spec.active_script).text
    one, other = (
        tiers.spec_of(catalogue, options.group, name, members, options.rank, options.stack) for name in options.names
    )
    return tiers.difference(one.ladder, one.tier, other.tier, one.data.ready_timeout_s)


def diagnose_command(options: argparse.Namespace) -> int:
    """Print why a server ended. Returns 0, or 2 when it crashed and the cause is not known."""
    try:
        data = sys.stdin.buffer.read() if options.log == "-" else Path(options.log).read_bytes()
    except OSError as error:
        raise GpuwrightError(f"{options.log} cannot be read: {error.strerror}") from None
    log = data.decode("utf-8", "replace")
    catalogue = load_catalogue()
    if options.stack and options.stack not in catalogue.stacks:
        raise GpuwrightError(f'there is no stack "{options.stack}"; {nearest(options.stack, catalogue.stacks)}')
    signatures = catalogue.signatures
    if options.stack:
        signatures = signatures.of(catalogue.stacks[options.stack].engine_pin)
    found = diagnose.diagnose(log, signatures)
    answer = diagnose.as_json(found, options.log)
    print(json.dumps(answer, indent=1) if options.json else diagnose.report(found, options.log))
    return 2 if found.verdict == "unknown" else 0


def doctor_command(options: argparse.Namespace) -> int:
    """Judge a saved observation. Returns 0 where nothing stops a deploy, else 2."""
    try:
        text = options.observation.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise GpuwrightError(f"{options.observation} cannot be read: {error.strerror}") from None
    state = read_observation(text)
    spec = tiers.spec_of(load_catalogue(), options.group, None, [], 0)
    found = examine_node(spec, state)
    if options.json:
        print(json.dumps(checks.as_json(options.observation.stem, found, state.problems), indent=1))
    else:
        for line in checks.lines(found, everything=options.all):
            print(line)
        print(f"{options.observation}: {'passes' if found.passes else 'does not pass'}: {found.summary}")
    return 0 if found.passes else 2


def _benchmark_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    judge = commands.add_parser(
        "judge",
        help="say whether an output file of sglang.bench_serving may be called a result (0), or not (2)",
        description="Judge one file that sglang.bench_serving wrote with --output-details, by catalog/acceptance.yaml. "
        "What was asked for is taken from the file where no option says it, so say at least --prompts. Exit code 0: "
        "accepted; 2: rejected, a line for each rule it breaks; 1: the file cannot be read.",
    )
    judge.add_argument("raw", metavar="RAW.jsonl", type=Path)
    for name, text in (
        ("concurrency", "--max-concurrency of the run"),
        ("prompts", "--num-prompts of the run"),
        ("input-len", "tokens of each prompt"),
        ("output-len", "tokens of each answer"),
    ):
        judge.add_argument(f"--{name}", type=int, metavar="N", help=text)
    judge.add_argument("--min-duration", type=float, default=1.0, metavar="S", help="shortest run, in s (default: 1)")
    judge.add_argument("--json", action="store_true", help="print JSON")
    compared = commands.add_parser(
        "compare",
        help="compare two benchmark runs",
        description="Compare two runs of one host. Each is a record (a path) or a tier's name: its latest accepted run "
        "(with --host where several hosts ran it). Exit code 0: the candidate was not seen slower than the reference; "
        "2: it is slower, answers differently, or cannot be compared; 1: an error.",
    )
    compared.add_argument("candidate", metavar="CANDIDATE")
    compared.add_argument("reference", metavar="REFERENCE", nargs="?", help="default: the ladder's first tier")
    compared.add_argument("--host", help="whose runs tiers are looked for in, such as @local")
    compared.add_argument("--results", type=Path, default=RESULTS, help="the folder of records (default: results/)")
    compared.add_argument("--json", action="store_true", help="print JSON")
    report = commands.add_parser(
        "report",
        help="write one HTML file about all benchmark runs on record",
        description="Write one HTML file that loads nothing about every record. Exit code 0; 1: an error.",
    )
    report.add_argument("--results", type=Path, default=RESULTS, help="the folder of records (default: results/)")
    report.add_argument("--output", type=Path, default=Path("report.html"), help="default: report.html")
    commands.add_parser("schema", help="write the JSON schemas of records and drift reports to docs/schema/")


def wheelhouse_command(options: argparse.Namespace) -> str:
    """Gather a stack's wheels; what to say of it."""
    (stack,) = _stacks([options.stack])
    left_out: set[str] = set()
    if options.beside:
        lock = read_lock(lock_path(stack, options.python))
        patched = {patch.distribution for patch in load_catalogue().patches_for(lock.versions)}
        left_out = brought_by(options.beside, lock, patched)
    return gather(stack, options.python, options.to, prune=options.prune, left_out=left_out)


def judge_command(options: argparse.Namespace) -> int:
    """Judge a raw file. Returns 0 accepted, 2 rejected."""
    try:
        text = options.raw.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise GpuwrightError(f"{options.raw} cannot be read: {error.strerror}") from None
    asked = {name: getattr(options, name) for name in ("concurrency", "prompts", "input_len", "output_len")}
    rules = load_catalogue().acceptance.rules
    broken = judge_file(rules, text, asked, options.min_duration)
    verdict = "rejected" if broken else "accepted"
    if options.json:
        print(json.dumps({"file": str(options.raw), "verdict": verdict, "broken": broken}, indent=1))
    else:
        print("\n".join([f"{options.raw}: {verdict}", *(f"  breaks {rule}" for rule in broken)]))
    return 2 if broken else 0


def compare_command(options: argparse.Namespace) -> int:
    """Compare two runs. Returns 0 where the candidate was not seen slower, else 2."""
    records, _ = _read(options.results)
    candidate = _run(options.candidate, records, options.host)
    named = options.reference or candidate.reference
    path = Path(named)
    reference = (
        read_record(path)
        if path.suffix == ".json"
        else compare.reference_for(candidate, records, _tier(named, records))
    )
    if reference is None:
        raise GpuwrightError(f"tier {named} has no other run on {candidate.inventory_host} in {shown(options.results)}")
    found = compare.compare(reference, candidate, load_catalogue().acceptance.comparison)
    print(json.dumps(compare.as_json(found), indent=1) if options.json else compare.report(found))
    return 0 if found.passes else 2


def _run(name: str, records: list[Record], host: str | None) -> Record:
    """The record that a path or a tier's name means."""
    if Path(name).suffix == ".json":
        return read_record(Path(name))
    _tier(name, records)
    runs = [record for record in records if record.tier == name and record.verdict == "accepted"]
    hosts = sorted({record.inventory_host for record in runs})
    if host is not None:
        runs = [record for record in runs if folder_name(record.inventory_host) == folder_name(host)]
    elif len(hosts) > 1:
        raise GpuwrightError(f"tier {name} was run on several hosts, so say which: --host " + " or --host ".join(hosts))
    if not runs:
        raise GpuwrightError(f"tier {name} has no accepted run" + (f" on {host}" if host else ""))
    return runs[-1]


def _tier(name: str, records: list[Record]) -> str:
    names = {record.tier for record in records}
    if name not in names:
        hint = nearest(name, names) if names else "there is no record that can be read: deploy with smoke on"
        raise GpuwrightError(f'no run of a tier "{name}" is on record; {hint}')
    return name


def record_command(options: argparse.Namespace) -> str:
    """The diff that makes a run its tier's evidence."""
    record = read_record(options.result)
    path = options.result.resolve()
    beside = path.parent.name == folder_name(record.inventory_host)
    records, _ = _read(path.parent.parent if beside else RESULTS)
    return evidence.proposal(record, records, load_catalogue().acceptance.comparison, options.status)


def report_command(options: argparse.Namespace) -> int:
    """Write the report. Returns 0."""
    from gpuwright.report import number_of, write_report  # matplotlib, a second to import, and needed by nobody else

    records, problems = _read(options.results)
    if not records:
        raise GpuwrightError(f"{shown(options.results)} holds no record that can be read: deploy with smoke on")
    if options.output.is_dir():
        raise GpuwrightError(
            f"{options.output} is a folder: name a file in it, such as {options.output / 'report.html'}"
        )
    try:
        write_report(records, problems, load_catalogue(), options.output)
    except OSError as error:
        raise GpuwrightError(f"{options.output} cannot be written: {error.strerror}") from None
    hosts = len({record.inventory_host for record in records})
    print(f"wrote {shown(options.output)}: {number_of(len(records), 'run')} of {number_of(hosts, 'host')}")
    return 0


def _read(folder: Path) -> tuple[list[Record], list[str]]:
    """The records below a folder, and what cannot be read, which is said on stderr too."""
    records, problems = read_records(folder)
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    return records, problems


def _patch_commands(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offline", action="store_true", help="do not check the diffs against the pinned wheels")
    actions = parser.add_subparsers(dest="action")
    record = actions.add_parser("waiver", help="print the record that a benchmark authority asks for")
    record.add_argument("id", metavar="ID")
    new = actions.add_parser("new", help="make a patch from an edited copy of a distribution's file")
    new.add_argument("--id", required=True, help="the entry's id, such as flashinfer-cuda-version-from-torch")
    new.add_argument("--distribution", required=True, help="such as flashinfer-python")
    new.add_argument("--file", required=True, help="its path in site-packages, such as flashinfer/jit/core.py")
    new.add_argument("--edited", required=True, type=Path, help="the edited copy, of the file as it is now patched")
    new.add_argument("--why", required=True, help="what goes wrong without it")
    new.add_argument("--upstream", required=True, help="URL of the issue or change it stands for")
    new.add_argument("--remove-when", required=True, help="when it is no longer needed")
    new.add_argument("--stack", help="whose version it is for, where stacks pin several; an id may have one entry each")


def patches(options: argparse.Namespace) -> int:
    """List and check the series (1 when a diff does not make its post-image), print a waiver, or make a patch."""
    catalogue = load_catalogue()
    if options.action == "waiver":
        print("\n".join(series.waiver(patch) for patch in series.find(catalogue, options.id)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        wheels = series.Wheels(_uv(), catalogue, Path(folder))
        if options.action == "new":
            fields = ("id", "distribution", "file", "edited", "why", "upstream", "remove_when", "stack")
            new = series.NewPatch(**{name: getattr(options, name) for name in fields})
            print(series.written_where(series.make(new, catalogue, wheels), new))
            return 0
        rows = series.check(catalogue, wheels, offline=options.offline)
    print(series.listing(rows))
    return 1 if any(row.problem for row in rows) else 0


def _uv() -> Path:
    return Path(sys.executable).with_name("uv")


def _stacks(names: list[str]) -> list[Stack]:
    found = {path.stem: path for path in sorted((REPOSITORY / "catalog" / "stacks").glob("*.yaml"))}
    for name in names:
        if name not in found:
            raise GpuwrightError(f'there is no stack "{name}"; {nearest(name, found)}')
    return [load_yaml(found[name], Stack)[0] for name in names or found]


def lock(stacks: list[Stack]) -> None:
    """Compile every lock of the given stacks, and the lock of the tools."""
    LOCKS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for stack in stacks:
            for python in stack.pythons:
                path = lock_path(stack, python)
                path.write_text(compile_lock(_uv(), stack, python, Path(folder)), encoding="utf-8")
                print(f"wrote {shown(path)}")
    command = [
        str(_uv()), "pip", "compile", "--quiet", "catalog/tools.in", "--universal", "--python-version", "3.9",
        "--generate-hashes", "--no-annotate", "--custom-compile-command", "make lock", "--output-file", str(TOOLS_LOCK),
    ]  # fmt: skip
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    print(f"wrote {shown(TOOLS_LOCK)}")


def flags(stacks: list[Stack]) -> None:
    """Write the flags file of every given stack, from the source in its engine's pinned wheel."""
    for stack in stacks:
        with tempfile.TemporaryDirectory() as folder:
            command = [str(_uv()), "pip", "install", "--quiet", "--no-deps", "--target", folder, stack.engine_pin]
            if subprocess.run(command).returncode:
                raise GpuwrightError(f"{stack.engine_pin} could not be fetched from the package index")
            text = dump_flags(stack.engine, stack.engine_version, read_flags(Path(folder) / stack.engine))
        flags_path(stack).write_text(text, encoding="utf-8")
        print(f"wrote {shown(flags_path(stack))}")


if __name__ == "__main__":
    sys.exit(main())
