"""Measures how often answers from blended documents equal those of a full prefill, for the user's own model and prompts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any, NamedTuple, TypeVar

from engine_adapter.base import Progress
from engine_adapter.rag.answers import Answer
from engine_adapter.rag.prompts import Text
from kvdb.errors import InvalidArgument

T = TypeVar("T")
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
    """The model's answer when it reads the whole prompt itself."""

    text: str
    tokens: tuple[int, ...]
    first_token_seconds: float


@dataclass(frozen=True)
class Checked:
    """The answers to all prompts of a sample at one ratio. ratio: None for a full prefill, with which the others are compared.

    same: the share of answers that equal the full prefill's, token for token. leading: the mean share of tokens before the first
    that differs. right: the share of right answers among prompts with an expected answer, None without any. first_token_seconds:
    the median. recomputed: the mean number of document tokens that were computed again. texts: the answers.
    """

    ratio: float | None
    same: float
    leading: float
    right: float | None
    first_token_seconds: float
    recomputed: float
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """A comparison of ratios with full prefill; `print` shows a table. rows: one for each ratio, in the caller's order. full: the
    row of a full prefill."""

    rows: tuple[Checked, ...]
    full: Checked

    def least_ratio(self, same: float = 0.98) -> float | None:
        """The least ratio from which on at least this share of the answers equals those of a full prefill; None if there is
        none."""
        good: float | None = None
        for row in sorted(self.rows, key=lambda row: row.ratio or 0.0, reverse=True):
            if row.same < same:
                break
            good = row.ratio
        return good

    def __str__(self) -> str:
        lines = [_HEAD, *(_line(row, self.full) for row in (*self.rows, self.full))]
        legend = f"{len(self.full.texts)} prompts; same, leading: answers and tokens that are those of a full prefill"
        return "\n".join([*lines, legend])


def check(
    sample: Sequence[CheckPrompt],
    ratios: Sequence[float],
    *,
    blended: Callable[[CheckPrompt, float], Answer],
    full: Callable[[CheckPrompt], FullAnswer],
    progress: Progress | None = None,
) -> Check:
    """Ask every prompt by full prefill and at every ratio.

    The first prompt is asked once more before all others, so that what is slow only the first time is not measured. progress:
    called with the number of answers so far and of all answers. Raises InvalidArgument without a prompt or a ratio.
    """
    if not sample or not ratios:
        raise InvalidArgument(f"a check of {len(sample)} prompts at {len(ratios)} ratios; expected at least one of both")
    full(sample[0])
    blended(sample[0], ratios[0])
    answered, total = count(1), len(sample) * (len(ratios) + 1)

    def each(answer: Callable[..., T], *given: float) -> list[T]:
        answers = []
        for prompt in sample:
            answers.append(answer(prompt, *given))
            if progress is not None:
                progress(next(answered), total)
        return answers

    read = each(full)
    rows = []
    for ratio in ratios:
        answers = each(blended, ratio)
        pairs = list(zip(answers, read, strict=True))
        rows.append(
            Checked(
                ratio=ratio,
                same=_mean(answer.tokens == whole.tokens for answer, whole in pairs),
                leading=_mean(_leading(answer.tokens, whole.tokens) for answer, whole in pairs),
                right=_right(sample, [answer.text for answer in answers]),
                first_token_seconds=median(answer.usage.first_token_seconds for answer in answers),
                recomputed=_mean(answer.usage.recomputed for answer in answers),
                texts=tuple(answer.text for answer in answers),
            )
        )
    texts = tuple(whole.text for whole in read)
    seconds = median(whole.first_token_seconds for whole in read)
    return Check(tuple(rows), Checked(None, 1.0, 1.0, _right(sample, texts), seconds, 0.0, texts))


_HEAD = "       ratio    same  leading   right  recomputed  first token  faster"


def _line(row: Checked, full: Checked) -> str:
    ratio = "full prefill" if row.ratio is None else f"{row.ratio:12.2f}"
    right = "-" if row.right is None else f"{row.right:.1%}"
    recomputed = "all" if row.ratio is None else f"{row.recomputed:,.0f}"
    faster = full.first_token_seconds / row.first_token_seconds
    return (
        f"{ratio}  {row.same:6.1%}  {row.leading:7.1%}  {right:>6}  {recomputed:>10}  "
        f"{row.first_token_seconds * 1000:8,.0f} ms  {faster:5.1f}x"
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
