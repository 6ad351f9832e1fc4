"""The report: what is in it, and how it looks in a browser (Chromium, where it is installed)."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as tree
from pathlib import Path

import pytest

from gpuwright.__main__ import main
from gpuwright.record import Record, read_records
from gpuwright.report import write_report
from tests.make import bench_spec, catalogue, record, summary
from tests.unit.test_compare import written

CHROMIUM = shutil.which("chromium")
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
    assert "r-hostile" not in before and "r-hostile" in rejected and "same-server" in rejected
    assert "concurrency 8: repeats: 2 of 3 repeats are accepted" in rejected
    assert "concurrency 8, repeat 1: exit-code: bench_serving ended with exit code 1" in rejected
    half = re.findall(r"<tr><td>no-overlap</td><td class=\"n\">(\d+)</td>", before)
    assert half == ["2"], "the level that counts, and not the one that does not"


def test_tiers_patches_comparisons_and_hosts_are_there(page: Path) -> None:
    text = page.read_text()
    for part in (
        "<td>baseline, runtime ", "no-radix against baseline", "<strong>faster</strong>", "queued: the server holds",
        "<h3>@local</h3>", "<h3>gpu-01</h3>", "x.json is no benchmark record", "flashinfer-cuda-version-from-torch",
        "one request runs and the others wait", bench_spec().patch_set_digest[:16], 'aria-label="Throughput: ',
    ):  # fmt: skip
        assert part in text, part


def test_the_plots_show_what_the_records_say(page: Path) -> None:
    """The labels of the Pareto picture's points are the levels' concurrencies, as often as there are points."""
    figures = re.findall(r"<svg .*?</svg>", page.read_text(), re.S)
    assert len(figures) == 6, "three a host"
    pareto = tree.fromstring(figures[2])
    texts = ["".join(node.itertext()).strip() for node in pareto.iter() if node.tag.endswith("text")]
    assert texts.count("2") == 4 and texts.count("8") == 3, "baseline twice, no-radix, and half of no-overlap"


def test_report_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "results", *runs()[:2])
    (folder / "local" / "old.json").write_text("{}")
    output = tmp_path / "out.html"
    assert main(["report", "--results", str(folder), "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert said.out == f"wrote {output}: 2 runs of 1 hosts\n" and "old.json is no benchmark record" in said.err
    assert output.read_text().startswith("<!doctype html>")
    assert main(["report", "--results", str(tmp_path / "none")]) == 1
    assert "holds no record yet: deploy with smoke on" in capsys.readouterr().err
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
        sizes = tab.evaluate("[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().width)")
        browser.close()
    assert messages == []
    assert len(sizes) == 6 and min(sizes) > 250, "no plot is squeezed"
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
