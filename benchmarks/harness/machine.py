"""What a report says about where and how it was made."""
import datetime
import os
import platform
import subprocess


def _output(*command, cwd=None):
    try:
        return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60,
                              env=dict(os.environ, LC_ALL="C")).stdout.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _lscpu():
    fields = {}
    for line in _output("lscpu").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def describe(repository, python):
    """A flat dictionary of texts; what cannot be found out is left out."""
    cpu = _lscpu()
    commit = _output("git", "rev-parse", "--short=12", "HEAD", cwd=repository)
    if commit and _output("git", "--no-optional-locks", "status", "--porcelain", cwd=repository):
        commit += " with changes that are not committed"
    torch = _output(python, "-c", "import importlib.metadata as m; print(m.version('torch'))")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "CPU": cpu.get("Model name", platform.processor()),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "caches": ", ".join(f"{n} {cpu[n + ' cache']}" for n in ("L1d", "L2", "L3") if n + " cache" in cpu),
        "hypervisor": cpu.get("Hypervisor vendor", ""),
        "memory": f"{memory:.1f} GiB",
        "GPUs": "; ".join(_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "commit": commit,
        "torch": torch,
        "Python of the peers": _output(python, "-c", "import platform; print(platform.python_version())"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "load before": "%.2f %.2f %.2f" % os.getloadavg(),
    }
    return {name: value for name, value in facts.items() if value}
