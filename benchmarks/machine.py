"""What a result was measured on, and where results are kept."""

from __future__ import annotations

import json
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import kinfolk

RESULTS = Path(__file__).parent / "results"


def facts(device: torch.device) -> dict[str, Any]:
    """Version, machine and command of this process."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    words = list(sys.argv[1:])
    if "--out" in words:  # where a result is kept says nothing about it
        del words[words.index("--out") : words.index("--out") + 2]
    return {
        "kinfolk": kinfolk.__version__,
        "commit": commit or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "command": "python " + shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def keep(name: str, device: torch.device, rows: list[dict[str, Any]], folder: Path = RESULTS, **more: Any) -> Path:
    """Write the rows with the machine's facts, and whatever `more` holds, to NAME-DEVICE.json in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{device.type}.json"
    path.write_text(json.dumps({"facts": facts(device), **more, "rows": rows}, indent=2) + "\n")
    return path


def in_turns(works: Sequence[Callable[[int], object]], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds of work(1), work(2), ... of each, done in turns: a busy machine hurts all of them."""
    times: list[list[float]] = [[] for _ in works]
    for t in range(1, rounds + 1):
        for work, found in zip(works, times):
            begin = time.perf_counter()
            work(t)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
    return times


def reset_peak(device: torch.device) -> None:
    """Let the peak of the memory start from what is in use now (on a CPU: Linux only)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (path := Path("/proc/self/clear_refs")).exists():
        path.write_text("5")


def peak_memory(device: torch.device) -> int:
    """The most bytes in use at once since `reset_peak`: of the GPU, or of the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def resident(field: str = "VmRSS") -> int:
    """Bytes of the process that lie in memory: now, or at most (VmHWM)."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
