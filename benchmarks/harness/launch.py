"""Runs one program on N ranks of this host without a launcher: torchrun's variables, a free port, a deadline.

A run ends in a Result: the JSON that rank 0 wrote, or a reason that names the rank. No rank outlives it.
"""
import json
import os
import signal
import socket
import subprocess
import time

GRACE_S = 10  # what other ranks get when one has failed: they report who died
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "GROUP_", "ROLE_")


class Result:
    """`data` is None exactly when the run failed; then `error` says why."""

    def __init__(self, data=None, error=None, seconds=0.0):
        self.data, self.error, self.seconds = data, error, seconds


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank, ranks, port):
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
               MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # it would slow the start of the peers
    return env


def tail(path, lines=12):
    with open(path, errors="replace") as file:
        return "".join(file.readlines()[-lines:]).strip()


def wait(processes, deadline_s):
    """Waits for all ranks; returns (rank, reason) of the first that failed, or None."""
    end, failure = time.monotonic() + deadline_s, None
    while True:
        codes = [p.poll() for p in processes]
        if failure is None:
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    reason = f"ended with status {code}" if code > 0 else f"was killed by signal {-code}"
                    failure, end = (rank, reason), min(end, time.monotonic() + GRACE_S)
                    break
        if None not in codes:
            return failure
        if time.monotonic() > end:
            late = f"was still running at the deadline of {deadline_s:g} s, and was killed"
            return failure or (codes.index(None), late)
        time.sleep(0.05)  # seldom: the ranks want all cores


def run(command, ranks, json_path, log_prefix, deadline_s, json_option="--json"):
    """`command` + [json_option, json_path] on `ranks` ranks; logs go to <log_prefix>.rank<r>.log."""
    for path in [json_path] + [f"{log_prefix}.rank{r}.log" for r in range(ranks)]:
        if os.path.exists(path):
            os.remove(path)
    begin, port, processes, failure = time.monotonic(), free_port(), [], None
    try:
        for rank in range(ranks):
            with open(f"{log_prefix}.rank{rank}.log", "wb") as log:
                # A session of its own: whatever a rank starts ends with it, and Ctrl-C comes here alone.
                processes.append(subprocess.Popen(command + [json_option, json_path], env=environment(rank, ranks, port),
                                                  stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                                  start_new_session=True))
        failure = wait(processes, deadline_s)
    except OSError as error:
        failure = (len(processes), f"cannot be started: {error}")
    finally:
        for p in processes:
            try:
                os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            p.wait()
    seconds = time.monotonic() - begin
    data = None
    try:
        with open(json_path) as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        failure = failure or (0, f"left no result: {error}")
    if failure is None:
        return Result(data, None, seconds)
    rank, reason = failure
    log = f"{log_prefix}.rank{rank}.log"
    text = tail(log) if os.path.exists(log) else ""
    # A result with wrong elements is kept: the report shows how many.
    wrong = data is not None and any(row.get("wrong") for row in data.get("rows", []))
    error = f"rank {rank}/{ranks} {reason}: {' '.join(command)}\n{text}".strip()
    return Result(data if wrong else None, error, seconds)
