"""An attached model: generation over contexts that live in the database."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import kvdb
from engine_adapter.base import Blend, Inspect, Progress, Report
from engine_adapter.transformers.attention import Attached
from engine_adapter.transformers.cache import Row, SessionCache
from engine_adapter.transformers.decode_stats import counters_of, decode_stats
from engine_adapter.transformers.keep import Names, check_free, keep_answers, names_of
from engine_adapter.transformers.options import beams_of, settings_of
from engine_adapter.transformers.prefill import prefill
from engine_adapter.transformers.prompts import Prompt, Prompts, as_row, prompts_of
from engine_adapter.transformers.recompute import recompute as recomputed
from engine_adapter.transformers.support import check_dropout, check_positions, text_config
from kvdb.blend.strategies import Recompute
from kvdb.client.query_keywords import keywords_in, query_options
from kvdb.client.retention_keywords import RetentionKeywords
from kvdb.errors import InvalidArgument
from query_optimizer.query_options import NO_OPTIONS


class TransformersEngine:
    """A transformers model whose KV cache lives in a kvdb database. Made by `attach`.

    spec: the spec of its cache. last: the report of the last call.
    """

    def __init__(self, model: PreTrainedModel, db: kvdb.Client, spec: kvdb.ModelSpec, piece_tokens: int) -> None:
        self.spec = spec
        self.last: Report | None = None
        self._model = model
        self._db = db
        self._piece_tokens = piece_tokens
        self._token_seconds: float | None = None  # of one token in one layer, of the last recompute

    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        keep: str | Names | None = None,
        inspect: Inspect | None = None,
        options: kvdb.QueryOptions | None = None,
        parts: Iterable[Any] | None = None,
        recompute: float | Recompute | None = None,
        **generation: Any,
    ) -> Any:
        """The result of `model.generate` for the same arguments; only those tokens of the prompts are computed that are not
        stored.

        input_ids: `[rows, columns]`, None to begin with the model's bos_token_id; attention_mask: 0 on padding, wherever it is.
        Each row is a session of its own. The sessions are closed at the end, so a returned `past_key_values` can be looked at but
        not gone on with; a chat goes on by `keep`: the name under which prompt and answer are stored (all but the last token,
        which the model has not read yet), or a list of them, one a returned sequence, None for those to forget. inspect: is
        called with the sessions before they are closed. options, or the keywords retrieval, max_missed_mass, estimate_tail,
        error_max and hints in its place: which tokens a question and the steps behind it read, and how, see
        `kvdb.Session.attention`; a long text that is not stored reads everything. parts: in place of input_ids one prompt of
        chunks and token ids, see `kvdb.Client.create_session`; the last part is token ids. recompute: the share of the chunks'
        tokens that is computed anew, or a `kvdb.Recompute` that says more. generation: all else that `model.generate` takes.

        Raises Unsupported for what kvdb cannot do (other inputs than token ids, modes that take tokens back), InvalidArgument,
        also for a prompt longer than the model's positions, AlreadyExists for a name in `keep` that is taken, IntegrityError for
        chunks of another text or model, and what the database raises. Nothing is stored then, and every session is closed.
        """
        started = perf_counter()
        self._check_ready()
        query = query_options(options, **keywords_in(generation))
        settings = settings_of(self._model, generation)
        given = _one_of(generation.pop("inputs", None) if input_ids is None else input_ids, parts, recompute)
        prompts = None if parts is not None else prompts_of(given, attention_mask, settings)
        names = names_of(self._db, keep, 1 if prompts is None else len(prompts.rows), settings)
        clock = _FirstToken.among(generation)
        with ExitStack() as stack:
            if prompts is None:
                prompts, rows, blend = self._lay_out(given, Recompute.of(recompute), query, stack)
            else:
                rows, blend = [self._open(prompt, query, stack) for prompt in prompts.rows], None
            ids, columns = prompts.ids, prompts.ids.shape[1]
            reused = tuple(row.session.reused for row in rows)
            cache = stack.enter_context(SessionCache(self.spec, rows, columns - 1, query, self._db))
            cache.batch_repeat_interleave(beams_of(settings))
            before = counters_of(cache.sessions)
            prefilled = perf_counter()
            answer = self._model.generate(  # type: ignore[operator]  # transformers does not type it
                ids, attention_mask=prompts.mask, past_key_values=cache, **generation
            )
            cache.check_answered()
            sequences = answer if isinstance(answer, torch.Tensor) else answer.sequences
            report = self._report(cache.sessions[0], prompts.rows, reused, _Times(started, prefilled, clock.first), query)
            decode = decode_stats(before, cache.rows, self.spec)
            self.last = replace(report, generated=sequences.shape[1] - columns, decode=decode, blend=blend)
            if inspect is not None:
                inspect(cache.sessions)
            keep_answers(self._db, names, cache.sessions, prompts, sequences, settings)
        return answer

    def store(
        self, *, name: str, input_ids: Any, progress: Progress | None = None, **retention: Unpack[RetentionKeywords]
    ) -> kvdb.Context:
        """Prefill the tokens of one sequence that are not stored, and store all of it under a name.

        input_ids: `[n]` or `[1, n]`. progress: called as (done, n) after each piece. retention: as in
        `kvdb.Client.import_context`. Raises AlreadyExists for a name that is taken, ShapeError, DtypeError, InvalidArgument,
        Unsupported and what the database raises; nothing is stored then.
        """
        started = perf_counter()
        self._check_ready()
        tokens = as_row(input_ids)
        check_positions(self._model, len(tokens))
        check_free(self._db, name)
        with self._db.create_session(self.spec, tokens) as session:
            prefill(self._model, session, tokens, self._piece_tokens, progress)
            prefilled = perf_counter()
            context = self._db.store(session, name=name, **retention)
            self.last = self._report(session, [Prompt(tokens)], (session.reused,), _Times(started, prefilled, None))
        return context

    def store_chunk(
        self,
        *,
        name: str,
        input_ids: Any,
        behind: Any = None,
        progress: Progress | None = None,
        **retention: Unpack[RetentionKeywords],
    ) -> kvdb.Context:
        """Compute one text, and store it as a chunk, which may stand anywhere in a prompt's `parts`.

        behind: token ids `[m]` of what every prompt begins with, stored already, which the text reads and the chunk does not
        hold; None for a text that is computed alone. Models give much of their attention to the first tokens of what they read,
        and a chunk that was computed alone takes its own for these. The same text is stored once, and computed once, whatever it
        was behind: another name for it costs nothing. Other arguments and errors as in `store`; progress counts the tokens of
        behind= too. Raises InvalidArgument where these are not stored, and Unsupported for a model whose keys cannot be moved.
        """
        started = perf_counter()
        self._check_ready()
        tokens = as_row(input_ids)
        before = tokens[:0] if behind is None else as_row(behind)
        check_positions(self._model, len(before) + len(tokens))
        check_free(self._db, name)
        known = self._db.name_chunk(self.spec, tokens, name=name, **retention)
        if known is not None:
            if progress is not None:
                progress(len(tokens), len(tokens))
            return known
        with self._db.create_session(self.spec, before) as session:
            if session.start < len(before):
                raise InvalidArgument(
                    f"of the {len(before)} tokens of behind= {session.start} are stored; store all of them first"
                )
            everything = torch.cat([before, tokens])
            prefill(self._model, session, everything, self._piece_tokens, progress)
            prefilled = perf_counter()
            context = self._db.store(session, name=name, tokens=everything, chunk=True, **retention)
            self.last = self._report(session, [Prompt(tokens)], (0,), _Times(started, prefilled, None))
        return context

    def _report(
        self,
        session: kvdb.Session,
        prompts: list[Prompt],
        reused: tuple[int, ...],
        times: "_Times",
        options: kvdb.QueryOptions = NO_OPTIONS,
    ) -> Report:
        """The report of a call that generated nothing."""
        first = times.first_token
        return Report(
            reused=reused,
            prefilled=tuple(len(prompt.tokens) - known for prompt, known in zip(prompts, reused, strict=True)),
            generated=0,
            prefill_seconds=times.prefilled - times.started,
            first_token_seconds=None if first is None else first - times.started,
            seconds=perf_counter() - times.started,
            explain=session.explain(self.spec.layers - 1, options=options),
        )

    def _open(self, prompt: Prompt, options: kvdb.QueryOptions, stack: ExitStack) -> Row:
        """A session over all of a prompt but its last column, which `generate` puts through the model to have its logits."""
        check_positions(self._model, len(prompt.tokens))
        session = stack.enter_context(self._db.create_session(self.spec, prompt.known))
        prefill(self._model, session, prompt.known, self._piece_tokens, options=options)
        columns = len(prompt.tokens) + prompt.padding
        return Row(session, prompt.padding, columns - 1 if prompt.ends_in_padding else None)

    def _lay_out(
        self, parts: Iterable[Any], recompute: Recompute, options: kvdb.QueryOptions, stack: ExitStack
    ) -> tuple[Prompts, list[Row], Blend]:
        """A session over parts, recomputed and filled up to the last token, as in `_open`."""
        started = perf_counter()
        session = stack.enter_context(self._db.create_session(self.spec, parts=parts))
        tokens = torch.from_numpy(session.tokens.astype(np.int64))
        check_positions(self._model, len(tokens))
        if len(tokens) == session.start:
            raise InvalidArgument("the last part is a context; expected token ids behind it, such as a question, to go on from")
        done = recomputed(self._model, session, recompute, self._token_seconds)
        self._token_seconds = done.token_seconds or self._token_seconds
        blend = Blend(done.reused, done.recomputed, done.fresh, done.choice, perf_counter() - started, done.deviation)
        prefill(self._model, session, tokens[:-1], self._piece_tokens, options=options)
        return Prompts(tokens[None], None, [Prompt(tokens)]), [Row(session)], blend

    def _check_ready(self) -> None:
        name = text_config(self._model)._attn_implementation
        if not isinstance(name, Attached) or id(self._model) not in name.models:
            raise InvalidArgument("the model is not attached; use the engine inside its `with attach(model, db) as engine`")
        check_dropout(self._model)


def _one_of(input_ids: Any, parts: Iterable[Any] | None, recompute: float | Recompute | None) -> Any:
    """The one of input_ids and parts that was given. Raises InvalidArgument for both, or for arguments that belong to the
    other."""
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
    """A stopping criterion that never stops; it notes when the first new token was there."""

    def __init__(self) -> None:
        self.first: float | None = None

    @classmethod
    def among(cls, options: dict[str, Any]) -> "_FirstToken":
        """A _FirstToken that is added to the criteria in these options."""
        clock = cls()
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), clock])
        return clock

    def __call__(self, input_ids: torch.Tensor, *_given: Any, **_named: Any) -> torch.Tensor:
        self.first = self.first or perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
