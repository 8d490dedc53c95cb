"""What the scheduler knows of prompts with documents, with requests that have vLLM's fields."""

from types import SimpleNamespace

from engine_adapter.vllm.blends import Blends
from engine_adapter.vllm.marks import BlendOptions

BLOCK = 16
RESULT = {"reused": 20, "recomputed": 5, "fresh": 5, "stored": 25, "ratio": 0.2, "laid_out": 30}


def request(tokens, name="a", salt=None, lora=None, **extra):
    """One whose only block hash depends on its salt."""
    asked = SimpleNamespace(
        request_id=name,
        prompt_token_ids=tokens,
        cache_salt=salt,
        lora_request=lora,
        kv_transfer_params=None,
        sampling_params=SimpleNamespace(extra_args=extra),
        block_hashes=[salt],
    )
    asked.update_block_hashes = lambda: asked.block_hashes.append(asked.cache_salt)
    return asked


def test_a_marked_prompt_is_blended_up_to_its_last_document():
    blends, asked = Blends(BlendOptions(), BLOCK), request(list(range(40)), kvdb_parts=[[5, 30]])
    blends.begin(asked, "tenant")
    assert blends.match("a", 0) == 30
    blends.allocate("a", [7, 8, 9], 30)
    (blend,) = blends.take_step()
    assert (blend.load.start, blend.load.stop, blend.load.blocks, blend.load.salt) == (0, 30, (7, 8), "tenant")
    assert blend.load.tokens.tolist() == list(range(30))
    assert blends.take_step() == ()
    blends.receive({"a": RESULT, "b": RESULT})
    assert blends.result("a") == {"kvdb_blend": RESULT | {"tail": 10}}
    blends.forget(["a"])
    assert blends.result("a") is None


def test_its_blocks_are_its_own():
    blends = Blends(BlendOptions(), BLOCK)
    asked = [request([1] * 9, name, "tenant", kvdb_parts=[[0, 4]]) for name in "ab"]
    for each in asked:
        blends.begin(each, "tenant")
    hashes = {each.block_hashes[0] for each in asked}
    assert len(hashes) == 2
    assert "tenant" not in hashes


def test_the_last_token_is_left_to_vllm():
    blends = Blends(BlendOptions(), BLOCK)
    blends.begin(request([1] * 9, kvdb_parts=[[0, 9]]), "")
    assert blends.match("a", 0) == 8
    blends.allocate("a", [3], 8)
    (blend,) = blends.take_step()
    assert (blend.load.stop, len(blend.load.tokens)) == (8, 9)


def test_what_is_not_marked_stays_as_it_is():
    marks = {"kvdb_parts": [[0, 4]]}
    for options, asked, salt in (
        (BlendOptions(), request([1] * 9), ""),
        (None, request([1] * 9, **marks), ""),
        (BlendOptions(), request([1] * 9, **marks), None),
    ):
        blends = Blends(options, BLOCK)
        blends.begin(asked, salt)
        assert blends.match("a", 0) is None
        assert blends.result("a") is None
        assert asked.cache_salt is None


def test_what_is_refused_is_computed_and_says_so():
    blends = Blends(BlendOptions((1,), (2,)), BLOCK)
    for asked, reason in ((request([5, 1, 6]), "close"), (request([5] * 4, "b", lora=object(), kvdb_parts=[[0, 2]]), "LoRA")):
        blends.begin(asked, "")
        assert blends.match(asked.request_id, 0) is None
        assert reason in blends.result(asked.request_id)["kvdb_blend"]["refused"]
        assert asked.cache_salt is None


def test_a_blend_that_failed_is_not_tried_again():
    blends = Blends(BlendOptions(), BLOCK)
    blends.begin(request([1] * 40, kvdb_parts=[[0, 30]]), "")
    assert blends.match("a", 0) == 30
    blends.receive({"a": {"refused": "the server went"}})
    assert blends.match("a", 0) == 0
    assert blends.result("a") == {"kvdb_blend": {"refused": "the server went"}}
