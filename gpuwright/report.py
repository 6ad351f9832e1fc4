"""The report: one HTML file about every benchmark run on record, with its plots inside and nothing to load."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib import ticker
from matplotlib.figure import Figure

from gpuwright import REPOSITORY
from gpuwright.catalogue import Catalogue
from gpuwright.compare import Compared, compare, reference_for
from gpuwright.record import LevelRecord, Record
from gpuwright.tiers import standing_of

COLOURS = 8  # as many as the page's style names; marker and line tell the rest apart
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")
# Colours that no plot would choose: each is put in the place of one that the page's style decides, light or dark.
TEXT, GRID = "#010203", "#010204"


@dataclass(frozen=True)
class Curve:
    """One run as it is plotted: the levels that count, lowest first. `number` chooses colour, marker and line."""

    record: Record
    label: str
    number: int
    levels: list[LevelRecord]

    @property
    def colour(self) -> int:
        """Which of the page's colours, from 1."""
        return self.number % COLOURS + 1

    @property
    def marker(self) -> str:
        """matplotlib's name of its marker."""
        return MARKERS[self.number % len(MARKERS)]


@dataclass(frozen=True)
class Panel:
    """One host under one load: its curves, its plots, its comparisons."""

    host: str
    machine: str
    curves: list[Curve]
    plots: list[Markup]
    compared: list[Compared]


@dataclass(frozen=True)
class Load:
    """What was asked of one ladder's server, and every host that was asked it."""

    ladder: str
    about: str
    per: str
    panels: list[Panel]


@dataclass
class Ladder:
    """A ladder's tiers, what is known of each, and its latest run on every host."""

    name: str
    about: str
    hosts: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)


def write_report(records: Sequence[Record], problems: Sequence[str], catalogue: Catalogue, path: Path) -> None:
    """Write the report about `records` (oldest first) to `path`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(REPOSITORY / "files" / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = lambda value: f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
    text = environment.get_template("report.html.j2").render(
        made_at=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        records=records,
        ladders=_ladders(records, catalogue),
        loads=_loads(records, catalogue),
        rejected=[(record, reasons(record)) for record in reversed(records) if record.verdict == "rejected"],
        problems=problems,
    )
    path.write_text(text, encoding="utf-8")


def reasons(record: Record) -> list[str]:
    """Why a run, or a part of it, is rejected: a line for each broken rule."""
    found = [f"the run: {rule}" for rule in record.broken]
    for level in record.levels:
        found += [f"concurrency {level.concurrency}: {rule}" for rule in level.broken]
        for run in level.repeats if level.broken else ():
            found += [f"concurrency {level.concurrency}, repeat {run.number}: {rule}" for rule in run.broken]
    return list(dict.fromkeys(found))


def counted(record: Record) -> list[LevelRecord]:
    """The levels of a run that may be plotted and compared."""
    return [level for level in record.levels if record.level(level.concurrency)]


def _ladders(records: Sequence[Record], catalogue: Catalogue) -> list[Ladder]:
    found = []
    for name in dict.fromkeys(record.ladder for record in records):
        ladder = catalogue.ladders.get(name)
        if ladder is None:
            continue
        runs = [record for record in records if record.ladder == name]
        hosts = list(dict.fromkeys(record.inventory_host for record in runs))
        told = Ladder(name, ladder.about, hosts)
        for tier in ladder.tiers:
            known = standing_of(catalogue, ladder, tier)
            latest = [_last(r for r in runs if r.tier == tier.name and r.inventory_host == host) for host in hosts]
            told.rows.append(
                {"tier": tier, "known": known, "latest": [_outcome(r, records, catalogue) for r in latest]}
            )
        found.append(told)
    return found


def _outcome(record: Record | None, records: Sequence[Record], catalogue: Catalogue) -> dict[str, str]:
    """A run in three words: how it ended, beside the reference tier's, when."""
    if record is None:
        return {"style": "soft", "verdict": "none", "rest": ""}
    words = [record.started_at[:10]]
    reference = reference_for(record, records, record.reference) if record.tier != record.reference else None
    if record.verdict == "accepted" and reference is not None:
        found = compare(reference, record, catalogue.acceptance.comparison)
        words.insert(0, f"{found.verdict} as {reference.tier}" if found.verdict == "same" else found.verdict)
    style = "good" if record.verdict == "accepted" else "bad"
    return {"style": style, "verdict": record.verdict, "rest": ", ".join(["", *words])}


def _last(records: Iterable[Record]) -> Record | None:
    return max(records, key=lambda record: record.started_at, default=None)


def _loads(records: Sequence[Record], catalogue: Catalogue) -> list[Load]:
    loads: list[Load] = []
    for ladder, digest in dict.fromkeys((record.ladder, record.benchmark_digest) for record in records):
        runs = [r for r in records if (r.ladder, r.benchmark_digest) == (ladder, digest) and counted(r)]
        if not runs:
            continue
        labels = _labels(runs)
        hosts = list(dict.fromkeys(record.inventory_host for record in runs))
        per_gpu = all(record.gpu_count for record in runs)
        curves = {host: _curves([r for r in runs if r.inventory_host == host], labels) for host in hosts}
        limits = _limits([curve for each in curves.values() for curve in each], per_gpu)
        load = runs[-1].load
        about = f"profile {runs[-1].profile}: {load['input_len']} tokens in, {load['output_len']} out"
        panels = [
            Panel(
                host,
                _machine(curves[host][-1].record),
                curves[host],
                [
                    _svg(plot, curves[host], limits, per_gpu, f"{len(loads)}-{position}-{n}")
                    for n, plot in enumerate(PLOTS)
                ],
                _compared([curve.record for curve in curves[host]], records, catalogue),
            )
            for position, host in enumerate(hosts)
        ]
        loads.append(Load(ladder, about, "GPU" if per_gpu else "node", panels))
    return loads


def _labels(runs: Sequence[Record]) -> dict[tuple[str, str], str]:
    """The name of each curve, in the order of their numbers: the tier's, with the patch set where it ran on several."""
    keys = list(dict.fromkeys((record.tier, record.runtime_digest) for record in runs))
    keys.sort(key=lambda key: key[0] != runs[-1].reference)
    tiers = [tier for tier, _ in keys]
    return {key: key[0] if tiers.count(key[0]) == 1 else f"{key[0]}, runtime {key[1][:8]}" for key in keys}


def _curves(runs: Sequence[Record], labels: dict[tuple[str, str], str]) -> list[Curve]:
    latest = {(record.tier, record.runtime_digest): record for record in runs}
    numbers = {key: number for number, key in enumerate(labels)}
    return [Curve(latest[key], labels[key], numbers[key], counted(latest[key])) for key in labels if key in latest]


def _machine(record: Record) -> str:
    names = dict.fromkeys(gpu.name for gpu in record.gpus)
    gpus = (
        f"{record.gpu_count} GPUs stated, {', '.join(names)}, driver {record.driver}" if record.gpu_count else "no GPU"
    )
    return f"{gpus}; {record.host.cpus} CPUs ({record.host.cpu}), Linux {record.host.kernel}"


def _compared(runs: Sequence[Record], records: Sequence[Record], catalogue: Catalogue) -> list[Compared]:
    found = []
    for record in runs:
        reference = reference_for(record, records, record.reference) if record.tier != record.reference else None
        if reference is not None:
            found.append(compare(reference, record, catalogue.acceptance.comparison))
    return found


Limits = dict[str, tuple[float, float]]


def per_user(level: LevelRecord) -> float:
    """Output tokens/s that one of the concurrent users gets."""
    assert level.median is not None
    return level.median.output_tok_s / level.concurrency


def _span(level: LevelRecord, name: str, share: float = 1.0) -> tuple[float, float, float]:
    """A figure's median, and how far it reaches down and up from there."""
    low, high = level.spread[name]
    middle = getattr(level.median, name)
    return middle / share, (middle - low) / share, (high - middle) / share


def _limits(curves: Sequence[Curve], per_gpu: bool) -> Limits:
    """The axes that every host's plots share, so that they can be read side by side."""
    levels = [(level, curve.record.gpu_count if per_gpu else 1) for curve in curves for level in curve.levels]
    highest = {
        "output_tok_s": max(level.spread["output_tok_s"][1] for level, _ in levels),
        "ttft_p50_ms": max(level.spread["ttft_p50_ms"][1] for level, _ in levels),
        "user": max(per_user(level) for level, _ in levels),
        "gpu": max(level.spread["output_tok_s"][1] / share for level, share in levels),
    }
    lowest = min(level.spread["ttft_p50_ms"][0] for level, _ in levels)
    concurrencies = [level.concurrency for level, _ in levels]
    limits = {name: (0.0, value * 1.08) for name, value in highest.items()}
    limits["ttft_p50_ms"] = (lowest / 1.3, highest["ttft_p50_ms"] * 1.3)
    limits["concurrency"] = (min(concurrencies) / 1.3, max(concurrencies) * 1.3)
    return limits


def _against_concurrency(name: str, axes: Any, curves: Sequence[Curve], limits: Limits) -> None:
    ticks = sorted({level.concurrency for curve in curves for level in curve.levels})
    for curve in curves:
        spans = [_span(level, name) for level in curve.levels]
        axes.errorbar(
            [level.concurrency for level in curve.levels],
            [span[0] for span in spans],
            yerr=[[span[1] for span in spans], [span[2] for span in spans]],
            **_look(curve),
        )
    axes.set_xscale("log")
    axes.set_xlim(limits["concurrency"])
    axes.set_ylim(limits[name])
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("concurrent requests")


def _throughput(axes: Any, curves: Sequence[Curve], limits: Limits, per_gpu: bool) -> str:
    _against_concurrency("output_tok_s", axes, curves, limits)
    axes.set_ylabel("output tokens/s")
    return "Throughput"


def _ttft(axes: Any, curves: Sequence[Curve], limits: Limits, per_gpu: bool) -> str:
    axes.set_yscale("log")
    _against_concurrency("ttft_p50_ms", axes, curves, limits)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("median TTFT, ms")
    return "Time to first token"


def _pareto(axes: Any, curves: Sequence[Curve], limits: Limits, per_gpu: bool) -> str:
    for curve in curves:
        share = curve.record.gpu_count if per_gpu else 1
        spans = [_span(level, "output_tok_s", share) for level in curve.levels]
        x = [per_user(level) for level in curve.levels]
        y = [span[0] for span in spans]
        axes.errorbar(x, y, yerr=[[span[1] for span in spans], [span[2] for span in spans]], **_look(curve))
        for level, right, up in zip(curve.levels, x, y, strict=True):
            axes.annotate(str(level.concurrency), (right, up), (4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlim(limits["user"])
    axes.set_ylim(limits["gpu"])
    axes.set_xlabel("output tokens/s per user")
    axes.set_ylabel(f"output tokens/s per {'GPU' if per_gpu else 'node'}")
    return "Interactivity and throughput, by concurrency"


PLOTS: tuple[Callable[[Any, Sequence[Curve], Limits, bool], str], ...] = (_throughput, _ttft, _pareto)


def _look(curve: Curve) -> dict[str, Any]:
    return {
        "color": f"#0102{curve.colour + 16:02x}",
        "marker": curve.marker,
        "linestyle": LINES[curve.number % len(LINES)],
        "markersize": 5,
        "linewidth": 1.5,
        "elinewidth": 1,
        "capsize": 3,
    }


STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), TEXT
    ),
}


def _svg(
    plot: Callable[[Any, Sequence[Curve], Limits, bool], str],
    curves: Sequence[Curve],
    limits: Limits,
    per_gpu: bool,
    name: str,
) -> Markup:
    """A plot as inline SVG, in the page's own colours and type, with ids that no other plot of the page has."""
    style: Any = STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.3, 3.1), layout="constrained")
        axes = figure.add_subplot()
        title = plot(axes, curves, limits, per_gpu)
        axes.set_title(title, loc="left")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="p{name}-', text)
    text = re.sub(r"url\(#", f"url(#p{name}-", text)
    text = re.sub(r'href="#', f'href="#p{name}-', text)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" ?', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*" ?', r"<svg \1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    names = ", ".join(curve.label for curve in curves)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{Markup.escape(f"{title}: {names}")}" ', 1)
    text = text.replace(TEXT, "currentColor").replace(GRID, "var(--grid)")
    for number in range(1, COLOURS + 1):
        text = text.replace(f"#0102{number + 16:02x}", f"var(--c{number})")
    return Markup(text)  # noqa: S704 (matplotlib's own output; labels in it are escaped by it)
