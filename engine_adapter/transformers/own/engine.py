"""An attached model that attends itself: generation over what the database has stored of its own cache."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple, Unpack

import torch
from transformers import DynamicCache

import kvdb
from engine_adapter.base import Inspect, Progress, Report
from engine_adapter.transformers.engine import TransformersEngine
from engine_adapter.transformers.held_cache import cache_in
from engine_adapter.transformers.keep import Names, answer_length, check_free, names_of
from engine_adapter.transformers.options import beams_of, check_mode, drafts, settings_of
from engine_adapter.transformers.own.exchange import checked_import, exported
from engine_adapter.transformers.own.fill import PieceSizes, fill
from engine_adapter.transformers.own.held import OwnCache
from engine_adapter.transformers.own.kept_model import KeptModel, columns_of
from engine_adapter.transformers.own.recording import Recording, recording
from engine_adapter.transformers.own.stored import put
from engine_adapter.transformers.prompts import PromptBatch, PromptRow, as_row, prompts_of
from engine_adapter.transformers.support import check_dropout, check_positions
from engine_adapter.transformers.timing import FirstToken, Times
from kvdb.blend.strategies import Recompute
from kvdb.client.query_keywords import keywords_in, query_options
from kvdb.client.retention_keywords import RetentionKeywords
from kvdb.errors import InvalidArgument, Unsupported
from query_optimizer.query_options import NO_OPTIONS


class Begun(NamedTuple):
    """What a generation begins with. cache: of the model's own, up to the last column. sessions: of the rows, none where nothing
    could be handed back. reused: of each row."""

    cache: Any
    sessions: list[kvdb.Session]
    reused: tuple[int, ...]


class OwnEngine(TransformersEngine):
    """A transformers model whose cache is stored in a kvdb database, and handed back to it. Made by `attach`.

    It finds the longest stored prefix that every layer can go on from, and makes a cache of the model's own kind of it.
    """

    def __init__(self, kept: KeptModel, db: kvdb.Client, spec: kvdb.ModelSpec, piece_tokens: int, state_tokens: int) -> None:
        super().__init__(kept.model, db, spec, piece_tokens)
        self.attached = True
        self._kept = kept
        self._pieces = PieceSizes(piece_tokens, state_tokens)

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
        """`TransformersEngine.generate`, but that the model attends: options and parts are refused, and so are drafts.

        A batch whose rows are padded is handed back where padding before a row's tokens changes nothing of what the layers keep;
        any other batch with padding is computed anew, as the model's own generate does.
        """
        started = perf_counter()
        self._check_ready()
        self._check_plain(query_options(options, **keywords_in(generation)), parts, recompute)
        held, settings = cache_in(generation, OwnCache), settings_of(self._model, generation)
        given = generation.pop("inputs", None) if input_ids is None else input_ids
        prompts = prompts_of(given, attention_mask, settings)
        for prompt in prompts.rows:
            check_positions(self._model, len(prompt.tokens))
        drafted = drafts(settings, generation.get("assistant_model"))
        check_mode(settings, prompts, drafted=drafted, held=held is not None)
        if drafted:
            raise Unsupported(f"{self._name} attends itself, and drafts would be taken back from its cache; leave them out")
        names = names_of(self._db, keep, len(prompts.rows), settings)
        beams, clock = beams_of(settings), FirstToken.among(generation)
        with ExitStack() as stack:
            begun = self._begin_own(prompts, beams, held, stack, store=bool(names) or inspect is not None)
            prefilled, columns = perf_counter(), prompts.ids.shape[1]
            seen = stack.enter_context(recording(self._kept, begun.cache)) if names and begun.sessions else None
            answer = self._model.generate(  # type: ignore[operator]  # transformers does not type it
                prompts.ids, attention_mask=prompts.mask, past_key_values=begun.cache, **generation
            )
            sequences = answer if isinstance(answer, torch.Tensor) else answer.sequences
            times = Times(started, prefilled, clock.first)
            report = self._own_report([len(row.tokens) for row in prompts.rows], begun.reused, times)
            self.last = replace(report, generated=sequences.shape[1] - columns)
            if inspect is not None:
                inspect(begun.sessions)
            if held is not None:
                held.went_on(prompts, sequences, begun.cache)
            lengths = [columns + answer_length(row[columns:-1], settings) for row in sequences]
            self._keep(names, prompts, sequences, lengths, begun.sessions, seen)
        return answer

    def open_cache(self) -> OwnCache:  # type: ignore[override]
        """A cache that several calls of `generate` go on with; close it, or use it in a `with`.

        A prompt that begins with everything that it holds goes on from it; any other stands on what the database has stored. All
        calls have as many rows, and no beams.
        """
        self._check_ready()
        return OwnCache(self._kept)

    def export_cache(self, source: str | kvdb.Context | OwnCache) -> DynamicCache:  # type: ignore[override]
        """What `TransformersEngine.export_cache` gives; tokens behind the last that every layer can go on from are computed."""
        return exported(self._kept, self._db, self.spec, source, self._pieces)

    def import_cache(
        self, cache: DynamicCache, *, name: str, input_ids: Any, **retention: Unpack[RetentionKeywords]
    ) -> kvdb.Context:
        """`TransformersEngine.import_cache`. Layers with states bring those at the end, and layers with a window the last
        tokens, so a later prompt goes on from the end of these tokens or not at all, but for those that were stored before."""
        self._check_ready()
        tokens = as_row(input_ids)
        check_free(self._db, name)
        kv, states = checked_import(self._kept, cache, tokens)
        return self._db.import_context(self.spec, tokens, kv, name=name, states=states, **retention)

    def store(
        self, *, name: str, input_ids: Any, progress: Progress | None = None, **retention: Unpack[RetentionKeywords]
    ) -> kvdb.Context:
        """`TransformersEngine.store`, with states at multiples of `state_tokens` and at the end."""
        started = perf_counter()
        self._check_ready()
        tokens = as_row(input_ids)
        check_positions(self._model, len(tokens))
        check_free(self._db, name)
        with self._db.create_session(self.spec, tokens) as session:
            fill(self._kept, session, tokens, self._pieces, store=True, progress=progress)
            prefilled = perf_counter()
            context = self._db.store(session, name=name, tokens=tokens, **retention)
            self.last = self._own_report([len(tokens)], (session.reused,), Times(started, prefilled))
        return context

    def store_chunk(self, **_given: Any) -> kvdb.Context:
        """Raises Unsupported: what such a model keeps cannot be moved."""
        raise Unsupported(f"{self._name} {self._why_no_chunks()}; store the text as a context")

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _begin_own(self, prompts: PromptBatch, beams: int, held: OwnCache | None, stack: ExitStack, *, store: bool) -> Begun:
        rows = prompts.rows
        if held is not None:
            held.check_serves(self._kept)
        if held is not None and held.goes_on(prompts):
            return Begun(held.take(), [], held.held)
        if not self._can_hand_back(rows):
            return Begun(self._kept.fresh(), [], (0,) * len(rows))
        caches, sessions, reused = [], [], []
        for row in rows:
            known = row.tokens[: -self._left]
            session = stack.enter_context(self._db.create_session(self.spec, known))
            caches.append(fill(self._kept, session, known, self._pieces, store=store))
            reused.append(session.start if not store else session.reused)
            sessions += self._repeated(session, beams if store else 0, stack)
        if len(caches) == beams == 1:
            return Begun(caches[0], sessions, tuple(reused))
        taken = [self._kept.taken(cache, 0) for cache in caches for _ in range(beams)]
        return Begun(self._kept.cache(taken, prompts.ids.shape[1] - self._left), sessions, tuple(reused))

    @property
    def _left(self) -> int:
        """How many of the last tokens of each row the model's own generate reads: two where there are states, see
        `PieceSizes`."""
        return 2 if self._kept.states else 1

    def _repeated(self, session: kvdb.Session, beams: int, stack: ExitStack) -> list[kvdb.Session]:
        """A session for each row that a prompt becomes; none where nothing is stored of them, and the session is closed."""
        if not beams:
            session.close()
            return []
        return [session, *(stack.enter_context(session.fork()) for _ in range(beams - 1))]

    def _can_hand_back(self, rows: Sequence[PromptRow]) -> bool:
        """Whether the rows of a batch, each filled by itself, are what the model makes of the batch."""
        before = all(row.padding == row.padding_end and len(row.tokens) > self._left for row in rows)
        return before and (self._kept.padded or not any(row.padding for row in rows))

    def _keep(
        self,
        names: Names,
        prompts: PromptBatch,
        sequences: torch.Tensor,
        ends: Sequence[int],
        sessions: Sequence[kvdb.Session],
        seen: Recording | None,
    ) -> None:
        """Store the sequences that have a name, as `keep.keep_answers` does. ends: the column behind each one's last token."""
        each = len(sequences) // len(prompts.rows)
        with ExitStack() as undo:
            for i, name in enumerate(names):
                if name is None:
                    continue
                prompt = prompts.rows[i // each]
                answer = sequences[i, prompts.ids.shape[1] : ends[i]]
                tokens = torch.cat([prompt.tokens.to(answer.device), answer])
                if seen is None or (self._kept.states and ends[i] < columns_of(seen.cache)):
                    self._store_anew(name, tokens)
                else:
                    begin = len(prompt.tokens) - self._left
                    put(self._kept, sessions[i], begin, len(tokens), seen.taken(i, ends[i]), states=True)
                    self._db.store(sessions[i], name=name, tokens=tokens)
                undo.callback(self._db.drop, name)
            undo.pop_all()

    def _store_anew(self, name: str, tokens: torch.Tensor) -> None:
        """Store tokens, and compute again those that are not stored: a row that ended before its batch has no state there."""
        with self._db.create_session(self.spec, tokens) as session:
            fill(self._kept, session, tokens, self._pieces, store=True)
            self._db.store(session, name=name, tokens=tokens)

    def _own_report(self, tokens: Sequence[int], reused: tuple[int, ...], times: Times) -> Report:
        """The report of a call that generated nothing."""
        first = times.first_token
        return Report(
            reused=reused,
            prefilled=tuple(n - known for n, known in zip(tokens, reused, strict=True)),
            generated=0,
            prefill_seconds=times.prefilled - times.started,
            first_token_seconds=None if first is None else first - times.started,
            seconds=perf_counter() - times.started,
            explain=None,
        )

    def _check_plain(self, options: kvdb.QueryOptions, parts: Any, recompute: Any) -> None:
        if options != NO_OPTIONS:
            raise Unsupported(f"{self._name} attends itself, so kvdb has no part in which tokens it reads; leave options out")
        if parts is not None or recompute is not None:
            raise Unsupported(f"{self._name} {self._why_no_chunks()}; give input_ids")

    def _why_no_chunks(self) -> str:
        windows = any(isinstance(part, kvdb.Attention) and part.window for part in self._kept.layers)
        what = "states, which stand for everything before them" if self._kept.states else "windows" if windows else ""
        return f"has {what}, so its chunks cannot be moved" if what else "attends itself, so its chunks cannot be recomputed"

    def _check_ready(self) -> None:
        if not self.attached:
            raise InvalidArgument("the model is not attached; use the engine inside its `with attach(model, db) as engine`")
        check_dropout(self._model)
