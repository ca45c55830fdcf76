#!/usr/bin/env python3
"""Predicts the time of a data-parallel step at 2 to 4096 ranks, and which bucket size is best.

  scaling_model.py --step none.json --all-reduce host.json      from bench_step --reducer none and bench_all_reduce
  scaling_model.py --parameter-mib 400 --tensors 100 --forward-ms 30 --backward-ms 60 --update-ms 5
  scaling_model.py --check build/bench/report.json              prediction against measurement, 1, 2, 4, 8 ranks
  scaling_model.py --self-test

Formulas (n ranks, S bytes, a seconds for one message, B bytes/s of a link, h hosts of L ranks):
  ring          2 (n-1) a + 2 (n-1)/n S/B. With L ranks on a host the ring crosses each host's link once in each
                direction, so B is that of the link. Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009); the
                a + S/B cost of a message: Thakur, Rabenseifner, Gropp, Int. J. High Perform. Comput. Appl. 19 (2005).
  hierarchical  all-reduce inside each host (measured), and a ring of one leader per host: 2 (h-1) a + 2 (h-1)/h S/B;
                one after the other, not in slices: an upper bound. Goyal et al., arXiv:1706.02677, section 4.
  buckets       gradients in the reverse order of registration; a bucket is closed when it has reached the cap, the
                first one a smaller cap, as c10d's rebuild_buckets does. Li et al., PVLDB 13 (2020).
  overlap       parameter i is ready at backward * (bytes up to i) / (all bytes): the work of a linear layer is in
                proportion to its weights. Buckets travel one after another, each when it is ready and the one before it
                is done. Step = forward + max(backward, end of the last bucket) + update.
  no overlap    where the rank itself does the communication (the shm backend has no thread of its own):
                step = forward + backward + sum of the buckets + update.
Weak scaling: each rank has the same batch; efficiency = step at 1 rank / step at n ranks.
"""
import argparse
import doctest
import json
import sys
from statistics import median

MIB = 1 << 20
CAPS_MIB = (1, 2, 4, 8, 16, 25, 50, 100, 400)
LINKS_GBITS = (10, 25, 100, 400)
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def ring_s(n, size, latency_s, bandwidth):
    """
    >>> ring_s(1, 1e9, 1, 1e9)
    0.0
    >>> ring_s(2, 1e9, 0, 1e9), ring_s(4, 1e9, 0, 1e9)
    (1.0, 1.5)
    >>> ring_s(4, 0, 0.5, 1e9)
    3.0
    """
    return 2 * (n - 1) * latency_s + 2 * (n - 1) / n * size / bandwidth


def interpolate(table, size):
    """Of [(bytes, seconds), ...]: straight between two; beyond the last at its bandwidth, below the first its time.

    >>> interpolate([(100, 1.0), (200, 3.0)], 150), interpolate([(100, 1.0), (200, 3.0)], 400)
    (2.0, 6.0)
    >>> interpolate([(100, 1.0), (200, 3.0)], 1), interpolate([(100, 1.0), (200, 3.0)], 200)
    (1.0, 3.0)
    """
    table = sorted(table)
    if size <= table[0][0]:
        return table[0][1]
    for (x0, y0), (x1, y1) in zip(table, table[1:]):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return table[-1][1] * size / table[-1][0]


class Cluster:
    """Hosts of `per_host` ranks; `host_table`: the all-reduce measured inside one, [(bytes, seconds), ...]."""

    def __init__(self, per_host, latency_s, bandwidth, host_table):
        self.per_host, self.latency_s, self.bandwidth, self.host_table = per_host, latency_s, bandwidth, host_table

    def all_reduce_s(self, n, size, algorithm):
        """
        >>> c = Cluster(2, 0.0, 1e9, [(1, 0.0), (10**9, 0.25)])
        >>> c.all_reduce_s(1, 10**9, "ring"), c.all_reduce_s(2, 10**9, "ring")     # alone; inside one host
        (0.0, 0.25)
        >>> c.all_reduce_s(4, 10**9, "ring"), c.all_reduce_s(4, 10**9, "hierarchical")
        (1.5, 1.25)
        """
        if n == 1:
            return 0.0
        inside = interpolate(self.host_table, size) if self.per_host > 1 else 0.0
        if n <= self.per_host:
            return inside
        if algorithm == "ring":
            return ring_s(n, size, self.latency_s, self.bandwidth)
        return inside + ring_s(-(-n // self.per_host), size, self.latency_s, self.bandwidth)


def bucket_plan(parameter_bytes, cap, first_cap=MIB):
    """Bytes of each bucket, in the order of backward. Parameters come in the order of registration.

    >>> bucket_plan([10, 20, 30, 40], cap=50, first_cap=1)
    [40, 50, 10]
    >>> bucket_plan([10, 20, 30, 40], cap=1000, first_cap=1000)
    [100]
    """
    plan, size, limit = [], 0, min(first_cap, cap)
    for bytes_ in reversed(parameter_bytes):
        size += bytes_
        if size >= limit:
            plan.append(size)
            size, limit = 0, cap
    return plan + [size] if size else plan


def communication_end_s(plan, backward_s, all_reduce):
    """When the last bucket has arrived, counted from the start of backward. `all_reduce`: seconds of a size.

    >>> communication_end_s([100], 1.0, lambda size: 0.5)           # one bucket: nothing is hidden
    1.5
    >>> communication_end_s([50, 50], 1.0, lambda size: 0.25)       # the first is hidden
    1.25
    >>> communication_end_s([50, 50], 1.0, lambda size: 2.0)        # the wire is the bottleneck: 0.5 + 2 * 2
    4.5
    """
    end, ready = 0.0, 0
    for size in plan:
        ready += size
        end = max(end, backward_s * ready / sum(plan)) + all_reduce(size)
    return end


class Model:
    """One rank's work, in seconds, and its parameters."""

    def __init__(self, forward_s, backward_s, update_s, parameter_bytes):
        self.forward_s, self.backward_s, self.update_s = forward_s, backward_s, update_s
        self.parameter_bytes = parameter_bytes

    def alone_s(self):
        return self.forward_s + self.backward_s + self.update_s

    def step_s(self, cap, all_reduce, overlap=True):
        """
        >>> m = Model(1.0, 2.0, 0.5, [100])
        >>> m.step_s(100, lambda size: 0.25), m.step_s(100, lambda size: 0.0)
        (3.75, 3.5)
        >>> Model(0.0, 1.0, 0.0, [2 * MIB, 2 * MIB]).step_s(MIB, lambda size: 0.25, overlap=False)
        1.5
        """
        plan = bucket_plan(self.parameter_bytes, cap)
        if not overlap:
            return self.alone_s() + sum(all_reduce(size) for size in plan)
        end = communication_end_s(plan, self.backward_s, all_reduce)
        return self.forward_s + max(self.backward_s, end) + self.update_s

    def best_cap_mib(self, all_reduce, overlap=True):
        """The smallest of the best; in steps of CAPS_MIB.

        >>> equal = Model(0.0, 1.0, 0.0, [4 * MIB] * 100)
        >>> equal.best_cap_mib(lambda size: 0.0), equal.best_cap_mib(lambda size: 1.0)      # free; latency alone
        (1, 400)
        """
        return min(CAPS_MIB, key=lambda cap: (self.step_s(cap * MIB, all_reduce, overlap), cap))


def records(paths):
    """The results in files of bench_step, bench_all_reduce or compare.py (which holds many)."""
    found = []
    for path in paths:
        with open(path) as file:
            content = json.load(file)
        found += [run["data"] for run in content["runs"] if run["data"]] if "runs" in content else [content]
    return found


def table_of(results):
    """[(bytes, seconds)], the median over several results of bench_all_reduce."""
    by_size = {}
    for row in (row for result in results for row in result["rows"]):
        by_size.setdefault(row["bytes"], []).append(row["ms"] / 1e3)
    return [(size, median(values)) for size, values in sorted(by_size.items())]


def model_of(results):
    times = [median(result[phase + "_ms"] for result in results) / 1e3 for phase in ("forward", "backward", "update")]
    return Model(*times, results[0]["parameter_bytes"])


def check(results):
    """Prediction against measurement, a dictionary per model and number of ranks that was measured with and without
    communication and whose all-reduce was measured at that number, too. Compute is taken from the run without
    communication at the same number of ranks, because ranks that share cores slow each other down."""
    steps, tables, rows = {}, {}, []
    for r in results:
        if r.get("program") == "bench_step":
            key = (r["model"], r["dim"], r["batch"], r["ranks"])
            steps.setdefault(key, {}).setdefault(r["reducer"], []).append(r)
        elif r.get("program") == "bench_all_reduce" and r["op"] == "all_reduce":
            tables.setdefault((r["backend"], r["ranks"]), []).append(r)
    for (model, dim, batch, n), by_reducer in sorted(steps.items()):
        if "none" not in by_reducer or "overlap" not in by_reducer:
            continue
        for backend in sorted({r["backend"] for r in by_reducer["overlap"]}):
            measured = [r for r in by_reducer["overlap"] if r["backend"] == backend]
            table = [(0, 0.0), (1, 0.0)] if n == 1 else table_of(tables.get((backend, n), []))
            if len(table) < 2:
                continue
            work, cap = model_of(by_reducer["none"]), measured[0]["bucket_cap_mb"] * MIB
            overlap = backend != "shm"
            predicted = work.step_s(cap, lambda size: interpolate(table, size), overlap) * 1e3
            found = median(r["step_ms"] for r in measured)
            rows.append(dict(model=model, dim=dim, ranks=n, backend=backend, overlap=overlap, predicted_ms=predicted,
                             measured_ms=found, error=predicted / found - 1))
    return rows


def print_check(rows):
    print(f"{'model':<16}{'backend':>8}{'ranks':>6}{'predicted ms':>14}{'measured ms':>13}{'error':>8}  communication")
    for r in rows:
        how = "beside backward" if r["overlap"] else "by the ranks themselves"
        print(f"{r['model'] + ' ' + str(r['dim']):<16}{r['backend']:>8}{r['ranks']:>6}{r['predicted_ms']:>14.2f}"
              f"{r['measured_ms']:>13.2f}{r['error']:>+8.0%}  {how}")


def predict(model, options, host_table):
    """One dictionary per link, algorithm and number of ranks."""
    rows = []
    for gbits in options.links:
        bandwidth = gbits / 8 * 1e9 * options.link_efficiency
        cluster = Cluster(options.per_host, options.latency_us / 1e6, bandwidth, host_table)
        for algorithm in ("ring", "hierarchical"):
            for n in RANKS:
                def all_reduce(size):
                    return cluster.all_reduce_s(n, size, algorithm)

                best = model.best_cap_mib(all_reduce)
                at_default = model.step_s(25 * MIB, all_reduce)
                at_best = model.step_s(best * MIB, all_reduce)
                rows.append(dict(gbits=gbits, algorithm=algorithm, ranks=n, step_ms=at_default * 1e3,
                                 efficiency=model.alone_s() / at_default, best_bucket_mib=best,
                                 best_step_ms=at_best * 1e3, best_efficiency=model.alone_s() / at_best))
    return rows


def print_prediction(model, rows):
    print(f"one rank: {model.alone_s() * 1e3:.2f} ms a step (forward {model.forward_s * 1e3:.2f}, backward "
          f"{model.backward_s * 1e3:.2f}, update {model.update_s * 1e3:.2f}), "
          f"{sum(model.parameter_bytes) / MIB:.1f} MiB of gradients in {len(model.parameter_bytes)} tensors")
    header = None
    for r in rows:
        if header != (r["gbits"], r["algorithm"]):
            header = (r["gbits"], r["algorithm"])
            print(f"\n{r['gbits']} Gb/s, {r['algorithm']}\n{'ranks':>6}{'step ms (25 MiB)':>18}{'efficiency':>12}"
                  f"{'best bucket MiB':>17}{'step ms':>10}{'efficiency':>12}")
        print(f"{r['ranks']:>6}{r['step_ms']:>18.2f}{r['efficiency']:>12.1%}{r['best_bucket_mib']:>17}"
              f"{r['best_step_ms']:>10.2f}{r['best_efficiency']:>12.1%}")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", metavar="FILE", help="bench_step --reducer none: times and parameters")
    parser.add_argument("--all-reduce", metavar="FILE", help="bench_all_reduce with --per-host ranks on one host")
    for name, default in (("parameter-mib", 400), ("forward-ms", 30), ("backward-ms", 60), ("update-ms", 5)):
        parser.add_argument("--" + name, type=float, default=default)
    parser.add_argument("--tensors", type=int, default=100, help="of equal size")
    parser.add_argument("--per-host", type=int, default=8, help="ranks on a host; with --all-reduce: its ranks")
    parser.add_argument("--host-gbs", type=float, default=10, help="GB/s of an all-reduce inside a host, and ...")
    parser.add_argument("--host-latency-us", type=float, default=10, help="... its time for a few bytes")
    parser.add_argument("--links", type=float, nargs="+", default=LINKS_GBITS, metavar="GBITS")
    parser.add_argument("--latency-us", type=float, default=20, help="of one message between two hosts")
    parser.add_argument("--link-efficiency", type=float, default=0.9, help="what headers and pauses leave of a link")
    parser.add_argument("--check", metavar="FILE", nargs="+", help="prediction against the measurements in these files")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if options.self_test:
        failed, tried = doctest.testmod(sys.modules[__name__])
        print(f"{tried - failed} of {tried} examples hold")
        return int(failed > 0 or tried == 0)
    if options.check:
        rows = check(records(options.check))
        print_check(rows)
        if not rows:
            print("scaling_model: nothing to check in " + ", ".join(options.check) + ": for a number of ranks it takes "
                  "bench_step with --reducer none and overlap, and, from 2 on, bench_all_reduce", file=sys.stderr)
            return 2
    else:
        host_table = [(mib * MIB, options.host_latency_us / 1e6 + mib * MIB / options.host_gbs / 1e9)
                      for mib in (0, 1, 1000)]
        if options.all_reduce:
            measured = records([options.all_reduce])
            host_table, options.per_host = table_of(measured), measured[0]["ranks"]
        model = model_of(records([options.step])) if options.step else Model(
            options.forward_ms / 1e3, options.backward_ms / 1e3, options.update_ms / 1e3,
            [options.parameter_mib * MIB / options.tensors] * options.tensors)
        rows = predict(model, options, host_table)
        print_prediction(model, rows)
    if options.json:
        with open(options.json, "w") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    sys.exit(main())
