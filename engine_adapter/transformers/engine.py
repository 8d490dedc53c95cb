"""An attached model: generation over contexts that live in the database."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import kvdb
import kvdb.check as check
from engine_adapter.base import Blend, Inspect, Progress, Report
from engine_adapter.transformers.attention import Attached
from engine_adapter.transformers.cache import ANYTHING, Row, SessionCache
from engine_adapter.transformers.options import beams_of, settings_of
from engine_adapter.transformers.prefill import prefill
from engine_adapter.transformers.prompts import Prompt, Prompts, as_row, end_tokens, prompts_of
from engine_adapter.transformers.reading import count, reading_since
from engine_adapter.transformers.recompute import recompute as recomputed
from engine_adapter.transformers.support import check_dropout, text_config
from indexes.retrieval import Retrieval
from kvdb.blend.strategies import Recompute
from kvdb.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported
from query_optimizer.wanted import Wanted

Names = Sequence[str | None]


class TransformersEngine:
    """A transformers model whose KV cache lives in a kvdb database. Made by `attach`.

    spec: what its cache means. last: what the last call did.
    """

    def __init__(self, model: PreTrainedModel, db: kvdb.Client, spec: kvdb.ModelSpec, piece_tokens: int) -> None:
        self.spec = spec
        self.last: Report | None = None
        self._model = model
        self._db = db
        self._piece_tokens = piece_tokens
        self._token_seconds: float | None = None  # of one token in one layer, of the last recompute

    def generate(  # noqa: PLR0913  # what `model.generate` takes, and what a query does
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        keep: str | Names | None = None,
        inspect: Inspect | None = None,
        retrieval: Retrieval | None = None,
        max_missed_mass: float | None = None,
        hints: kvdb.Hints | None = None,
        parts: Iterable[Any] | None = None,
        recompute: float | Recompute | None = None,
        **options: Any,
    ) -> Any:
        """What `model.generate` returns for the same arguments, computing only what the database has not stored of the prompts.

        input_ids: `[rows, columns]`; attention_mask: 0 on padding, which stands on the left. Each row is a session of its own.
        The sessions are closed at the end, so a returned `past_key_values` can be looked at but not gone on with; a chat goes on
        by `keep`: the name under which prompt and answer are stored (all but the last token, which the model has not read yet),
        or a list of them, one a returned sequence, None for those to forget. inspect: sees the sessions before they are closed.
        retrieval, max_missed_mass, hints: which tokens a question and the steps behind it read, and how, see
        `kvdb.Session.attention`; a long text that is not stored reads everything. parts: in place of input_ids one prompt of
        chunks and token ids, see `kvdb.Client.create_session`; the last part is token ids. recompute: the share of the chunks'
        tokens that is computed anew, or a `kvdb.Recompute` that says more. options: all else that `model.generate` takes.

        Raises Unsupported for what kvdb cannot do (other padding, other inputs than token ids, modes that take tokens back),
        InvalidArgument, AlreadyExists for a name in `keep` that is taken, IntegrityError for chunks of another text or model, and
        what the database raises. Nothing is stored then, and every session is closed.
        """
        started = perf_counter()
        self._check_ready()
        wanted = check.wanted(retrieval, max_missed_mass, estimate_tail=False, hints=hints)
        settings = settings_of(self._model, options)
        given = _one_of(options.pop("inputs", None) if input_ids is None else input_ids, parts, recompute)
        prompts = None if parts is not None else prompts_of(given, attention_mask, settings)
        names = self._names(keep, 1 if prompts is None else len(prompts.rows), settings)
        clock = _FirstToken.among(options)
        with ExitStack() as opened:
            if prompts is None:
                prompts, rows, blend = self._lay_out(given, Recompute.of(recompute), wanted, opened)
            else:
                rows, blend = [self._open(prompt, wanted, opened) for prompt in prompts.rows], None
            ids, columns = prompts.ids, prompts.ids.shape[1]
            reused = tuple(row.session.reused for row in rows)
            cache = opened.enter_context(SessionCache(self.spec, rows, columns - 1, wanted, self._db))
            cache.batch_repeat_interleave(beams_of(settings))
            before = count(cache.sessions)
            prefilled = perf_counter()
            answer = self._model.generate(  # type: ignore[operator]  # transformers does not type it
                ids, attention_mask=prompts.mask, past_key_values=cache, **options
            )
            cache.check_answered()
            sequences = answer if isinstance(answer, torch.Tensor) else answer.sequences
            report = self._report(cache.sessions[0], prompts.rows, reused, _Times(started, prefilled, clock.first), wanted)
            reading = reading_since(before, cache.sessions, self.spec)
            self.last = replace(report, generated=sequences.shape[1] - columns, reading=reading, blend=blend)
            if inspect is not None:
                inspect(cache.sessions)
            self._keep(names, cache.rows, sequences, columns, settings)
        return answer

    def store(self, *, name: str, input_ids: Any, progress: Progress | None = None) -> kvdb.Context:
        """Prefill what is not stored of one sequence, and keep all of it under a name.

        input_ids: `[n]` or `[1, n]`. progress: called as (done, n) after each piece. Raises AlreadyExists for a name that is
        taken, ShapeError, DtypeError, InvalidArgument, Unsupported and what the database raises; nothing is stored then.
        """
        started = perf_counter()
        self._check_ready()
        tokens = as_row(input_ids)
        self._check_free(name)
        with self._db.create_session(self.spec, tokens) as session:
            prefill(self._model, session, tokens, self._piece_tokens, progress)
            prefilled = perf_counter()
            context = self._db.store(session, name=name)
            self.last = self._report(session, [Prompt(tokens, 0)], (session.reused,), _Times(started, prefilled, None))
        return context

    def store_chunk(self, *, name: str, input_ids: Any, progress: Progress | None = None) -> kvdb.Context:
        """Compute one text alone, with nothing before it, and keep it as a chunk, which a prompt's `parts` may hold anywhere.

        The same text is stored once, and computed once: another name for it costs nothing. Arguments and errors as in `store`,
        and Unsupported for a model whose keys cannot be moved.
        """
        started = perf_counter()
        self._check_ready()
        tokens = as_row(input_ids)
        self._check_free(name)
        known = self._db.name_chunk(self.spec, tokens, name=name)
        if known is not None:
            if progress is not None:
                progress(len(tokens), len(tokens))
            return known
        with self._db.create_session(self.spec, tokens[:0]) as session:
            prefill(self._model, session, tokens, self._piece_tokens, progress)
            prefilled = perf_counter()
            context = self._db.store(session, name=name, tokens=tokens, chunk=True)
            self.last = self._report(session, [Prompt(tokens, 0)], (0,), _Times(started, prefilled, None))
        return context

    def _report(
        self,
        session: kvdb.Session,
        prompts: list[Prompt],
        reused: tuple[int, ...],
        times: "_Times",
        wanted: Wanted = ANYTHING,
    ) -> Report:
        """Of a call that generated nothing."""
        first = times.first_token
        return Report(
            reused=reused,
            prefilled=tuple(len(prompt.tokens) - known for prompt, known in zip(prompts, reused, strict=True)),
            generated=0,
            prefill_seconds=times.prefilled - times.started,
            first_token_seconds=None if first is None else first - times.started,
            seconds=perf_counter() - times.started,
            explain=session.explain(
                self.spec.layers - 1,
                retrieval=wanted.retrieval,
                max_missed_mass=wanted.missed_mass_max,
                hints=wanted.hints,
            ),
        )

    def _open(self, prompt: Prompt, wanted: Wanted, opened: ExitStack) -> Row:
        """A session over all of a prompt but its last token, which `generate` puts through the model to have its logits."""
        known = prompt.tokens[:-1]
        session = opened.enter_context(self._db.create_session(self.spec, known))
        prefill(self._model, session, known, self._piece_tokens, wanted=wanted)
        return Row(session, prompt.padding)

    def _lay_out(
        self, parts: Iterable[Any], options: Recompute, wanted: Wanted, opened: ExitStack
    ) -> tuple[Prompts, list[Row], Blend]:
        """A session over parts, recomputed and filled up to the last token, as in `_open`."""
        started = perf_counter()
        session = opened.enter_context(self._db.create_session(self.spec, parts=parts))
        tokens = torch.from_numpy(session.tokens.astype(np.int64))
        if len(tokens) == session.start:
            raise InvalidArgument("the last part is a context; expected token ids behind it, such as a question, to go on from")
        choice = session.plan_recompute(seconds=self._token_seconds, floor=options.floor, ratio=options.ratio)
        done = recomputed(self._model, session, replace(options, ratio=choice.ratio))
        self._token_seconds = done.token_seconds or self._token_seconds
        blend = Blend(done.reused, done.recomputed, done.fresh, choice, options.strategy, perf_counter() - started)
        prefill(self._model, session, tokens[:-1], self._piece_tokens, wanted=wanted)
        return Prompts(tokens[None], None, [Prompt(tokens, 0)]), [Row(session)], blend

    def _keep(self, names: Names, rows: Sequence[Row], sequences: torch.Tensor, columns: int, settings: GenerationConfig) -> None:
        """Store what is asked to be kept. columns: of the prompts. A failure takes back what was stored before it."""
        with ExitStack() as undo:
            for name, row, sequence in zip(names, rows, sequences, strict=False):  # names is empty when nothing is kept
                if name is not None:
                    count = columns - row.padding + answer_length(sequence[columns:-1], settings)
                    self._store_beginning(row.session, sequence[row.padding : -1], count, name)
                    undo.callback(self._db.drop, name)
            undo.pop_all()

    def _store_beginning(self, session: kvdb.Session, tokens: torch.Tensor, count: int, name: str) -> None:
        """Store a session's first `count` tokens; what follows is the filling of a row that ended before the others of its batch.

        The whole is stored under a passing name, so that a view of its beginning can be.
        """
        if count == len(tokens):
            self._db.store(session, name=name, tokens=tokens)
            return
        whole = f"{name} (whole, {uuid4().hex})"
        self._db.store(session, name=whole, tokens=tokens)
        try:
            with self._db.create_session(self.spec, tokens[:count]) as beginning:
                self._db.store(beginning, name=name)
        finally:
            self._db.drop(whole)

    def _names(self, keep: str | Names | None, rows: int, settings: GenerationConfig) -> Names:
        """One name a returned sequence, checked to be free. Raises InvalidArgument, AlreadyExists or Unsupported."""
        if keep is None:
            return []
        names = [keep] if isinstance(keep, str) else list(keep)
        if (settings.num_beams or 1) > 1:
            raise Unsupported("keep= with beam search, where the sessions of returned sequences are gone; call engine.store then")
        expected = rows * beams_of(settings)
        if len(names) != expected:
            raise InvalidArgument(f"keep= names {len(names)} sequences; expected {expected}, one name or None for each returned")
        given = [name for name in names if name is not None]
        if len(set(given)) < len(given):
            raise InvalidArgument(f"keep= gives one name to two sequences ({', '.join(given)}); expected a name for each")
        for name in given:
            self._check_free(name)
        return names

    def _check_free(self, name: str) -> None:
        try:
            self._db.get(name)
        except NotFound:
            return
        raise AlreadyExists(f"there is a context named {name!r}; take another name, or drop it first")

    def _check_ready(self) -> None:
        name = text_config(self._model)._attn_implementation
        if not isinstance(name, Attached) or id(self._model) not in name.models:
            raise InvalidArgument("the model is not attached; use the engine inside its `with attach(model, db) as engine`")
        check_dropout(self._model)


def answer_length(answer: torch.Tensor, settings: GenerationConfig) -> int:
    """How many of a row's new tokens count: up to the first that ends a text, and no padding behind."""
    ends = torch.isin(answer, torch.tensor(end_tokens(settings), dtype=answer.dtype, device=answer.device)).nonzero()
    if len(ends):
        return int(ends[0]) + 1
    real = answer.ne(-1 if settings.pad_token_id is None else settings.pad_token_id).nonzero()
    return int(real[-1]) + 1 if len(real) else 0


def _one_of(input_ids: Any, parts: Iterable[Any] | None, recompute: float | Recompute | None) -> Any:
    """Whichever of input_ids and parts was given. Raises InvalidArgument for both, none, or what goes with the other."""
    if input_ids is None and parts is None:
        raise InvalidArgument("input_ids are a NoneType; expected a tensor of token ids, or parts=")
    if input_ids is not None and parts is not None:
        raise InvalidArgument("generate was given input_ids and parts=; expected one of the two")
    if parts is None and recompute is not None:
        raise InvalidArgument("generate was given recompute= without parts=; only chunks that stand elsewhere are recomputed")
    return input_ids if parts is None else parts


class _Times(NamedTuple):
    """When a call reached a point, by `perf_counter`."""

    started: float
    prefilled: float
    first_token: float | None


class _FirstToken(StoppingCriteria):
    """Stops nothing; notes when the first new token was there."""

    def __init__(self) -> None:
        self.first: float | None = None

    @classmethod
    def among(cls, options: dict[str, Any]) -> "_FirstToken":
        """One that joins the criteria in these options."""
        clock = cls()
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), clock])
        return clock

    def __call__(self, input_ids: torch.Tensor, *_given: Any, **_named: Any) -> torch.Tensor:
        self.first = self.first or perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
