"""A drift check's report as automation reads it: JUnit for CI, a text file for Prometheus' node_exporter."""

from __future__ import annotations

import xml.etree.ElementTree as tree
from datetime import datetime

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gpuwright.drift import CONVERGE, Report, Verdict

KINDS = ("corrective", "intentional", "unknown")


def junit(report: Report) -> str:
    """A test suite for each host, in it a test case for each stage: a failure where it has drifted, an error where it
    could not be judged, skipped where this check leaves it out.
    """
    suites = tree.Element("testsuites", name="drift", time=f"{report.seconds:.3f}")
    for verdict in report.hosts:
        suite = tree.SubElement(suites, "testsuite", name=verdict.host, timestamp=report.at.rstrip("Z"))
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for stage in CONVERGE:
            counts["tests"] += 1
            each = tree.SubElement(suite, "testcase", classname=f"drift.{verdict.host}", name=stage, time="0")
            if told := _outcome(verdict, stage):
                tag, message, text = told
                counts[{"failure": "failures", "error": "errors", "skipped": "skipped"}[tag]] += 1
                tree.SubElement(each, tag, message=_plain(message)).text = _plain(text)
        suite.attrib.update({name: str(count) for name, count in counts.items()}, time=f"{verdict.seconds or 0:.3f}")
    tree.indent(suites)
    return tree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _outcome(verdict: Verdict, stage: str) -> tuple[str, str, str] | None:
    found = verdict.of(stage)
    text = "\n".join(
        f"{each.kind}: {each}\n  -> {each.mend}" + (f"\n{each.diff}" if each.diff else "") for each in found
    )
    if any(each.kind == "unknown" for each in found):
        return "error", verdict.error, text
    if found:
        return "failure", f"{len(found)} findings" if found[1:] else str(found[0]), text
    if not verdict.stages:  # nothing of the host is known
        return "error", verdict.error, verdict.error
    return None if stage in verdict.stages else ("skipped", "left out by `stages`", "")


def _plain(text: str) -> str:
    """Without what XML 1.0 cannot hold: a node's answer may be anything."""
    return "".join(c if c in "\t\n" or (ord(c) >= 32 and c not in "\ufffe\uffff") else "�" for c in text)


def prometheus(report: Report) -> str:
    """The report for node_exporter's textfile collector."""
    registry = CollectorRegistry()

    def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"gpuwright_drift_{name}", about, labels, registry=registry)

    findings = gauge("findings", "Findings of the last drift check.", ("host", "stage", "kind"))
    error = gauge("check_error", "1 where the host could not be judged.", ("host",))
    drifted = gauge("drifted", "1 where the host has drifted.", ("host",))
    seconds = gauge("host_seconds", "How long the host took, from connecting to its verdict.", ("host",))
    spec = gauge("spec_info", "The spec digest that the host was held against.", ("host", "spec"))
    for verdict in report.hosts:
        error.labels(verdict.host).set(verdict.status == "error")
        drifted.labels(verdict.host).set(verdict.status == "drift")
        seconds.labels(verdict.host).set(verdict.seconds or 0)
        if verdict.spec_digest:
            spec.labels(verdict.host, verdict.spec_digest[:16]).set(1)
        for stage in verdict.stages:
            for kind in KINDS:
                count = sum(each.kind == kind for each in verdict.of(stage))
                findings.labels(verdict.host, stage, kind).set(count)
    at = datetime.fromisoformat(report.at.replace("Z", "+00:00"))
    gauge("check_timestamp_seconds", "When the last drift check began.").set(at.timestamp())
    gauge("check_seconds", "How long the whole drift check took.").set(report.seconds)
    return generate_latest(registry).decode()
