"""The report: what is in it, and how it looks in a browser (Chromium, where it is installed)."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gpuwright.__main__ import main
from gpuwright.record import Record, read_records
from gpuwright.report import (
    Curve,
    _apart,
    _limits,
    _machines,
    _pareto,
    _shown,
    _throughput,
    _ttft,
    counted,
    write_report,
)
from tests.make import bench_spec, catalogue, gpu_spec, record, summary
from tests.unit.test_compare import written

CHROMIUM = shutil.which("chromium")
LONG = "a_host_with_a_name_that_is_far_too_long_for_the_width_of_a_phone.rack17.example"
LEVELS = {2: [300.0, 301.0, 302.0], 8: [1200.0, 1210.0, 1190.0]}


def hostile(run: str) -> Record:
    """A rejected run whose texts would be markup if they were not escaped."""
    return record(bench_spec(tier="no-overlap"), run=run, processes_after=["<script>alert(1)</script>"])


def runs() -> list[Record]:
    made = summary(bench_spec(tier="no-overlap"))
    made["levels"][1]["repeats"][1]["exit_code"] = 1
    return [
        record(bench_spec(), run="r-base"),
        record(bench_spec(tier="no-radix"), LEVELS, run="r-other", max_running_requests=7),
        record(bench_spec(tier="no-overlap"), run="r-half", levels=made["levels"]),
        record(bench_spec("gpu-01"), run="r-elsewhere"),
        record(bench_spec(LONG), run="r-long"),
        record(bench_spec(patches="none"), run="r-pristine"),
        hostile("r-hostile"),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(runs(), ["x.json is no benchmark record"], catalogue(), path)
    return path


def test_it_needs_nothing_from_anywhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r'(?:src|href|xlink:href)="([^"]*)"', text) + re.findall(r"url\(([^)]*)\)", text)
    assert links and all(link.startswith(("#", "data:,")) for link in links), links
    assert "@import" not in text and "<script" not in text


def test_every_id_is_used_once(page: Path) -> None:
    ids = re.findall(r'\bid="([^"]*)"', page.read_text())
    assert len(ids) > 100 and len(set(ids)) == len(ids)


def test_what_a_server_said_is_no_markup(page: Path) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.read_text()


def test_rejected_runs_are_named_with_their_reasons_and_plotted_nowhere(page: Path) -> None:
    before, _, rejected = page.read_text().partition('<h2 id="rejected">')
    assert "(some levels rejected)" in before
    assert "r-hostile" not in before and "r-hostile" in rejected and "same-server" in rejected
    assert "concurrency 8: repeats: 2 of 3 repeats are accepted" in rejected
    assert "concurrency 8, repeat 1: exit-code: bench_serving ended with exit code 1" in rejected
    half = re.findall(r'<tr><th scope="row">no-overlap</th><td class="n">(\d+)</td>', before)
    assert half == ["2"], "the level that counts, and not the one that does not"
    assert "the candidate&#39;s level of concurrency 8 is not accepted" in before, "and its comparison says so"


def test_tiers_patches_comparisons_and_hosts_are_there(page: Path) -> None:
    text = page.read_text()
    for part in (
        '<th scope="row">baseline, runtime ', "no-radix against baseline", "<strong>faster</strong>", "faster, queued",
        "<code>r-other</code> against <code>r-base</code>", "with their 95 % intervals", "1.498 [",
        "<h3>@local</h3>", "<h3>gpu-01</h3>", "x.json is no benchmark record", "flashinfer-cuda-version-from-torch",
        "one request runs and the others wait", bench_spec().patch_set_digest[:16], 'aria-label="Throughput: ',
    ):  # fmt: skip
        assert part in text, part


def test_the_plots_show_what_the_records_say() -> None:
    spec = bench_spec(tier="no-radix")
    one = record(spec, LEVELS, max_running_requests=7)
    curve = Curve(one, "no-radix", 1, counted(one))
    limits = _limits([curve], per_gpu=False)
    figures = [level.median for level in one.levels if level.median]
    tpots = [1000 / each.tpot_p50_ms for each in figures]
    for plot, x, y, spread in (
        (_throughput, [2, 8], [301.0, 1200.0], [(300.0, 302.0), (1190.0, 1210.0)]),
        (_ttft, [2, 8], [each.ttft_p50_ms for each in figures], [one.levels[n].spread["ttft_p50_ms"] for n in (0, 1)]),
        (_pareto, tpots, [301.0, 1200.0], [(300.0, 302.0), (1190.0, 1210.0)]),
    ):
        axes = Figure().add_subplot()
        plot(axes, [curve], limits, False)
        ((line, _, (bars,)),) = axes.containers
        assert line.get_xdata() == pytest.approx(x) and line.get_ydata() == pytest.approx(y)
        ends = [(low[1], high[1]) for low, high in bars.get_segments()]
        assert ends == [pytest.approx(each) for each in spread]
        filled, hollow = (found for found in axes.lines if found.get_marker() == curve.marker)
        assert filled.get_xdata() == pytest.approx(x[:1]) and hollow.get_xdata() == pytest.approx(x[1:])
        assert hollow.get_markerfacecolor() == "none" and filled.get_markerfacecolor() != "none", "8 is over 7: queued"
        low, high = axes.get_ylim()
        assert all(low < value < high for value in y)


def test_throughput_per_gpu_is_over_the_stated_number() -> None:
    spec = gpu_spec(profiles={"smoke": bench_spec().profile.model_dump()})
    gpu = {"index": 0, "name": "X", "memory_mib": 1.0, "power_limit_w": 600.0, "max_sm_clock_mhz": 2430.0,
           "sm_clock_mhz": None, "power_w": None, "temperature_c": None}  # fmt: skip
    one = record(spec, LEVELS, gpus=[gpu] * 8, driver="580.1")
    curve = Curve(one, "baseline", 0, counted(one))
    axes = Figure().add_subplot()
    _pareto(axes, [curve], _limits([curve], per_gpu=True), True)
    assert axes.containers[0][0].get_ydata() == pytest.approx([301 / 8, 150.0])
    assert axes.get_ylabel() == "output tokens/s per GPU"
    assert _machines([one]) == ["8 GPUs stated: X, 600 W, 2430 MHz at most, driver 580.1; 2 CPUs (EPYC), Linux 6.1"]
    assert _machines([one.model_copy(update={"gpu_count": 1})])[0].startswith("1 GPU stated: X")
    other = record(spec, LEVELS, gpus=[gpu] * 8, driver="570")
    assert [line.partition(":")[0] for line in _machines([one, other])] == ["baseline", "baseline"]


def test_no_two_of_fifty_curves_look_the_same() -> None:
    one = record(bench_spec())
    looks = {(c.colour, c.marker) for c in (Curve(one, "x", n, []) for n in range(56))}
    assert len(looks) == 56
    assert len({Curve(one, "x", n, []).swatch for n in range(9)}) == 9


def test_of_many_runs_the_latest_whole_one_is_shown_and_of_many_runtimes_the_last_two() -> None:
    def at(day: int, **changed: Any) -> Record:
        return record(bench_spec(), run=f"r{day}", started_at=f"2026-12-{day:02}T00:00:00Z").model_copy(update=changed)

    assert [r.run for r in _shown([at(1), at(2), at(3, verdict="rejected")])] == ["r2"]
    assert [r.run for r in _shown([at(1, verdict="rejected"), at(2, verdict="rejected")])] == ["r2"]
    assert [r.run for r in _shown([at(n, runtime_digest=f"{n}" * 64) for n in (1, 2, 3)])] == ["r2", "r3"]
    assert [r.run for r in _shown([at(1), at(2, tier="no-radix"), at(3)])] == ["r2", "r3"]


def test_labels_of_an_axis_do_not_run_into_each_other() -> None:
    ticks = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024]
    kept = _apart(ticks, (1 / 1.3, 1024 * 1.3))
    assert kept[-1] == 1024 and kept[0] == 1 and all(b / a >= 1.8 for a, b in itertools.pairwise(kept))
    assert _apart([1, 10, 256], (0.8, 300)) == [1, 10, 256]


def test_hosts_that_are_too_unlike_have_axes_of_their_own(tmp_path: Path) -> None:
    fast = {2: [90000.0, 90100.0, 90200.0], 8: [120000.0, 120100.0, 120200.0]}
    path = tmp_path / "report.html"
    write_report([record(bench_spec()), record(bench_spec("gpu-01"), fast)], [], catalogue(), path)
    assert "Each host has axes of its own" in path.read_text()
    write_report([record(bench_spec()), record(bench_spec("gpu-01"))], [], catalogue(), path)
    assert "All hosts have the same axes." in path.read_text()


def test_a_report_of_rejected_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report([hostile("r-hostile")], [], catalogue(), path)
    assert "r-hostile" in path.read_text() and "<svg" not in path.read_text()


def test_report_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "results", *runs()[:2])
    (folder / "local" / "old.json").write_text("{}")
    output = tmp_path / "out.html"
    assert main(["report", "--results", str(folder), "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert said.out == f"wrote {output}: 2 runs of 1 host\n" and "old.json is no benchmark record" in said.err
    assert output.read_text().startswith("<!doctype html>")
    assert main(["report", "--results", str(tmp_path / "none")]) == 1
    assert "holds no record that can be read: deploy with smoke on" in capsys.readouterr().err
    assert main(["report", "--results", str(folder), "--output", str(tmp_path / "none" / "x.html")]) == 1
    assert "x.html cannot be written: No such file or directory" in capsys.readouterr().err
    assert main(["report", "--results", str(folder), "--output", str(tmp_path)]) == 1
    assert f"{tmp_path} is a folder: name a file in it" in capsys.readouterr().err
    assert len(read_records(folder)[0]) == 2


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_looked_at_in_a_browser(page: Path, width: int, scheme: str) -> None:
    """No message on the console, nothing wider than the window, text that stands out from its background."""
    from playwright.sync_api import sync_playwright

    messages: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("requestfailed", lambda request: messages.append(request.url))
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        colours = tab.evaluate(
            """() => {
              const of = (node, name) => getComputedStyle(node)[name].match(/[0-9.]+/g).slice(0, 3).map(Number);
              const marks = [...document.querySelectorAll("svg path[style*='--c']")].map(node => of(node, "stroke"));
              const texts = [...document.querySelectorAll("svg text, td, p, h1")].map(
                node => of(node, node.closest("svg") ? "fill" : "color"));
              return {page: of(document.body, "backgroundColor"), marks, texts};
            }"""
        )
        plots = "[...document.querySelectorAll('.plots svg')].map(each => each.getBoundingClientRect().width)"
        sizes = tab.evaluate(plots)
        rows = "[...document.querySelectorAll('th[scope=row]')].map(each => each.getBoundingClientRect().width)"
        names = [width for width in tab.evaluate(rows) if width]  # what stands in closed details has none
        browser.close()
    assert messages == []
    assert names and min(names) > 80, "a tier's name is not broken into letters"
    assert len(sizes) == 9 and min(sizes) > 250, "no plot is squeezed"
    assert len(colours["marks"]) > 10
    assert min(contrast(each, colours["page"]) for each in colours["texts"]) >= 4.5
    assert min(contrast(each, colours["page"]) for each in colours["marks"]) >= 3


def contrast(one: list[float], other: list[float]) -> float:
    """The contrast ratio of two sRGB colours (0 to 255), as WCAG 2 defines it."""

    def luminance(colour: list[float]) -> float:
        parts = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
