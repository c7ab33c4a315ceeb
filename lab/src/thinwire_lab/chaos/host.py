"""A simulated machine for a trial: a small disk that can be full or slow, and a clock that can jump. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from types import TracebackType

from thinwire.errors import ConfigError

DISK_BYTES = 96 << 20
CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long none;
static volatile long *ahead(void) {
    static volatile long *found;
    if (!found) {
        const char *path = getenv("THINWIRE_CLOCK");
        int file = path ? open(path, O_RDONLY) : -1;
        void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        found = page == MAP_FAILED ? &none : page;
    }
    return found;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""Library that shifts a process's time of day; the monotonic clock is unchanged."""
THROTTLES = "/sys/fs/cgroup/blkio"


class Host:
    """A disk in a file, mounted where runs write, and a file with the clock's offset; a context manager.

    Args:
        folder: an empty folder of the trial; `disk` in it is the mounted disk.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.disk = os.path.join(folder, "disk")
        self._image = os.path.join(folder, "disk.image")
        self._filler = os.path.join(self.disk, "filler")
        self._time = os.path.join(folder, "time")
        self._clock = os.path.join(folder, "clock.so")
        self._cgroup = os.path.join(THROTTLES, f"thinwire-{os.getpid()}-{os.path.basename(folder)}")

    @staticmethod
    def why_not() -> str | None:
        """Why this machine cannot run it; None where it can."""
        missing = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
        if os.geteuid() != 0:
            return "it mounts a disk, which needs root"
        return f"{', '.join(missing)} is not installed" if missing else None

    def __enter__(self) -> Host:
        if why := self.why_not():
            raise ConfigError(f"the arena host cannot run here: {why}")
        os.makedirs(self.disk)
        self.set_clock(0)
        if shutil.which("cc") is not None:
            with open(f"{self._clock}.c", "w") as source:
                source.write(CLOCK)
            _do("cc", "-shared", "-fPIC", "-O1", "-o", self._clock, f"{self._clock}.c")
        with open(self._image, "wb") as image:
            image.truncate(DISK_BYTES)
        _do("mkfs.ext4", "-q", "-F", "-m", "0", self._image)
        _do("mount", "-o", "loop", self._image, self.disk)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _do("umount", "--lazy", self.disk)
        os.unlink(self._image)
        with contextlib.suppress(OSError):  # a process may still be in the group
            os.rmdir(self._cgroup)

    # -- the disk ---------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Fills the disk to the last byte."""
        with open(self._filler, "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        """Frees the disk."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._filler)

    @property
    def throttles(self) -> bool:
        """Whether writes can be slowed down, which needs cgroups version 1."""
        return os.path.isdir(THROTTLES)

    def slow(self, bytes_per_s: int, pids: list[int]) -> None:
        """Limits the rate at which these processes write; 0 removes the limit."""
        os.makedirs(self._cgroup, exist_ok=True)
        device = os.stat(self.disk).st_dev
        with open(os.path.join(self._cgroup, "blkio.throttle.write_bps_device"), "w") as file:
            file.write(f"{os.major(device)}:{os.minor(device)} {bytes_per_s}")
        for pid in pids:
            with contextlib.suppress(OSError), open(os.path.join(self._cgroup, "cgroup.procs"), "w") as file:
                file.write(str(pid))

    # -- the clock --------------------------------------------------------------------------------------------------

    @property
    def has_clock(self) -> bool:
        """Whether the clock can be shifted, which needs a C compiler."""
        return os.path.exists(self._clock)

    def set_clock(self, offset_s: int) -> None:
        """Shifts the time of day; the monotonic clock is unchanged."""
        with open(self._time, "r+b" if os.path.exists(self._time) else "wb", buffering=0) as file:
            # written in place, so that processes that map the file see it at once
            file.write(struct.pack("l", offset_s))

    def environment(self) -> dict[str, str]:
        """Environment variables of processes whose clock is shifted."""
        return {"LD_PRELOAD": self._clock, "THINWIRE_CLOCK": self._time} if self.has_clock else {}


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the arena host cannot run here: {' '.join(words)} failed: {done.stderr.strip()[-300:]}")
