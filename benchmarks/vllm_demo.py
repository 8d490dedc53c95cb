"""Shows the first token of a long prompt in vLLM, without kvdb and with it, over a restart: `make demo-vllm`.

Three processes of vLLM answer the same prompt. The second is the first with kvdb behind it, the third finds what the second kept.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import vllm_binding
from benchmarks.harness import argument_parser
from benchmarks.vllm import kvdb_in, prose, run
from engine_adapter.models.pretrained import real_model_folder


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2500, help="of the prompt (default %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    given = parser.parse_args()
    prompt = prose(0, given.tokens)
    print(f"SmolLM2-135M reads {given.tokens:,} tokens of a novel and goes on, in {given.dtype}, each time in a new process,")
    print(f"whose {len(vllm_binding.cores())} threads are on processors {', '.join(map(str, vllm_binding.cores()))}.")
    with tempfile.TemporaryDirectory(prefix="kvdb-vllm-") as folder:
        store = kvdb_in(Path(folder, "store"))
        ways = {"vLLM": None, "vLLM on kvdb, which is empty": store, "vLLM on kvdb, after a restart": store}
        answers = {}
        for way, connector in ways.items():
            (answers[way],) = run(given, connector, calls=[[{"prompt": prompt, "tokens": 16}]])["calls"][0]
            print(f"  {way:30} {told(answers[way])}", flush=True)
    plain, *_, found = answers.values()
    print(f"The last is {plain['first_s'] / found['first_s']:.1f} times sooner.")
    if given.dtype == "float32":
        same = all(one["tokens"] == plain["tokens"] for one in answers.values())
        print("All three answer with the same tokens:" if same else "THE TOKENS DIFFER:", repr(text_of(found)))


def told(answer: dict[str, Any]) -> str:
    return f"first token after {answer['first_s']:6.2f} s, {answer['cached']:5,} tokens of the prompt were found"


def text_of(answer: dict[str, Any]) -> str:
    return str(Tokenizer.from_file(f"{real_model_folder()}/tokenizer.json").decode(answer["tokens"]))


if __name__ == "__main__":
    main()
