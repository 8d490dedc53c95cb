"""A context in a file that other programs read, of the format safetensors, and a manifest beside it.

Such a file (https://github.com/huggingface/safetensors) is the length of its header, uint64 little-endian; the header, JSON that
names each tensor's dtype, shape and bytes; then the bytes. The tensors are `tokens`, int32 `[n]`, and of each layer `layers.L.k`
and `layers.L.v`, `[kv_heads, n, head_dim]` in the spec's dtype, keys after RoPE, at the positions from 0 on. The manifest is
JSON: format, version, name, the model's spec, the salt, the number of tokens, and whether the KV is exactly that of these tokens:
that of a blend, or of a chunk that was moved, is what attention sees of it. It stands in the header too, as metadata.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvdb.client.client import Client
from kvdb.client.context import Context
from kvdb.errors import IntegrityError, InvalidArgument, Unsupported
from kvdb.types import DTYPES, Array, ContextInfo, KeysValues, ModelSpec, Tokens

FORMAT, VERSION = "kvdb context", 1
ENDING = ".safetensors"
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""What safetensors calls each dtype."""
HEADER_BYTES_MAX = 100 << 20


class Manifest(NamedTuple):
    """What a file says of its context. exact: as in `ContextInfo`."""

    name: str
    spec: ModelSpec
    salt: str
    tokens: int
    exact: bool

    @classmethod
    def of(cls, info: ContextInfo) -> "Manifest":
        """Raises Unsupported for a model whose layers differ."""
        if not info.spec.uniform:
            raise Unsupported(
                f"the layers of {info.spec.name} differ ({info.spec.shapes}); such contexts are not exported to a file"
            )
        return cls(info.name, info.spec, info.salt, info.tokens, info.exact)

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Raises ValueError, KeyError or TypeError for a text that is no manifest, SpecError, and Unsupported for a version."""
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}")
        if fields["version"] != VERSION:
            raise Unsupported(f"the file has version {fields['version']!r}; this kvdb reads version {VERSION}, so upgrade kvdb")
        spec, tokens = ModelSpec.from_dict(fields["spec"]), int(fields["tokens"])
        return cls(str(fields["name"]), spec, str(fields["salt"]), tokens, bool(fields.get("exact", True)))

    def text(self) -> str:
        fields = {**self._asdict(), "spec": self.spec.to_dict()}
        return json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=2, sort_keys=True)

    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """The dtype and shape of each tensor, in the order in which they stand in the file."""
        one = NAMES[self.spec.dtype], [self.spec.kv_heads, self.tokens, self.spec.head_dim]
        layers = {f"layers.{layer}.{which}": one for layer in range(self.spec.layers) for which in "kv"}
        return {"tokens": ("I32", [self.tokens]), **layers}


def write(context: Context, path: Path) -> int:
    """Write a context to `path` and its manifest beside it, layer by layer. Returns the bytes of both.

    Raises NotFound, OSError, InvalidArgument for a name that does not end with .safetensors, Unsupported for a model whose layers
    differ, and what reading the context raises; then there is no file.
    """
    if path.suffix != ENDING:
        raise InvalidArgument(f"{path} does not end with {ENDING}; expected a name that does")
    manifest = Manifest.of(context.info)
    text = manifest.text()
    with path.open("xb") as file, ExitStack() as undo:
        undo.callback(path.unlink)
        header = json.dumps(_header(manifest, text)).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(np.ascontiguousarray(context.token_ids(), "<i4").data)
        for layer in range(manifest.spec.layers):
            for array in context.read(layer):
                file.write(np.ascontiguousarray(array).view(np.uint8).data)
        beside = path.with_suffix(".json")
        undo.callback(beside.unlink, missing_ok=True)
        beside.write_text(text + "\n")
        undo.pop_all()
    return path.stat().st_size + len(text) + 1


def store(db: Client, path: Path, name: str | None = None) -> Context:
    """Import a context from a file that `write` wrote, layer by layer. name: another than the one that it had. One that is not
    exact gets a salt of its own, made of its name, so that no lookup takes it for its tokens; `Context.create_session` uses
    it, and metadata notes that it is not exact.

    Raises OSError, IntegrityError for a file that is cut short or has another header, Unsupported for another version, and what
    `import_context` raises.
    """
    manifest, tokens, at = _opened(path)
    kv, kept = _layers(path, manifest, at), name or manifest.name
    if manifest.exact:
        return db.import_context(manifest.spec, tokens, kv, name=kept, salt=manifest.salt)
    salt = f"not exact: {sha256(json.dumps([manifest.salt, kept]).encode()).hexdigest()}"
    return db.import_context(manifest.spec, tokens, kv, name=kept, salt=salt, metadata={"exact": False})


def _header(manifest: Manifest, text: str) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"kvdb": text}}
    at = 0
    for name, (dtype, shape) in manifest.tensors().items():
        end = at + int(np.prod(shape)) * (2 if dtype.endswith("16") else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header


def _opened(path: Path) -> tuple[Manifest, Tokens, int]:
    """The manifest, the ids, and where in the file the tensors begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= HEADER_BYTES_MAX:
            raise IntegrityError(f"{path} is no safetensors file: its header would have {length:,} bytes")
        content = file.read(length)
        try:
            header: Mapping[str, Any] = json.loads(content)
            manifest = Manifest.from_text(header["__metadata__"]["kvdb"])
            expected = _header(manifest, header["__metadata__"]["kvdb"])
        except (KeyError, ValueError, TypeError) as error:
            raise IntegrityError(f"{path} is no context that kvdb exported: {error!r:.200}") from None
        size = 8 + length + max(tensor["data_offsets"][1] for name, tensor in expected.items() if name != "__metadata__")
        if header != expected or path.stat().st_size != size:
            raise IntegrityError(f"{path} holds other tensors, or fewer bytes, than its manifest says; export it again")
        tokens = np.frombuffer(file.read(4 * manifest.tokens), "<i4").astype(np.int32)
        return manifest, tokens, 8 + length


def _layers(path: Path, manifest: Manifest, at: int) -> Iterator[KeysValues]:
    """The keys and values of the layers, one after the other; `at`: where the tensors begin."""
    dtype = DTYPES[manifest.spec.dtype]
    shape = manifest.spec.kv_heads, manifest.tokens, manifest.spec.head_dim
    with path.open("rb") as file:
        file.seek(at + 4 * manifest.tokens)

        def read() -> Array:
            return np.frombuffer(file.read(int(np.prod(shape)) * dtype.itemsize), np.uint8).view(dtype).reshape(shape)

        for _ in range(manifest.spec.layers):
            yield read(), read()
