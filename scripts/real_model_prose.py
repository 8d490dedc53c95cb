"""Prose in the public domain for the benchmarks: Jane Austen's novels, out of Debian's package of them for R.

The package is the only use of R: its file of data is read here, as zlib pieces of R's serialised character vectors.
"""

import hashlib
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = "r-cran-janeaustenr=1.0.0-1"
PACKAGE_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
NOVELS = 6
CHARACTER_VECTOR, STRING = 16, 9
"""Kinds of R's values, in the low byte of their flags."""


def fetch(downloads: Path, folder: Path, say: Callable[[str], None]) -> None:
    """One file for each novel in `folder`, fetched if they are not there; without Debian's tools it says so, and that is all.

    Raises ValueError where the package is another one than was pinned.
    """
    if len(list(folder.glob("*.txt"))) == NOVELS:
        say(f"the novels are there: {folder}")
        return
    get, unpack = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if get is None or unpack is None:
        say("no novels: they come out of a Debian package, and apt-get is not here; the benchmarks take other prose")
        return
    say(f"fetching {PACKAGE} (1.6 MB; Jane Austen's novels, in the public domain)")
    done = subprocess.run([get, "download", PACKAGE], cwd=downloads, capture_output=True, text=True, check=False)
    if done.returncode:
        say(f"no novels: {done.stderr.strip().splitlines()[-1]}")
        return
    (package,) = downloads.glob("r-cran-janeaustenr_*.deb")
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != PACKAGE_SHA256:
        raise ValueError(f"{package} has the checksum {found}; expected {PACKAGE_SHA256}, so it is not used")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run([unpack, "--extract", package, unpacked], check=True)
        for lines in vectors((Path(unpacked) / DATA).read_bytes()):
            title = lines[0].lower().replace(" ", "-")
            (folder / f"{title}.txt").write_text(paragraphs(lines), encoding="utf-8")
    package.unlink()


def vectors(data: bytes) -> Iterator[list[str]]:
    """The character vectors in a file of R's lazy data: pieces of zlib, each behind four bytes of its length."""
    while data:
        piece = zlib.decompressobj()
        yield strings(piece.decompress(data[4:]))
        data = piece.unused_data


def strings(data: bytes) -> list[str]:
    """The strings of a serialised character vector, XDR of version 3. Raises ValueError where it is something else."""
    name_bytes = struct.unpack_from(">i", data, 14)[0]
    flags, count = struct.unpack_from(">Ii", data, 18 + name_bytes)
    if not data.startswith(b"X\n") or flags & 0xFF != CHARACTER_VECTOR:
        raise ValueError(f"expected a character vector of R; found {data[:32]!r}")
    place = 26 + name_bytes
    found = []
    for _ in range(count):
        flags, size = struct.unpack_from(">Ii", data, place)
        if flags & 0xFF != STRING:
            raise ValueError(f"expected a string of R at byte {place}; found flags {flags:#x}")
        found.append(data[place + 8 : place + 8 + size].decode())
        place += 8 + size
    return found


def paragraphs(lines: list[str]) -> str:
    """Lines joined to paragraphs, with an empty line between two."""
    blocks = "\n".join(lines).split("\n\n")
    return "\n\n".join(" ".join(block.split()) for block in blocks if block.strip()) + "\n"
