"""What a benchmark runs: the levels of a profile, their repeats, and the arguments of the load generator."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwright.hostdata import Profile


@dataclass(frozen=True)
class Level:
    """One concurrency level: how many prompts a repeat sends, of how many tokens in and out, and its warm-ups."""

    concurrency: int
    prompts: int
    input_len: int
    output_len: int
    warmups: int

    @property
    def about(self) -> str:
        """The level in words."""
        return f"{self.prompts} requests a repeat, {self.input_len} tokens in, {self.output_len} out"

    def argv(self, address: str, port: int, model: str, seed: int) -> list[str]:
        """Arguments of sglang.bench_serving: fixed lengths, an empty cache, every request kept in the output. Prompts
        are sent as tokens: as text they would be tokenised anew, to other lengths.

        Its warm-ups (sglang 0.5.9) are one prompt sent `warmups` times at once, for 32 tokens at most; what they do not
        warm up the discarded first repeat does.
        """
        return [
            "--backend", "sglang", "--host", address, "--port", str(port), "--model", model, "--tokenizer", model,
            "--dataset-name", "random-ids", "--random-range-ratio", "1.0",
            "--random-input-len", str(self.input_len), "--random-output-len", str(self.output_len),
            "--num-prompts", str(self.prompts), "--max-concurrency", str(self.concurrency),
            "--warmup-requests", str(self.warmups), "--flush-cache", "--seed", str(seed),
            "--tokenize-prompt", "--disable-tqdm", "--output-details",
        ]  # fmt: skip


def levels(profile: Profile) -> list[Level]:
    """The levels of a profile, lowest first."""
    return [
        Level(
            concurrency,
            max(profile.min_prompts, concurrency * profile.prompts_per_concurrency),
            profile.input_len,
            profile.output_len,
            concurrency * profile.warmup_per_concurrency,
        )
        for concurrency in sorted(set(profile.levels))
    ]


def seeds(profile: Profile, level: Level) -> list[int]:
    """The seed of each repeat of a level: the discarded one first, and no two of a run the same."""
    first = profile.seed + level.concurrency * (profile.repeats + 1)
    return [first + number for number in range(profile.repeats + 1)]
