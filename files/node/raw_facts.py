"""What one output file of sglang.bench_serving says, as facts to judge: counts, extremes and the summary's own figures.

Needs no request: the control machine judges files with the very same code.
"""

import json
import math
import re
import statistics

# Text of a model that computes NaN: token 0, which is "!" in most vocabularies, over and over.
FILLER = re.compile(r"!{16,}|(?:\bnan\b[\s,;]*){4,}", re.I)
ENDS_IN_FILLER = re.compile(r"(?:!{16,}|(?:\bnan\b[\s,;]*){4,})\s*$", re.I)
# What a server or a proxy says instead of an answer, in a stream that it began with HTTP 200.
ERROR_TEXT = re.compile(
    r"^\s*(?:(?:data: )?\{\s*\"(?:error\"|object\"\s*:\s*\"error)|internal server error|upstream connect error"
    r"|(?:http )?[45]\d\d (?:bad|internal|service|gateway|too|not|unauth))",
    re.I,
)
FIGURES = {
    "output_tok_s": "output_throughput",
    "total_tok_s": "total_throughput",
    "requests_s": "request_throughput",
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_mean_ms": "mean_tpot_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "itl_p99_ms": "p99_itl_ms",
    "e2e_p50_ms": "median_e2e_latency_ms",
    "mean_concurrency": "concurrency",
    "duration_s": "duration",
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def raw_facts(text):
    """The facts of a file's text (dict). Without a record that can be read: "lines" and "problem" alone.

    "told_*": what the record says was asked for; "prompts" as many as the record lists requests. Times are in ms,
    "duration_s" in s. "figures": the summary's figures by our names, units in them.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    facts = {"lines": len(lines), "problem": ""}
    if len(lines) != 1:
        return facts
    try:
        raw = json.loads(lines[0])
    except (ValueError, RecursionError) as error:
        return dict(facts, problem="it is not JSON (%s)" % error)
    if not isinstance(raw, dict):
        return dict(facts, problem="it is no JSON object")
    needed = [*FIGURES.values(), "completed", "total_output_tokens", "total_output_tokens_retokenized"]
    lacking = [name for name in needed if not number(raw.get(name))]
    if lacking:
        return dict(facts, problem="it has no number for %s" % ", ".join(lacking))
    lacking = [name for name in DETAILS if not isinstance(raw.get(name), list)]
    if lacking:
        return dict(facts, problem="it has no %s: run bench_serving with --output-details" % ", ".join(lacking))
    lengths = {name: len(raw[name]) for name in DETAILS}
    if len(set(lengths.values())) != 1:
        told = ", ".join("%d %s" % (count, name) for name, count in lengths.items())
        return dict(facts, problem="its lists are not of one length: %s" % told)
    try:
        facts.update(of_requests(raw))
    except (TypeError, ValueError, OverflowError) as error:
        return dict(facts, problem="its lists hold what they should not: %s" % error)
    return facts


def of_requests(raw):
    """The facts of a record whose fields are there."""
    ttfts, itls, texts, errors = raw["ttfts"], raw["itls"], raw["generated_texts"], raw["errors"]
    duration, generated = raw["duration"], raw["total_output_tokens"]
    intervals = [duration, *ttfts, *(itl for each in itls for itl in each)]
    latencies = [ttft + math.fsum(each) for ttft, each in zip(ttfts, itls)]
    filler = [text for text in texts if is_filler(text)]
    wrong_texts = [text for text in texts if ERROR_TEXT.search(text)]
    failed = [str(error) for error in errors if error]
    figures = {ours: float(raw[theirs]) for ours, theirs in FIGURES.items()}
    asked = {"concurrency": "max_concurrency", "input_len": "random_input_len", "output_len": "random_output_len"}
    return {
        **{"told_" + ours: raw.get(theirs) for ours, theirs in asked.items()},
        "requests": len(ttfts),
        "completed": raw["completed"],
        "failed": len(failed),
        "first_failure": ([line for line in failed[0].splitlines() if line.strip()] or [""])[-1][:160]
        if failed
        else "",
        # Of answers that show no text (special tokens alone) bench_serving notes no time; "empty_texts" counts them.
        "unstreamed": sum(bool(t) and n > 1 and not each for t, n, each in zip(texts, raw["output_lens"], itls)),
        "min_ttft_ms": min((ttft for text, ttft in zip(texts, ttfts) if text), default=0) * 1000,
        "impossible": sum(not math.isfinite(each) or each < 0 for each in intervals) + (duration == 0),
        "overlong": sum(latency > duration * 1.02 + 0.02 for latency in latencies),
        "latency_p50_s": statistics.median(latencies) if latencies else 0,
        "duration_s": duration,
        "mean_concurrency": math.fsum(latencies) / duration if duration > 0 else 0,
        "generated": generated,
        "listed": sum(raw["output_lens"]),
        "retokenised": raw["total_output_tokens_retokenized"],
        "output_lens": span(raw["output_lens"]),
        "input_lens": span(raw["input_lens"]),
        "empty_texts": sum(not text for text in texts),
        "filler": len(filler),
        "first_filler": filler[0][:60] if filler else "",
        "error_texts": len(wrong_texts),
        "first_error_text": wrong_texts[0][:60] if wrong_texts else "",
        "distinct_texts": len(set(texts)),
        "untrue": untrue(figures, raw, latencies),
        "figures": figures,
    }


def is_filler(text):
    """Whether a text ends in filler, as one does whose model has begun to compute NaN, or is filler for the most part.
    A real answer may well shout, and goes on.
    """
    return bool(ENDS_IN_FILLER.search(text)) or sum(len(found.group()) for found in FILLER.finditer(text)) * 2 >= max(
        len(text), 1
    )


def untrue(figures, raw, latencies):
    """The figures of the summary that its own requests contradict, by name.

    A latency ends with the stream, a moment after the last token, so what is made of latencies may be off by a tenth,
    or by 20 ms a request.
    """
    duration, ttfts, lengths = raw["duration"], raw["ttfts"], raw["output_lens"]
    tpots = [math.fsum(each) / (length - 1) for each, length in zip(raw["itls"], lengths) if length > 1]
    exact, near = {}, {}
    if duration > 0:
        exact["output_tok_s"] = raw["total_output_tokens"] / duration
        exact["total_tok_s"] = (sum(raw["input_lens"]) + raw["total_output_tokens"]) / duration
        exact["requests_s"] = raw["completed"] / duration
        near["mean_concurrency"] = math.fsum(latencies) / duration
    if ttfts:
        exact["ttft_mean_ms"] = statistics.fmean(ttfts) * 1000
        exact["ttft_p50_ms"] = statistics.median(ttfts) * 1000
        exact["ttft_p99_ms"] = percentile(ttfts, 0.99) * 1000
        near["e2e_p50_ms"] = statistics.median(latencies) * 1000
    if tpots:
        near["tpot_mean_ms"] = statistics.fmean(tpots) * 1000
        near["tpot_p50_ms"] = statistics.median(tpots) * 1000
        near["tpot_p99_ms"] = percentile(tpots, 0.99) * 1000
    wrong = {name for name, value in figures.items() if not (math.isfinite(value) and value > 0)}
    wrong |= {name for name, value in exact.items() if not math.isclose(figures[name], value, rel_tol=0.01)}
    shortest = min((length for length in lengths if length > 1), default=2)
    for name, value in near.items():
        slack = 20 / (shortest - 1) if name.startswith("tpot") else 20 if name.endswith("_ms") else 0
        if not math.isclose(figures[name], value, rel_tol=0.1, abs_tol=slack):
            wrong.add(name)
    return sorted(wrong)


def percentile(values, share):
    """The value below which `share` of the values lie, between two of them by their distance, as numpy has it."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def span(lengths):
    """[shortest, longest], in tokens."""
    return [min(lengths, default=0), max(lengths, default=0)]
