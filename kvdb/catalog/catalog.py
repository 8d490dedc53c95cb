"""The catalogue: contexts by name, and a prefix tree for each spec."""

from dataclasses import dataclass
from threading import Lock

from kvdb.catalog.prefix_tree import PrefixTree
from kvdb.catalog.segment import Views, visible_tokens
from kvdb.errors import AlreadyExists, NotFound
from kvdb.types import ContextInfo, ContextStatistics, ModelSpec, Tokens


@dataclass(frozen=True)
class Context:
    """A named, ordered list of segment views."""

    name: str
    spec: ModelSpec
    views: Views

    def info(self) -> ContextInfo:
        return ContextInfo(
            name=self.name,
            spec=self.spec,
            tokens=visible_tokens(self.views),
            segments=len(self.views),
            nbytes=sum(view.segment.nbytes for view in self.views),
        )

    def statistics(self) -> ContextStatistics:
        segments = [view.segment for view in self.views]
        shape = self.spec.layers, self.spec.q_heads
        return ContextStatistics(self.name, tuple(s.statistics.of_segment(s.number, len(s), shape) for s in segments))


class Catalog:
    """Contexts and the segments they hold references to. Thread-safe."""

    def __init__(self) -> None:
        self._contexts: dict[str, Context] = {}
        self._trees: dict[str, PrefixTree] = {}
        self._lock = Lock()

    def publish(self, context: Context) -> None:
        """Make a context visible; it takes over the caller's references to its segments. Raises AlreadyExists."""
        with self._lock:
            self._check_free(context.name)
            self._contexts[context.name] = context
            self._trees.setdefault(context.spec.digest, PrefixTree()).add(context.views)

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists when the name is taken."""
        with self._lock:
            self._check_free(name)

    def match(self, spec: ModelSpec, tokens: Tokens) -> Views:
        """Views of the longest stored prefix of `tokens`. The caller owns one reference to each view's segment."""
        with self._lock:
            tree = self._trees.get(spec.digest)
            views = tree.match(tokens) if tree else ()
            for view in views:
                view.segment.retain()
            return views

    def get(self, name: str) -> Context:
        """Raises NotFound."""
        with self._lock:
            return self._find(name)

    def hold(self, name: str) -> Views:
        """The views of a context; the caller owns one reference to each view's segment. Raises NotFound."""
        with self._lock:
            views = self._find(name).views
            for view in views:
                view.segment.retain()
            return views

    def contexts(self) -> list[Context]:
        """Every context, in the order of their names."""
        with self._lock:
            return [self._contexts[name] for name in sorted(self._contexts)]

    def drop(self, name: str) -> None:
        """Forget a context; segments that nobody else holds are freed. Raises NotFound."""
        with self._lock:
            context = self._find(name)
            del self._contexts[name]
            self._trees[context.spec.digest].remove(context.views)
        release(context.views)

    def _find(self, name: str) -> Context:
        if name not in self._contexts:
            known = ", ".join(repr(n) for n in sorted(self._contexts)[:5]) or "none"
            raise NotFound(f"no context is named {name!r}; {len(self._contexts)} are stored ({known}), see db.contexts()")
        return self._contexts[name]

    def _check_free(self, name: str) -> None:
        if name in self._contexts:
            raise AlreadyExists(f"a context named {name!r} is stored already; drop it first or choose another name")


def release(views: Views) -> None:
    """Give back one reference to each view's segment."""
    for view in views:
        view.segment.release()
