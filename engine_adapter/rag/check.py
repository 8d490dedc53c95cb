"""Measures how near answers from blended documents are to those of a full prefill, for the user's own model and prompts.

Equal texts say little: where two words are about as likely, rounding decides, and everything behind the first that differs counts
as lost. So the full prefill's answer is also fed to the blended prompt, token by token, and the distributions are compared.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any, NamedTuple

from engine_adapter.base import Progress
from engine_adapter.rag.answers import Answer
from engine_adapter.rag.forcing import divergence, surprise
from engine_adapter.rag.prompts import Text
from kvdb.errors import InvalidArgument
from kvdb.types import Float32

Expected = str | Callable[[str], bool]
"""A text that a right answer contains, ignoring spaces and capitals, or a function that says whether an answer is right."""


class CheckPrompt(NamedTuple):
    """One prompt of a check: a question, the ids of the documents that it is asked about, and what a right answer contains."""

    question: Text
    docs: Sequence[str]
    expected: Expected | None = None

    @classmethod
    def of(cls, given: Any) -> "CheckPrompt":
        """Takes (question, docs) or (question, docs, expected). Raises InvalidArgument for anything else."""
        if isinstance(given, str) or not isinstance(given, Sequence) or not 2 <= len(given) <= 3:
            raise InvalidArgument(f"a sample is {given!r}; expected (question, docs) or (question, docs, expected)")
        return cls(*given)

    def right(self, text: str) -> bool | None:
        """Whether an answer is right; None if no expected answer was given."""
        if self.expected is None:
            return None
        if callable(self.expected):
            return bool(self.expected(text))
        return _plainly(self.expected) in _plainly(text)


class FullAnswer(NamedTuple):
    """The model's answer when it reads the whole prompt itself. log_probabilities: of every token at each step, float32
    `[tokens, vocabulary]`."""

    text: str
    tokens: tuple[int, ...]
    first_token_seconds: float
    log_probabilities: Float32


class Compared(NamedTuple):
    """One blended answer beside that of a full prefill. leading, f1, kl, nll: as in `CheckRow`."""

    answer: Answer
    same: bool
    leading: float
    f1: float
    kl: float
    nll: float

    @classmethod
    def of(cls, answer: Answer, fed: Float32, whole: FullAnswer) -> "Compared":
        """fed: log probabilities at each token of the full prefill's answer, behind the blended prompt."""
        return cls(
            answer=answer,
            same=answer.tokens == whole.tokens,
            leading=_leading(answer.tokens, whole.tokens),
            f1=f1(answer.text, whole.text),
            kl=divergence(whole.log_probabilities, fed),
            nll=surprise(fed, whole.tokens),
        )


@dataclass(frozen=True)
class CheckRow:
    """The answers to all prompts of a sample at one ratio. ratio: None for a full prefill, with which the others are compared; a
    mean where the controller chose it.

    same: the share of answers that equal the full prefill's, token for token. leading: the mean share of tokens before the first
    that differs. f1: the mean F1 of words, see `f1`. kl: how far the blended prompt's distributions are from the full prefill's
    while its answer is fed, nats per token; nll: the negative log-likelihood of that answer, nats per token; both are means over
    answers. right: the share of right answers among prompts with an expected answer, None without any. first_token_seconds: the
    median. recomputed: the mean number of document tokens that were computed again. texts: the answers. chosen: whether the
    controller chose the ratio.
    """

    ratio: float | None
    same: float
    leading: float
    f1: float
    kl: float
    nll: float
    right: float | None
    first_token_seconds: float
    recomputed: float
    texts: tuple[str, ...]
    chosen: bool = False


@dataclass(frozen=True)
class Check:
    """A comparison of ratios with full prefill; `print` shows a table. rows: one for each ratio, in the caller's order. full: the
    row of a full prefill."""

    rows: tuple[CheckRow, ...]
    full: CheckRow

    def __str__(self) -> str:
        lines = [_HEAD, *(_line(row, self.full) for row in (*self.rows, self.full))]
        legend = (
            f"{len(self.full.texts)} prompts; same, leading, f1: answers, tokens and words that are those of a full prefill;\n"
            "KL, NLL: nats a token while a full prefill's answer is fed"
        )
        return "\n".join([*lines, legend])


def check(
    sample: Sequence[CheckPrompt],
    ratios: Sequence[float | None],
    *,
    blended: Callable[[CheckPrompt, float | None], Answer],
    fed: Callable[[CheckPrompt, float | None, Sequence[int]], Float32],
    full: Callable[[CheckPrompt], FullAnswer],
    progress: Progress | None = None,
) -> Check:
    """Ask every prompt by full prefill and at every ratio.

    The first prompt is asked once more before all others, so that what is slow only the first time is not measured. fed: log
    probabilities at each of some tokens that are fed as the answer, float32 `[tokens, vocabulary]`. progress: called with the
    number of answers so far and of all answers. Raises InvalidArgument without a prompt or a ratio.
    """
    if not sample or not ratios:
        raise InvalidArgument(f"a check of {len(sample)} prompts at {len(ratios)} ratios; expected at least one of both")
    full(sample[0])
    blended(sample[0], ratios[0])
    counted, total = count(1), len(sample) * (len(ratios) + 1)

    def answered() -> None:
        if progress is not None:
            progress(next(counted), total)

    columns: list[list[Compared]] = [[] for _ in ratios]
    texts, seconds, own = [], [], []
    for prompt in sample:
        whole = full(prompt)
        answered()
        for ratio, column in zip(ratios, columns, strict=True):
            column.append(Compared.of(blended(prompt, ratio), fed(prompt, ratio, whole.tokens), whole))
            answered()
        texts.append(whole.text)
        seconds.append(whole.first_token_seconds)
        own.append(surprise(whole.log_probabilities, whole.tokens))
    rows = tuple(_row(sample, ratio, column) for ratio, column in zip(ratios, columns, strict=True))
    right = _right(sample, texts)
    return Check(rows, CheckRow(None, 1.0, 1.0, 1.0, 0.0, _mean(own), right, median(seconds), 0.0, tuple(texts)))


def f1(text: str, whole: str) -> float:
    """The harmonic mean of two shares, 0 to 1: of the words of `text` that are in `whole`, and the other way round.

    Capitals and punctuation do not count; a word counts as often as it is in both. 1 where neither has a word.
    """
    ours, theirs = (Counter(_WORD.findall(given.casefold())) for given in (text, whole))
    total = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / total if total else 1.0


_WORD = re.compile(r"\w+")
_HEAD = "       ratio    same  leading      f1       KL     NLL   right  recomputed  first token  faster"


def _row(sample: Sequence[CheckPrompt], ratio: float | None, column: Sequence[Compared]) -> CheckRow:
    texts = tuple(one.answer.text for one in column)
    return CheckRow(
        ratio=_mean(one.answer.usage.ratio for one in column) if ratio is None else ratio,
        same=_mean(one.same for one in column),
        leading=_mean(one.leading for one in column),
        f1=_mean(one.f1 for one in column),
        kl=_mean(one.kl for one in column),
        nll=_mean(one.nll for one in column),
        right=_right(sample, texts),
        first_token_seconds=median(one.answer.usage.first_token_seconds for one in column),
        recomputed=_mean(one.answer.usage.recomputed for one in column),
        texts=texts,
        chosen=ratio is None,
    )


def _line(row: CheckRow, full: CheckRow) -> str:
    ratio = "full prefill" if row.ratio is None else f"{'chosen ' * row.chosen}{row.ratio:.2f}".rjust(12)
    right = "-" if row.right is None else f"{row.right:.1%}"
    recomputed = "all" if row.ratio is None else f"{row.recomputed:,.0f}"
    faster = full.first_token_seconds / row.first_token_seconds
    return (
        f"{ratio}  {row.same:6.1%}  {row.leading:7.1%}  {row.f1:6.1%}  {row.kl:7.4f}  {row.nll:6.3f}  {right:>6}  "
        f"{recomputed:>10}  {row.first_token_seconds * 1000:8,.0f} ms  {faster:5.1f}x"
    )


def _right(sample: Sequence[CheckPrompt], texts: Sequence[str]) -> float | None:
    known = [right for prompt, text in zip(sample, texts, strict=True) if (right := prompt.right(text)) is not None]
    return _mean(known) if known else None


def _leading(tokens: Sequence[int], whole: Sequence[int]) -> float:
    same = 0
    while same < min(len(tokens), len(whole)) and tokens[same] == whole[same]:
        same += 1
    return same / max(len(whole), 1)


def _plainly(text: str) -> str:
    return " ".join(text.casefold().split())


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
