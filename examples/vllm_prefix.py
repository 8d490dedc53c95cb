"""vLLM over a store on disk: the second run of this program finds the prompt that the first one computed.

Run it twice: python examples/vllm_prefix.py MODEL STORE. MODEL is the folder of a checkpoint in safetensors; docs/vllm.md says
how vLLM is installed, and how it asks a server in place of a folder.
"""

import os
import sys
import time

# A folder is open in one process at a time, so vLLM's scheduler and its worker have to be one.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a CPU: threads that spin would slow each other

QUESTION = "Summarise the following.\n\n" + "A database keeps what would otherwise be computed again. " * 60


def main(model: str, store: str) -> None:
    from vllm import LLM, SamplingParams  # here, so that the variables above are set

    connector = {
        "kv_connector": "KvdbConnector",
        "kv_connector_module_path": "engine_adapter.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # a load that fails is computed; vLLM's default ends the request
        "kv_connector_extra_config": {"target": store},
    }
    llm = LLM(model, kv_transfer_config=connector, enforce_eager=True, max_model_len=2048)
    begun = time.perf_counter()
    (answer,) = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=16))
    seconds = time.perf_counter() - begun
    found = answer.num_cached_tokens or 0
    print(f"{found} of {len(answer.prompt_token_ids)} tokens of the prompt were found; {seconds:.2f} s")
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
