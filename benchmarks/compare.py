#!/usr/bin/env python3
"""Runs libddp and the peers in benchmarks/peers/ side by side, alternately, and writes build/bench/report.md.

  bash cmake/quickstart.sh build && python3 benchmarks/compare.py            all, about a quarter of an hour
  python3 benchmarks/compare.py --quick --only step                          two rounds, fewer steps
  python3 benchmarks/compare.py --only qwen                                  pretraining, against transformers
  python3 benchmarks/compare.py --backend nccl --ranks 4                     on GPUs; the bars are for 2 ranks on CPU
  python3 benchmarks/compare.py --last old/report.json                       also: ours now against ours then
  python3 benchmarks/compare.py --from build/bench/report.json               write the report again, run nothing

Needs no package; the peers need a Python with torch: that of build/quickstart.env, or --python. In a round every run is
done once, in odd rounds in the opposite order; a ratio is taken within a round. Ranks are started without a launcher,
one thread each (OMP_NUM_THREADS=1, unless set). Exit status: 0; 1 when a result is wrong or a run failed (a missed
bar is no failure: the report says so); 2 when it cannot start.
"""
import argparse
import json
import os
import shlex
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = os.path.dirname(HERE)
sys.path.insert(0, HERE)

import scaling_model  # noqa: E402
from harness import launch, machine, report, scenarios  # noqa: E402


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="5; with --quick 2")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps, for a first look")
    parser.add_argument("--only", action="append", choices=scenarios.SECTIONS, help="this part; may be repeated")
    parser.add_argument("--backend", default="shm", choices=["auto", "shm", "gloo", "nccl"], help="ours")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--build", default=os.path.join(REPOSITORY, "build"), help="programs are in its folder bin")
    parser.add_argument("--out", help="folder of the report; BUILD/bench")
    parser.add_argument("--python", help="a Python with torch, for the peers")
    parser.add_argument("--deadline", type=float, default=180, help="seconds a run may take before it is killed")
    parser.add_argument("--last", metavar="FILE", help="an earlier report.json to compare with")
    parser.add_argument("--from", dest="source", metavar="FILE", help="a report.json: write its report again")
    options = parser.parse_args(arguments)
    try:  # now, not after a quarter of an hour
        options.last, options.source = (read_json(f) if f else None for f in (options.last, options.source))
    except (OSError, ValueError) as error:
        parser.error(f"--last and --from take a report.json: {error}")
    options.build = os.path.abspath(options.build)
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.out = os.path.abspath(options.out or os.path.join(options.build, "bench"))
    options.python = options.python or python_of(options.build)
    return options


def read_json(path):
    with open(path) as file:
        return dict(json.load(file), path=path)


def python_of(build):
    """LIBTORCH_PYTHON of quickstart.env, which CMake wrote; else the Python that runs this."""
    try:
        with open(os.path.join(build, "quickstart.env")) as file:
            for line in file:
                name, _, text = line.partition("=")
                if name == "LIBTORCH_PYTHON" and shlex.split(text):
                    return shlex.split(text)[0]
    except OSError:
        pass
    return sys.executable


def obstacle(plan, python):
    """Why it cannot start, or None. Asked once, so that a forgotten build is not a hundred failed runs."""
    programs = {run.command[0] for scenario in plan for run in scenario.runs.values()}
    for program in sorted(programs - {python}):
        if not os.access(program, os.X_OK):
            return f"{program} is not there; build it with: bash cmake/quickstart.sh build"
    packages = ["torch"] + ["transformers"] * any(scenario.section == "qwen" for scenario in plan)
    try:
        for package in packages if python in programs else []:
            found = f"import importlib.util as u, sys; sys.exit(u.find_spec('{package}') is None)"
            if subprocess.run([python, "-c", found], stderr=subprocess.DEVNULL).returncode:
                return f"{python} has no {package}, which the peers need; name one that has: --python"
    except OSError as error:
        return f"{python} does not start ({error.strerror}); name a Python with torch: --python"
    return None


def measure(options, plan, content):
    """Fills content["runs"]; report.json is written after each run, so that an interrupted one is not lost."""
    logs = os.path.join(options.out, "logs")
    os.makedirs(logs, exist_ok=True)
    total, done = options.rounds * sum(len(s.runs) for s in plan), 0
    for round_ in range(options.rounds):
        for scenario in plan:
            names = list(scenario.runs)
            for name in reversed(names) if round_ % 2 else names:
                run, done = scenario.runs[name], done + 1
                slug = "".join(c if c.isalnum() else "-" for c in f"{scenario.name}-{name}-{round_ + 1}")
                prefix = os.path.join(logs, slug)
                result = launch.run(run.command, run.ranks, prefix + ".json", prefix, options.deadline,
                                    run.json_option)
                content["runs"].append(dict(scenario=scenario.name, run=name, round=round_, command=run.command,
                                            ranks=run.ranks, **vars(result)))
                state = "FAILED: " + result.error.splitlines()[0] if result.error else summary(result.data)
                print(f"[{done}/{total}] {scenario.name}, {name}: {state} ({result.seconds:.1f} s)", file=sys.stderr)
                save(options.out, content)


def summary(data):
    if "step_ms" in data:
        return f"step {data['step_ms']:.3f} ms"
    if "tokens_per_s" in data:
        return f"{data['tokens_per_s']:.0f} tokens/s, {data['peak_rss_mb']:.0f} MiB"
    return ", ".join(f"{row['bytes']}: {row['ms']:.4f} ms" for row in data["rows"])


def save(folder, content):
    path = os.path.join(folder, "report.json")
    with open(path + ".new", "w") as out:
        json.dump(content, out, indent=1)
    os.replace(path + ".new", path)


def write_report(options, plan, rows, content):
    """Returns the exit status."""
    measured = report.Measured(content["runs"])
    losses_off = [s.name for s in plan if (report.loss_difference(s, measured) or 0) > 1e-4]
    lines = ["# Benchmark report", ""]
    lines += [f"- {name}: {text}" for name, text in content["machine"].items()]
    begun = 1 + max((run["round"] for run in content["runs"]), default=-1)
    rounds = f"{begun}" if begun == content["rounds"] else f"{begun} of {content['rounds']}: stopped early"
    lines += [f"- command: `{content['command']}`", f"- rounds: {rounds}", "",
              "Each number is of the slowest (or fullest) rank; a ratio is taken within a round.", ""]
    lines += report.main_table(rows, measured)
    lines += report.failure_lines(measured, losses_off)
    lines += report.write_plots(options.out, plan, rows, measured)
    headings = {"step": "Where a step goes", "all_reduce": "All-reduce, float32", "startup": "Start and memory",
                "scaling": "Scaling model against measurement", "qwen": "Pretraining of Qwen2"}
    writers = {"step": report.step_table, "all_reduce": report.all_reduce_table, "startup": report.startup_table,
               "scaling": scaling_table, "qwen": report.qwen_table}
    section = None
    for scenario in plan:
        if scenario.section != section:
            section = scenario.section
            lines += [f"## {headings[section]}", ""]
        lines += writers[section](scenario, measured)
    if options.last:
        lines += report.last_table(rows, measured, options.last)
    path = os.path.join(options.out, "report.md")
    with open(path, "w") as out:
        out.write("\n".join(lines).rstrip() + "\n")
    failed, wrong = len(measured.failures()), len(measured.wrong())
    print(f"{path}, {failed} failed runs, {wrong} with wrong elements", file=sys.stderr)
    return 1 if failed or wrong or losses_off else 0


def scaling_table(scenario, measured):
    results = [r["data"] for r in measured.runs if r["scenario"] == scenario.name and r["data"] and not r["error"]]
    rows = [[f"{r['model']} {r['dim']}", r["backend"], r["ranks"], report.number(r["predicted_ms"]),
             report.number(r["measured_ms"]), f"{r['error']:+.0%}",
             "beside backward" if r["overlap"] else "by the ranks themselves"]
            for r in scaling_model.check(results)]
    header = ["model", "backend", "ranks", "predicted ms", "measured ms", "error", "communication is done"]
    return report.table(header, rows) if rows else ["**failed**: no measurement is complete", ""]


def stop(*_):
    raise KeyboardInterrupt


def main(arguments=None):
    options = parse(arguments)
    signal.signal(signal.SIGTERM, stop)  # ranks are in sessions of their own and have to be ended from here
    if options.source:
        content = options.source
        for name in ("backend", "ranks", "only", "quick"):
            setattr(options, name, content["options"][name])
        options.out = os.path.dirname(os.path.abspath(content["path"]))
        return write_report(options, *scenarios.plan(options), content)

    plan, rows = scenarios.plan(options)
    reason = obstacle(plan, options.python)
    if reason:
        print(f"compare.py: {reason}", file=sys.stderr)
        return 2
    os.makedirs(options.out, exist_ok=True)
    command = ["python3", "benchmarks/compare.py"] + (sys.argv[1:] if arguments is None else arguments)
    content = dict(machine=machine.describe(REPOSITORY, options.python), rounds=options.rounds,
                   command=" ".join(map(shlex.quote, command)),
                   options={n: getattr(options, n) for n in ("backend", "ranks", "only", "quick")}, runs=[])
    try:
        measure(options, plan, content)
    except KeyboardInterrupt:
        print("compare.py: stopped; the report holds what was measured so far", file=sys.stderr)
        write_report(options, plan, rows, content)
        return 1
    content["machine"]["load after"] = "%.2f %.2f %.2f" % os.getloadavg()
    save(options.out, content)
    return write_report(options, plan, rows, content)


if __name__ == "__main__":
    sys.exit(main())
