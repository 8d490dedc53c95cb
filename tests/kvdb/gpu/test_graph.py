"""A step: launched anew where there is no card, captured and replayed where there is one."""

import contextlib
import logging

import numpy as np
import pytest
import torch

from kvdb.attention.triton.batch import Batch, Piece
from kvdb.attention.triton.decode import decode
from kvdb.gpu.graph import CapturedStep
from kvdb.storage.slot import SlotLayout
from tests.kvdb.attention.triton.reference import DEVICE, attention, error, fill, make_pages, read


def test_without_a_card_every_call_launches():
    calls = []
    step = CapturedStep(lambda: calls.append(1), stream=object())
    for _ in range(3):
        step()
    assert len(calls) == 3
    assert not step.captured


def test_a_decode_step_answers_other_queries_and_longer_contexts_from_the_same_buffers():
    device, stream = DEVICE, torch.cuda.Stream() if torch.cuda.is_available() else None
    layout = SlotLayout("float32", 1, 16, 8)
    pages, slots = make_pages(layout, 9, device), np.array([4, 2, 7], np.int32)
    fill(pages, slots, 24)
    batch = Batch([[Piece(slots, 20)]], 2, device, layout=layout)
    q, out, lse = (torch.empty(shape, device=device) for shape in ((1, 2, 16), (1, 2, 16), (1, 2)))
    step = CapturedStep(lambda: decode(q, pages, batch, 0.5, out, lse), stream)
    for tokens in (20, 21, 22, 24):
        new = torch.randn((1, 2, 16), generator=torch.Generator().manual_seed(tokens)).to(device)
        out.fill_(torch.nan)
        q.copy_(new)
        batch.set_tails(np.array([tokens]))
        if stream is not None:
            torch.cuda.synchronize()
        step()
        if stream is not None:
            torch.cuda.synchronize()
        right, right_lse, _ = attention(new[0][:, None], *read(pages, slots, tokens), 0.5)
        assert error(out[0], right[:, 0]) < 1e-5
        assert error(lse[0], right_lse[:, 0]) < 1e-5
    assert step.captured == (stream is not None)


class Card:
    """Stands for a card: what a graph would do is written down."""

    def __init__(self, monkeypatch, refuses=False):
        self.did, self.capturing, card = [], False, self

        class Stream:
            def __init__(self, device="cuda:0"):
                self.device = device

        class Graph:
            def replay(self):
                card.did.append("replay")

        @contextlib.contextmanager
        def graph(graph, stream, capture_error_mode):
            assert (type(graph), type(stream), capture_error_mode) == (Graph, Stream, "thread_local")
            card.capturing = True
            try:
                yield
            finally:
                card.capturing = False
            if refuses:
                raise RuntimeError("operation not permitted when stream is capturing")

        for name, value in {"Stream": Stream, "CUDAGraph": Graph, "graph": graph, "stream": contextlib.nullcontext}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        self.stream = Stream()

    def launch(self):
        self.did.append("capture" if self.capturing else "launch")


def test_on_a_card_the_second_call_captures_and_replays(monkeypatch):
    card = Card(monkeypatch)
    step = CapturedStep(card.launch, card.stream)
    for _ in range(3):
        step()
    assert card.did == ["launch", "capture", "replay", "replay"]
    assert step.captured
    step.reset()
    step()
    assert card.did[4:] == ["launch"]


def test_what_cannot_be_captured_is_launched_each_time_and_said_once(monkeypatch, caplog):
    card = Card(monkeypatch, refuses=True)
    step = CapturedStep(card.launch, card.stream)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            step()
    assert card.did == ["launch", "capture", "launch", "launch", "launch"]
    assert [record.getMessage() for record in caplog.records] == [
        "a step could not be captured in a CUDA graph and is launched each time: operation not permitted when stream is capturing"
    ]


def test_an_error_of_the_launch_itself_is_raised(monkeypatch):
    card = Card(monkeypatch)
    step = CapturedStep(lambda: (_ for _ in ()).throw(ValueError("mine")), card.stream)
    with pytest.raises(ValueError, match="mine"):
        step()
