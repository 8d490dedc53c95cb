"""How much of a stored prefix can be reused: as much as every group of layers can serve."""

from dataclasses import replace

from kvdb.catalog.segments.segment_view import Views, release_views, visible_tokens
from kvdb.types import ModelSpec


def servable(spec: ModelSpec, views: Views) -> Views:
    """Cut a stored prefix to what every group of layers can serve. Takes over the references to the views; the caller owns
    those to the answer's.

    Layers with attention can serve any part of it. Those with a window need the tokens that the next query sees, which may not
    have been kept in the middle of a segment. Those with a state need one of exactly that length.
    """
    if spec.uniform:
        return views
    tokens = visible_tokens(views)
    while tokens:
        end = min(_with_states(spec, views, tokens), _with_windows(spec, views, tokens))
        if end == tokens:
            break
        tokens = end
    return _cut(views, tokens)


def _with_states(spec: ModelSpec, views: Views, tokens: int) -> int:
    """The most of the first tokens of which there is a snapshot of every state."""
    if not spec.has_states:
        return tokens
    for view in reversed(views):
        positions = [view.begin + at for at in view.segment.states.positions if at <= view.visible and view.begin + at <= tokens]
        if positions:
            return positions[-1]
    return 0


def _with_windows(spec: ModelSpec, views: Views, tokens: int) -> int:
    """These tokens, if every layer with a window holds what the next query sees; else those before the segment that does not."""
    for place, kept in enumerate(spec.kept):
        sees = max(0, tokens - kept.shape.window + 1)
        for view in views if kept.shape.window else ():
            unseen = view.segment.unseen
            held = view.begin + unseen[place] if unseen else view.begin
            if view.begin < tokens and max(sees, view.begin) < min(held, view.end):
                return view.begin
    return tokens


def _cut(views: Views, tokens: int) -> Views:
    """The first tokens of a prefix; the references to segments behind them are released."""
    kept = tuple(replace(view, visible=min(view.visible, tokens - view.begin)) for view in views if view.begin < tokens)
    release_views(views[len(kept) :])
    return kept
