"""Turns what compare.py measured into Markdown. A measurement is a list of runs, as in report.json:

{"scenario", "run", "round", "command", "ranks", "seconds", "error", "data"}; `data` is a program's own JSON.
"""
import os
from statistics import median

from harness import plots


def value(data, metric):
    """`metric` of one result: "step_ms", or "ms@4096" of the row of 4096 bytes. None where there is none."""
    if not data:
        return None
    key, _, size = metric.partition("@")
    if not size:
        return data.get(key)
    return next((row.get(key) for row in data["rows"] if row["bytes"] == int(size)), None)


class Measured:
    def __init__(self, runs):
        self.runs = runs

    def of(self, scenario, run):
        return [r for r in self.runs if r["scenario"] == scenario and r["run"] == run]

    def sizes(self, scenario, run=None):
        """Of all-reduce results, in ascending order."""
        found = [r["data"] for r in self.runs if r["scenario"] == scenario and run in (None, r["run"])]
        return sorted({row["bytes"] for data in found if data for row in data["rows"]})

    def values(self, scenario, run, metric):
        """By round. A run that failed has none, even where it left a result with wrong elements."""
        found = {r["round"]: value(r["data"], metric) for r in self.of(scenario, run) if not r["error"]}
        return {k: v for k, v in found.items() if v is not None}

    def median(self, scenario, run, metric):
        values = self.values(scenario, run, metric)
        return median(values.values()) if values else None

    def failures(self):
        return [r for r in self.runs if r["error"]]

    def wrong(self):
        return [r for r in self.runs if r["data"] and any(row.get("wrong") for row in r["data"].get("rows", []))]


def number(x):
    if x is None:
        return "failed"
    return f"{x:.4f}" if abs(x) < 0.1 else f"{x:.3f}" if abs(x) < 10 else f"{x:.1f}"


def with_unit(x, metric):
    key = metric.partition("@")[0]
    unit = "ms" if key.endswith("ms") else "MiB" if key.endswith("_mib") else "s" if key.endswith("_s") else ""
    return number(x) if x is None else f"{number(x)} {unit}".strip()


def spread(values):
    return f" ({number(min(values))}..{number(max(values))})" if len(values) > 1 else ""


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows] + [""]


def judge(row, measured):
    """(ratio per round, failed rounds, reached as text) of one row of the plan."""
    ours = measured.values(row.scenario, row.ours, row.metric)
    if row.theirs is None:
        ratios, rounds = list(ours.values()), measured.of(row.scenario, row.ours)
    else:
        theirs = measured.values(row.scenario, row.theirs, row.metric)
        both = sorted(ours.keys() & theirs.keys())
        ratios = [ours[k] / theirs[k] if row.kind == "at most" else theirs[k] / ours[k] for k in both]
        rounds = max(measured.of(row.scenario, row.ours), measured.of(row.scenario, row.theirs), key=len)
    failed = len(rounds) - len(ratios)
    if not ratios:
        return ratios, failed, "**failed**"
    if row.bar is None:
        return ratios, failed, "-"
    found = median(ratios)
    reaches = (lambda bar: found <= bar) if row.kind == "at most" else (lambda bar: found >= bar)
    reached = "aim" if reaches(row.aim) else "bar" if reaches(row.bar) else "**no**"
    return ratios, failed, reached + (f", **{failed} of {len(rounds)} rounds failed**" if failed else "")


def main_table(rows, measured):
    lines, unit = [], {"at most": "", "times faster": " x faster", "share": " of it"}
    for row in rows:
        ratios, _, reached = judge(row, measured)
        limit = {"at most": "at most {:g}", "times faster": "{:g} x", "share": "{:g}"}[row.kind]
        ours, theirs = (with_unit(measured.median(row.scenario, run, row.metric), row.metric) if run else ""
                        for run in (row.ours, row.theirs))
        ratio = number(median(ratios)) + unit[row.kind] + spread(ratios) if ratios else "-"
        bar, aim = (limit.format(x) if x else "-" for x in (row.bar, row.aim))
        lines.append([row.what, row.against, ours, theirs, ratio, bar, aim, reached])
    return table(["what", "against", "ours", "theirs", "ratio: median (min..max)", "bar", "aim", "reached"], lines)


def step_table(scenario, measured):
    """Where the step goes: the profile behind the ratios, and whether all averaging runs trained alike."""
    name, rows = scenario.name, []
    for run in scenario.runs:
        steps = list(measured.values(name, run, "step_ms").values())
        cells = [number(median(steps)) + spread(steps) if steps else "**failed**"]
        for metric in ("step_p10_ms", "step_p90_ms", "forward_ms", "backward_ms", "update_ms"):
            cells.append(number(measured.median(name, run, metric)))
        rows.append([run] + cells)
    lines = [f"### {scenario.title}", ""]
    lines += table(["run", "step ms: median (min..max of rounds)", "p10", "p90", "forward", "backward", "update"], rows)
    none = measured.median(name, "none", "step_ms")
    for run in ("overlap", "naive", "overlap, gloo"):
        step = measured.median(name, run, "step_ms")
        if none and step:
            lines.append(f"- communication left exposed, {run}: {number(step - none)} ms ({(step - none) / none:+.1%})")
    return lines + loss_lines(scenario, measured) + [""]


def loss_difference(scenario, measured):
    """The largest relative difference of first losses between runs that average gradients; None for fewer than 2."""
    losses = [r["data"]["losses"] for r in measured.runs
              if r["scenario"] == scenario.name and r["data"] and r["run"] in scenario.runs
              and scenario.runs[r["run"]].averages and r["data"].get("losses")]
    if len(losses) < 2:
        return None
    return max(abs(a - b) / max(abs(b), 1e-30) for one in losses for a, b in zip(one, losses[-1]))


def loss_lines(scenario, measured):
    difference = loss_difference(scenario, measured)
    if difference is None:
        return []
    return [f"- first losses of all runs that average, ours and Python's: largest relative difference {difference:.1e}"]


def all_reduce_table(scenario, measured):
    name, runs, rows = scenario.name, list(scenario.runs), []
    mine = runs[0]
    for size in measured.sizes(name):
        def at(run, key):
            return measured.median(name, run, f"{key}@{size}")

        ours, theirs = at(mine, "ms"), at(runs[-1], "ms")
        cells = [f"{number(at(run, 'ms'))} / {number(at(run, 'p99_ms'))}" for run in runs]
        wrong = sum(value(r["data"], f"wrong@{size}") or 0 for r in measured.runs if r["scenario"] == name)
        ratio = f"{theirs / ours:.1f} x" if ours and theirs else "-"
        bandwidths = [number(at(mine, key)) for key in ("algbw_gbs", "busbw_gbs", "memcpy_gbs", "of_memcpy")]
        rows.append([size] + cells + [ratio] + bandwidths + [f"{wrong:.0f}"])
    header = ["bytes"] + [f"{run}: ms, median / p99" for run in runs]
    lines = [f"### {scenario.title}", ""]
    for run in runs:
        if not any(r["data"] for r in measured.of(name, run)):
            lines += [f"**{run}: no result.**", ""]
    columns = [f"{mine} against torch.distributed", "algbw GB/s", "busbw GB/s", "memcpy GB/s", "algbw/memcpy", "#wrong"]
    return lines + table(header + columns, rows)


def startup_table(scenario, measured):
    rows = []
    for run in scenario.runs:
        first = list(measured.values(scenario.name, run, "first_step_s").values())
        rss = list(measured.values(scenario.name, run, "peak_rss_mib").values())
        cells = [number(median(v)) + spread(v) if v else "**failed**" for v in (first, rss)]
        rows.append([run] + cells)
    return table(["run", "start of process to end of first step, s", "peak RSS, MiB, fullest rank"], rows)


def qwen_table(scenario, measured):
    rows = []
    for run in scenario.runs:
        cells = [run]
        for metric in ("tokens_per_s", "step_s", "first_step_s", "peak_rss_mb"):
            found = list(measured.values(scenario.name, run, metric).values())
            cells.append(number(median(found)) + spread(found) if found else "**failed**")
        rows.append(cells)
    header = ["run", "tokens/s: median (min..max of rounds)", "step, s", "start to first step, s", "peak RSS, MiB"]
    return [f"### {scenario.title}", ""] + table(header, rows) + loss_lines(scenario, measured) + [""]


def last_table(rows, measured, last):
    """Ours now and in the last report, on the same machine one hopes; 10 % slower is pointed out."""
    old, lines = Measured(last["runs"]), []
    for row in {(r.scenario, r.ours, r.metric): r for r in rows}.values():
        was, now = (m.median(row.scenario, row.ours, row.metric) for m in (old, measured))
        if was and now:
            ratio = was / now if row.kind == "share" else now / was
            slower = ", **slower**" if ratio > 1.1 else ""
            lines.append([row.what, row.metric.partition("@")[0], number(was), number(now), number(ratio) + slower])
    about = last["machine"]
    title = f"## Against the last report ({about.get('date', '?')}, {about.get('commit', '?')})"
    return [title, ""] + table(["what", "number", "then", "now", "ratio, above 1 is worse"], lines)


def failure_lines(measured, losses_off):
    lines = []
    for r in measured.wrong():
        lines.append(f"- **wrong elements**: {r['scenario']}, {r['run']}, round {r['round'] + 1}")
    lines += [f"- **losses differ** by more than 1e-4 between runs that train alike: {name}" for name in losses_off]
    for r in measured.failures():
        first, _, rest = r["error"].partition("\n")
        lines += [f"- {r['scenario']}, {r['run']}, round {r['round'] + 1}: {first}"]
        lines += ["  ```"] + ["  " + line for line in rest.splitlines()[-6:]] + ["  ```"] if rest else []
    return ["## Failed", ""] + lines + [""] if lines else []


def write_plots(folder, scenarios, rows, measured):
    """Returns the lines that show them."""
    lines = []
    for scenario in scenarios:
        if scenario.name == "all_reduce":
            series = {}
            for run in scenario.runs:
                sizes = measured.sizes(scenario.name, run)
                points = [(size, measured.median(scenario.name, run, f"ms@{size}")) for size in sizes]
                series[run] = [p for p in points if p[1]]
            svg = plots.lines(f"All-reduce, float32, {scenario.title}", series, "bytes", "milliseconds, median")
            with open(os.path.join(folder, "all_reduce.svg"), "w") as out:
                out.write(svg)
            lines.append("![all-reduce](all_reduce.svg)")
    entries = []
    for row in (row for row in rows if row.metric == "step_ms"):
        ratios = judge(row, measured)[0]
        if ratios:
            entries.append((f"{row.what} / {row.against}", median(ratios), min(ratios), max(ratios), row.bar))
    if entries:
        svg = plots.bars("Time of a step, ours / theirs (line: spread of rounds; dashed: the bar)", entries)
        with open(os.path.join(folder, "step.svg"), "w") as out:
            out.write(svg)
        lines.append("![step](step.svg)")
    return lines + [""] if lines else []
