"""The table of `benchmarks/real_model.py`: a row for each way, a block for each model, text and length."""

from __future__ import annotations

from typing import Any, TextIO

COLUMNS = (
    "way",
    "steps",
    "KL",
    "KL, largest",
    "equal tops",
    "NLL",
    "exact NLL",
    "error",
    "p95",
    "attended",
    "read",
    "ms",
    "faster",
    "facts",
)


def show(lines: list[dict[str, Any]], out: TextIO) -> None:
    """Write it as Markdown."""
    for model, text, tokens in dict.fromkeys((line["model"], line["text"], line["tokens"]) for line in lines):
        mine = [line for line in lines if (line["model"], line["text"], line["tokens"]) == (model, text, tokens)]
        print(f"\n{model}, {text}, {tokens:,} tokens:\n", file=out)
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", file=out)
        for line in mine:
            print(f"| {' | '.join(cells(line))} |", file=out)


def cells(line: dict[str, Any]) -> list[str]:
    """What a row says. KL in nats a token; error: of a layer's output, median and 95th percentile; attended and read: shares of
    all tokens, and of their bytes."""
    return [
        line["way"],
        f"{line['steps']:,}",
        f"{line['kl']:.2g}",
        f"{line['kl_max']:.2g}",
        f"{100 * line['same_top']:.1f} %",
        f"{line['nll']:.4f}",
        f"{line['nll_exact']:.4f}" if "nll_exact" in line else "",
        f"{100 * line['error_median']:.2f} %",
        f"{100 * line['error_p95']:.2f} %",
        f"{100 * line['attended']:.1f} %",
        f"{100 * line['read']:.1f} %",
        f"{line['ms']:.1f}",
        f"{line['faster']:.2f}x",
        str(line.get("facts", "")),
    ]
