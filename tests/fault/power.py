"""Cuts the power of a disk: ext4 on a loop device is shut down without its log, again and again, while a process uses a store.

python -m tests.fault.power --cuts 500 --seed 1

What was written and not synced is lost, as if the machine's power had gone; Linux lets root do that (EXT4_IOC_SHUTDOWN). The
process is stopped first, as it would be by the loss of power: a sync that is under way then may be told that it succeeded. Of 150
processes that only append and sync, without kvdb, 2 were told so of what was lost; of 300 that were stopped first, none.
"""

import argparse
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.fault.kill import Moment, Told, counted, lines_until_killed
from tests.fault.processes import Processes
from tests.fault.story import open_store

SHUTDOWN, WITHOUT_LOG = 0x8004587D, 2
"""EXT4_IOC_SHUTDOWN, and EXT4_GOING_FLAGS_NOLOGFLUSH: not even the log is written."""
IMAGE_BYTES = 96 << 20
MEMORY = Path("/dev/shm")


class NoLoopMounts(Exception):
    """File systems cannot be mounted here, as in many containers, or by anybody but root."""


class Disk:
    """An ext4 file system in a file."""

    def __init__(self, root):
        """Raises NoLoopMounts."""
        self._image, self.folder = root / "image", root / "disk"
        self.folder.mkdir()
        with self._image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        call("mkfs.ext4", "-q", "-F", str(self._image))

    @contextmanager
    def mounted(self, options="loop"):
        call("mount", "-o", options, str(self._image), str(self.folder))
        try:
            yield
        finally:
            call("umount", str(self.folder))

    def cut(self):
        """Nothing reaches the disk from now on."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", WITHOUT_LOG))
        finally:
            os.close(folder)

    def fail(self):
        """Have the file system meet an error, after which it does what its mount options say. Raises NoLoopMounts."""
        device = self.folder.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        try:
            Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")
        except OSError as error:
            raise NoLoopMounts(f"ext4 cannot be told to fail: {error}") from None


def call(*command):
    """Run a command of the system's. Raises NoLoopMounts where it fails."""
    if shutil.which(command[0]) is None:
        raise NoLoopMounts(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLoopMounts(f"{' '.join(command)}: {done.stderr.strip()}")


def run(cuts, seed, durability="durable"):
    """Cut the power `cuts` times. Returns how many calls were acknowledged, by action, and how many contexts were lost, which
    "durable" ones must not be. Raises AssertionError or IntegrityError for anything that is wrong, half there or left behind, and
    NoLoopMounts."""
    told, lost = Told(lambda kept: durability == "os"), 0
    rng = np.random.default_rng((seed, 0xC07))
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root,
        Processes("tests.fault.killed", heard=False) as processes,
    ):
        disk = Disk(Path(root))
        store = disk.folder / "store"
        with disk.mounted(), open_store(store):
            pass
        for number in range(cuts):
            run_seed, moment = seed * 100_000 + number, Moment.random(rng)
            with disk.mounted():
                told.read(run_seed, lines_until_killed(processes, store, run_seed, moment, durability, before=disk.cut))
            with disk.mounted():
                lost += told.check(store, f"cut {number} of seed {seed}", files_may_stay=True)
    return told.calls, lost


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durability", choices=("os", "durable", "broken"), default="durable")
    given = parser.parse_args()
    try:
        calls, lost = run(given.cuts, given.seed, given.durability)
    except NoLoopMounts as reason:
        sys.exit(f"tests.fault.power cannot cut the power here: {reason}")
    promised = "nothing lost, wrong or half there" if given.durability != "os" else f"{lost} contexts lost, none wrong"
    sys.stdout.write(f"{given.cuts} power cuts, {counted(calls)}: {promised}\n")


if __name__ == "__main__":
    main()
