"""An attached model: generation over contexts that live in the database."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, NoReturn, Unpack

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import kvdb
from engine_adapter.base import Blend, Inspect, Progress, Report
from engine_adapter.transformers.attention import Attached
from engine_adapter.transformers.cache import Row, SessionCache
from engine_adapter.transformers.decode_stats import counters_of, decode_stats
from engine_adapter.transformers.exchange import checked_cache, exported, same_as_held, whole
from engine_adapter.transformers.held_cache import HeldCache, cache_in
from engine_adapter.transformers.keep import Names, check_free, keep_answers, names_of
from engine_adapter.transformers.options import answer_tokens, beams_of, check_mode, drafts, settings_of
from engine_adapter.transformers.prefill import only_new_columns, prefill
from engine_adapter.transformers.prompts import PromptBatch, PromptRow, as_row, one_of, prompts_of
from engine_adapter.transformers.recompute import recompute as recomputed
from engine_adapter.transformers.support import (
    check_dropout,
    check_movable,
    check_padding,
    check_positions,
    full_layers,
    text_config,
)
from engine_adapter.transformers.timing import FirstToken, Times
from engine_adapter.transformers.window_layer import layers_of
from kvdb.blend.strategies import Recompute
from kvdb.client.query_keywords import keywords_in, query_options
from kvdb.client.retention_keywords import RetentionKeywords
from kvdb.errors import InvalidArgument, Unsupported
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
        self._layers = layers_of(model)
        self._full = full_layers(model)
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
        Each row is a session of its own, closed at the end, so a returned `past_key_values` is gone on with only if it is one of
        `open_cache`; a chat also goes on by `keep`: the name under which prompt and answer are stored (all but the last token),
        or a list of them, one a returned sequence, None for those to forget. inspect: is called with the sessions before they are
        closed. options, or the keywords retrieval, max_missed_mass, estimate_tail, error_max and hints in its place: which tokens
        a question and the steps behind it read, and how, see `kvdb.Session.attention`; a long text that is not stored reads
        everything. parts: in place of input_ids one prompt of chunks and token ids, see `kvdb.Client.create_session`; the last
        part is token ids. recompute: the share of the chunks' tokens that is computed anew, or a `kvdb.Recompute` that says more.
        generation: all else that `model.generate` takes.

        Raises Unsupported for what kvdb cannot do (other inputs than token ids, modes that it does not know), InvalidArgument,
        also for a prompt longer than the model's positions, AlreadyExists for a name in `keep` that is taken, IntegrityError for
        chunks of another text or model, and what the database raises. Nothing is stored then, and every session is closed.
        """
        started = perf_counter()
        self._check_ready()
        query = query_options(options, **keywords_in(generation))
        held, settings = cache_in(generation, HeldCache), settings_of(self._model, generation)
        given = one_of(generation.pop("inputs", None) if input_ids is None else input_ids, parts, recompute)
        prompts = None if parts is not None else self._checked(prompts_of(given, attention_mask, settings))
        drafted = drafts(settings, generation.get("assistant_model"))
        check_mode(settings, prompts, drafted=drafted, held=held is not None)
        names = names_of(self._db, keep, 1 if prompts is None else len(prompts.rows), settings)
        clock = FirstToken.among(generation)
        with ExitStack() as stack:
            cache, prompts, reused, blend = self._begin(prompts or given, Recompute.of(recompute), query, settings, held, stack)
            columns = prompts.ids.shape[1]
            cache.batch_repeat_interleave(beams_of(settings))
            if drafted:
                stack.enter_context(only_new_columns(self._model, cache))
            before, prefilled = counters_of(cache.sessions), perf_counter()
            answer = self._model.generate(  # type: ignore[operator]  # transformers does not type it
                prompts.ids, attention_mask=prompts.mask, past_key_values=cache, **generation
            )
            cache.check_answered()
            sequences = answer if isinstance(answer, torch.Tensor) else answer.sequences
            report = self._report(cache.sessions[0], prompts.rows, reused, Times(started, prefilled, clock.first), query)
            decode = None if drafted else decode_stats(before, cache.rows, self.spec, len(self._full))
            self.last = replace(report, generated=sequences.shape[1] - columns, decode=decode, blend=blend)
            if inspect is not None:
                inspect(cache.sessions)
            if held is not None:
                held.went_on(prompts.rows, sequences[:, columns:-1])
            keep_answers(self._db, names, cache.sessions, prompts, sequences, settings)
        return answer

    def open_cache(self) -> HeldCache:
        """A cache that several calls of `generate` go on with, given as `past_key_values=`; close it, or use it in a `with`.

        The first call stands on what the database has stored of its prompts, later ones on what the cache holds: a prompt is
        computed from the first token on that differs. All calls have as many rows, and no beams.
        """
        self._check_ready()
        return HeldCache(self.spec, self._db, self._layers)

    def export_cache(self, source: str | kvdb.Context | HeldCache) -> DynamicCache:
        """A copy of a context, or of a cache of `open_cache` with one row, for the model's own `generate` and whatever else takes
        transformers' caches; on the model's device.

        source: a context by its name, or the context. Raises NotFound, SpecMismatch for another model's, InvalidArgument for a
        cache of several rows, and what `kvdb.Session.read` raises.
        """
        return exported(self._model, self.spec, self._db.get(source) if isinstance(source, str) else source)

    def import_cache(
        self, cache: DynamicCache, *, name: str, input_ids: Any, **retention: Unpack[RetentionKeywords]
    ) -> kvdb.Context:
        """Store a cache that the model itself filled, such as one that `model.generate` returned.

        cache: of one row, without padding. input_ids: `[n]` or `[1, n]`, the ids of all tokens that it holds, which are all of a
        generated sequence but its last. retention: as in `kvdb.Client.import_context`. The model computes the first layer
        again, and all layers of the last few tokens, and compares; where a layer has let tokens go because of its window, it
        computes all of them. Raises IntegrityError where they differ, Unsupported for layers of another kind, AlreadyExists,
        InvalidArgument, ShapeError, SpecMismatch, and what the database raises; nothing is stored then.
        """
        self._check_ready()
        tokens = as_row(input_ids)
        check_free(self._db, name)
        filled = checked_cache(self._model, self.spec, cache, tokens)
        if not whole(filled, tokens):
            return same_as_held(self.store(name=name, input_ids=tokens, **retention), filled)
        return self._db.import_context(self.spec, tokens, ((k[0].cpu(), v[0].cpu()) for k, v in filled), name=name, **retention)

    def generate_batch(self, *_given: Any, **_named: Any) -> NoReturn:
        """Raises Unsupported: transformers' continuous batching makes a paged cache of its own, and takes no other."""
        raise Unsupported(
            "generate_batch makes a PagedAttentionCache of its own and takes no other cache, so its keys never come to kvdb; "
            "call engine.generate with a padded batch, or from several threads, or serve the model with vLLM"
        )

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
            self.last = self._report(session, [PromptRow(tokens)], (session.reused,), Times(started, prefilled))
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
        check_movable(self._model)
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
            self.last = self._report(session, [PromptRow(tokens)], (0,), Times(started, prefilled))
        return context

    def _report(
        self,
        session: kvdb.Session,
        prompts: list[PromptRow],
        reused: tuple[int, ...],
        times: Times,
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
            explain=session.explain(self._full[-1] if self._full else self.spec.layers - 1, options=options),
        )

    def _checked(self, prompts: PromptBatch) -> PromptBatch:
        for prompt in prompts.rows:
            check_positions(self._model, len(prompt.tokens))
            check_padding(self._model, prompt.padding, prompt.padding_end)
        return prompts

    def _begin(
        self,
        given: PromptBatch | Iterable[Any],
        recompute: Recompute,
        query: kvdb.QueryOptions,
        settings: GenerationConfig,
        held: HeldCache | None,
        stack: ExitStack,
    ) -> tuple[SessionCache, PromptBatch, tuple[int, ...], Blend | None]:
        """Bring prompts, or one of parts, into sessions, up to the last token of each; how many tokens of each were found."""
        expected = answer_tokens(settings) if held is None else None  # nobody knows how long a chat goes on
        if not isinstance(given, PromptBatch):
            session = stack.enter_context(self._db.create_session(self.spec, parts=given, expected_tokens=expected))
            prompts, row, blend = self._lay_out(session, recompute, query)
            parts_cache = stack.enter_context(SessionCache(self.spec, [row], prompts.ids.shape[1] - 1, query, self._db))
            return parts_cache, prompts, (row.session.reused,), blend
        cache = stack.enter_context(HeldCache(self.spec, self._db, self._layers)) if held is None else held
        cache.check_serves(self.spec, self._db, len(given.rows))

        def fill(session: kvdb.Session, tokens: torch.Tensor, begin: int) -> None:
            prefill(self._model, session, tokens, self._piece_tokens, options=query, begin=begin)

        return cache, given, cache.go_to(given.rows, query, fill, expected), None

    def _lay_out(self, session: kvdb.Session, recompute: Recompute, options: kvdb.QueryOptions) -> tuple[PromptBatch, Row, Blend]:
        """A session over parts, recomputed and filled up to the last token, which `generate` puts through the model to have its
        logits."""
        started = perf_counter()
        check_movable(self._model)
        tokens = torch.from_numpy(session.tokens.astype(np.int64))
        check_positions(self._model, len(tokens))
        if len(tokens) == session.start:
            raise InvalidArgument("the last part is a context; expected token ids behind it, such as a question, to go on from")
        done = recomputed(self._model, session, recompute, self._token_seconds)
        self._token_seconds = done.token_seconds or self._token_seconds
        blend = Blend(done.reused, done.recomputed, done.fresh, done.choice, perf_counter() - started, done.deviation)
        prefill(self._model, session, tokens[:-1], self._piece_tokens, options=options)
        return PromptBatch(tokens[None], None, [PromptRow(tokens)]), Row(session), blend

    def _check_ready(self) -> None:
        name = text_config(self._model)._attn_implementation
        if not isinstance(name, Attached) or id(self._model) not in name.models:
            raise InvalidArgument("the model is not attached; use the engine inside its `with attach(model, db) as engine`")
        check_dropout(self._model)
