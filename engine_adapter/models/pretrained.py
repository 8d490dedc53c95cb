"""The model that others trained: SmolLM2-135M-Instruct, where `make real-model` has put it, and public-domain prose beside it.

Nothing of either is part of kvdb: both are fetched into the user's cache folder, for measurements and tests.
"""

from pathlib import Path

from kvdb.config import OWN_CACHE
from kvdb.hardware.profile import path_of

NAME = "smollm2-135m-instruct"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
"""What a whole model folder holds."""
REASON = "the pretrained model is not in the cache folder; make real-model fetches it"


def cache_folder() -> Path | None:
    """kvdb's folder in the user's cache (`$XDG_CACHE_HOME/kvdb` or `~/.cache/kvdb`), None where there is no home folder."""
    machine_file = path_of(OWN_CACHE)
    return machine_file and machine_file.parent


def real_model_folder() -> Path | None:
    """The folder of the model, for `vault.load_from` or transformers' `from_pretrained`; None where it was not fetched."""
    cache = cache_folder()
    folder = cache and cache / "models" / NAME
    return folder if folder and all((folder / name).exists() for name in FILES) else None


def novels() -> tuple[str, ...]:
    """The texts of Jane Austen's six novels, in the order of their titles; none where they were not fetched.

    Lines are joined to paragraphs, which an empty line separates.
    """
    cache = cache_folder()
    paths = sorted((cache / "texts" / "austen").glob("*.txt")) if cache else []
    return tuple(path.read_text(encoding="utf-8") for path in paths)
