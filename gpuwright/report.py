"""The report: one HTML file about every benchmark run on record, with its plots inside and nothing to load."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib import ticker
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle

from gpuwright import REPOSITORY
from gpuwright.catalogue import Catalogue
from gpuwright.compare import Compared, compare, reference_for
from gpuwright.record import LevelRecord, Record, latest
from gpuwright.tiers import standing_of

COLOURS = 8  # as many as the page's style names
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # seven: with eight colours, fifty-six looks
LINES = {"-": "", "--": "6 3", ":": "2 3", "-.": "7 3 2 3"}  # matplotlib's names, and SVG's dashes
RUNTIMES = 2  # of a tier on a host: what it runs on now, and what it ran on before
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

    @property
    def line(self) -> str:
        """matplotlib's name of its line."""
        return list(LINES)[self.number % len(LINES)]

    @property
    def swatch(self) -> Markup:
        """Its line and marker, as they are in the plots."""
        shape = MarkerStyle(self.marker)
        polygons: Any = shape.get_path().transformed(shape.get_transform()).to_polygons()
        drawn = " ".join(f"{18 + 9 * x:.1f},{6 - 9 * y:.1f}" for x, y in polygons[0])
        return Markup(
            '<svg class="swatch" viewBox="0 0 36 12" aria-hidden="true"><path d="M1 6H35" fill="none" stroke="{0}" '
            'stroke-width="1.5" stroke-dasharray="{1}"/><polygon points="{2}" fill="{0}"/></svg>'
        ).format(f"var(--c{self.colour})", LINES[self.line], drawn)


@dataclass(frozen=True)
class Panel:
    """One host under one load: its curves, its plots, its comparisons."""

    host: str
    machines: list[str]
    curves: list[Curve]
    plots: list[Markup]
    compared: list[Compared]


@dataclass(frozen=True)
class Load:
    """What was asked of one ladder's server, and every host that was asked it."""

    ladder: str
    about: str
    detail: str
    per_gpu: bool
    own_axes: bool
    panels: list[Panel]


@dataclass
class Ladder:
    """A ladder's tiers, what is known of each, and its latest run on every host."""

    name: str
    stack: str
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
    environment.filters["figure"] = lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
    environment.filters["number_of"] = number_of
    text = environment.get_template("report.html.j2").render(
        made_at=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        records=records,
        ladders=_ladders(records, catalogue),
        loads=_loads(records, catalogue),
        rejected=[(record, reasons(record)) for record in reversed(records) if record.verdict == "rejected"],
        problems=problems,
        confidence=catalogue.acceptance.comparison.confidence,
    )
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def number_of(count: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {what}" + ("" if count == 1 else "s")


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
    for stack, name in dict.fromkeys((record.stack, record.ladder) for record in records):
        ladder = catalogue.ladders.get(stack, {}).get(name)
        if ladder is None:
            continue
        runs = [record for record in records if (record.stack, record.ladder) == (stack, name)]
        hosts = list(dict.fromkeys(record.inventory_host for record in runs))
        told = Ladder(name, stack, ladder.about, hosts)
        for tier in ladder.tiers:
            known = standing_of(catalogue, stack, tier)
            runs_of = [latest(r for r in runs if r.tier == tier.name and r.inventory_host == host) for host in hosts]
            told.rows.append(
                {"tier": tier, "known": known, "latest": [_outcome(r, records, catalogue) for r in runs_of]}
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


def _loads(records: Sequence[Record], catalogue: Catalogue) -> list[Load]:
    loads: list[Load] = []
    newest_first = reversed(records)
    for ladder, digest in dict.fromkeys((record.ladder, record.benchmark_digest) for record in newest_first):
        runs = [r for r in records if (r.ladder, r.benchmark_digest) == (ladder, digest) and counted(r)]
        if not runs:
            continue
        hosts = list(dict.fromkeys(record.inventory_host for record in runs))
        shown = {host: _shown([r for r in runs if r.inventory_host == host]) for host in hosts}
        labels = _labels([record for host in hosts for record in shown[host]])
        curves = {host: _curves(shown[host], labels) for host in hosts}
        per_gpu = all(record.gpu_count for record in runs)
        tops = [max(level.spread["output_tok_s"][1] for c in curves[host] for level in c.levels) for host in hosts]
        own_axes = max(tops) > 20 * min(tops)  # on the other's axes one of them would be a flat line
        common = _limits([curve for each in curves.values() for curve in each], per_gpu)
        panels = []
        for position, host in enumerate(hosts):
            limits = _limits(curves[host], per_gpu) if own_axes else common
            name = f"{len(loads)}-{position}"
            plots = [_svg(plot, curves[host], limits, per_gpu, f"{name}-{n}") for n, plot in enumerate(PLOTS)]
            compared = _compared(shown[host], records, catalogue)
            panels.append(Panel(host, _machines(shown[host]), curves[host], plots, compared))
        load = runs[-1].load
        about = f"profile {runs[-1].profile}: {load['input_len']} tokens in, {load['output_len']} out"
        detail = (
            f"concurrency {', '.join(map(str, load['levels']))}; {load['repeats']} repeats of "
            f"{load['prompts_per_concurrency']} requests a client; benchmark digest {digest[:8]}"
        )
        loads.append(Load(ladder, about, detail, per_gpu, own_axes, panels))
    return loads


def _shown(runs: Sequence[Record]) -> list[Record]:
    """Of one host's runs the one to plot for each tier and runtime, the last runtimes of each tier alone: the latest in
    which every level counts, else the latest.
    """
    found: dict[tuple[str, str], Record] = {}
    for record in runs:  # oldest first
        key = (record.tier, record.runtime_digest)
        if key not in found or record.verdict == "accepted" or found[key].verdict != "accepted":
            found.pop(key, None)
            found[key] = record
    kept: list[Record] = []
    for record in reversed(found.values()):
        if sum(other.tier == record.tier for other in kept) < RUNTIMES:
            kept.insert(0, record)
    return kept


def _labels(runs: Sequence[Record]) -> dict[tuple[str, str], str]:
    """The name of each curve, in the order of their numbers: the tier's, with the runtime where it ran on several."""
    keys = list(dict.fromkeys((record.tier, record.runtime_digest) for record in runs))
    keys.sort(key=lambda key: key[0] != runs[-1].reference)
    tiers = [tier for tier, _ in keys]
    return {key: key[0] if tiers.count(key[0]) == 1 else f"{key[0]}, runtime {key[1][:8]}" for key in keys}


def _curves(runs: Sequence[Record], labels: dict[tuple[str, str], str]) -> list[Curve]:
    by_key = {(record.tier, record.runtime_digest): record for record in runs}
    return [
        Curve(by_key[key], label, number, counted(by_key[key]))
        for number, (key, label) in enumerate(labels.items())
        if key in by_key
    ]


def _machines(runs: Sequence[Record]) -> list[str]:
    """The machine in words: once, or as often as it differs among the runs, with whose it is."""
    by_words: dict[str, list[str]] = {}
    for record in runs:
        by_words.setdefault(_machine(record), []).append(record.tier)
    if len(by_words) == 1:
        return list(by_words)
    return [f"{', '.join(dict.fromkeys(tiers))}: {words}" for words, tiers in by_words.items()]


def _machine(record: Record) -> str:
    rest = f"{record.host.cpus} CPUs ({record.host.cpu}), Linux {record.host.kernel}"
    if not record.gpu_count:
        return f"no GPU; {rest}"

    def values(name: str, unit: str) -> str:
        found = dict.fromkeys(getattr(gpu, name) for gpu in record.gpus if getattr(gpu, name) is not None)
        return f", {'/'.join(f'{value:g}' for value in found)} {unit}" if found else ""

    names = "/".join(dict.fromkeys(gpu.name for gpu in record.gpus))
    limits = values("power_limit_w", "W") + values("max_sm_clock_mhz", "MHz at most")
    gpus = "1 GPU" if record.gpu_count == 1 else f"{record.gpu_count} GPUs"
    return f"{gpus} stated: {names}{limits}, driver {record.driver}; {rest}"


def _compared(runs: Sequence[Record], records: Sequence[Record], catalogue: Catalogue) -> list[Compared]:
    found = []
    for record in runs:
        reference = reference_for(record, records, record.reference) if record.tier != record.reference else None
        if reference is not None:
            found.append(compare(reference, record, catalogue.acceptance.comparison))
    return found


Limits = dict[str, tuple[float, float]]


def per_user(level: LevelRecord) -> float:
    """Output tokens/s that a user sees once an answer has begun: the inverse of the median TPOT."""
    assert level.median is not None
    return 1000 / level.median.tpot_p50_ms


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


def _draw(axes: Any, curve: Curve, x: list[float], spans: list[tuple[float, float, float]]) -> None:
    """A curve with the bars of its spreads; the points of queued levels are hollow."""
    colour = f"#0102{curve.colour + 16:02x}"
    y = [span[0] for span in spans]
    bars = [[span[1] for span in spans], [span[2] for span in spans]]
    axes.errorbar(x, y, yerr=bars, color=colour, linestyle=curve.line, linewidth=1.5, elinewidth=1, capsize=3)
    for queued in (False, True):
        points = [(a, b) for a, b, level in zip(x, y, curve.levels, strict=True) if level.queued == queued]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=colour, linestyle="none", marker=curve.marker, markersize=6 if queued else 5,
                markerfacecolor="none" if queued else colour,
            )  # fmt: skip


def _against_concurrency(name: str, axes: Any, curves: Sequence[Curve], limits: Limits) -> None:
    for curve in curves:
        x = [float(level.concurrency) for level in curve.levels]
        _draw(axes, curve, x, [_span(level, name) for level in curve.levels])
    axes.set_xscale("log")
    axes.set_xlim(limits["concurrency"])
    axes.set_ylim(limits[name])
    ticks = _apart(sorted({level.concurrency for curve in curves for level in curve.levels}), limits["concurrency"])
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("concurrent requests")


def _apart(ticks: Sequence[int], limits: tuple[float, float]) -> list[int]:
    """Of some ticks of a logarithmic axis, from the highest, those whose labels do not run into each other."""
    least = (limits[1] / limits[0]) ** (1 / 12)
    kept: list[int] = []
    for tick in reversed(ticks):
        if not kept or kept[0] / tick >= least:
            kept.insert(0, tick)
    return kept


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
    for position, curve in enumerate(curves):
        spans = [_span(level, "output_tok_s", curve.record.gpu_count if per_gpu else 1) for level in curve.levels]
        x = [per_user(level) for level in curve.levels]
        _draw(axes, curve, x, spans)
        away = ((4, 4), (4, -9), (-10, 4), (-10, -9))[position % 4]
        for level, right, span in zip(curve.levels, x, spans, strict=True):
            axes.annotate(str(level.concurrency), (right, span[0]), away, textcoords="offset points", fontsize=7)
    axes.set_xlim(limits["user"])
    axes.set_ylim(limits["gpu"])
    axes.set_xlabel("output tokens/s per user (1 / TPOT)")
    axes.set_ylabel(f"output tokens/s per {'GPU' if per_gpu else 'node'}")
    return "Interactivity and throughput, by concurrency"


PLOTS: tuple[Callable[[Any, Sequence[Curve], Limits, bool], str], ...] = (_throughput, _ttft, _pareto)


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
