"""What compare.py runs, and what is to be reached: scenarios of runs that belong together, and rows that judge them.

In a scenario every run is done once per round, so that ours and theirs see the same machine; in odd rounds in the
opposite order.
"""
import os

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "25 MiB": 25 << 20,
         "64 MiB": 64 << 20}
SECTIONS = ("step", "all_reduce", "startup", "scaling", "qwen")
ASKED_FOR = ("qwen",)  # runs only when --only names it: its peer needs the package transformers


class Run:
    """`averages`: its losses are those of every other averaging run of the scenario. `json_option`: what makes it write
    its result."""

    def __init__(self, command, ranks, averages=False, json_option="--json"):
        self.command, self.ranks, self.averages, self.json_option = command, ranks, averages, json_option


class Scenario:
    def __init__(self, name, section, title, runs):
        self.name, self.section, self.title, self.runs = name, section, title, runs


class Row:
    """One line of the table of issue 4. `kind`: "at most" (ours / theirs), "times faster" (theirs / ours) or "share"
    (ours alone). `metric`: a key of the result, or key@bytes for one size. `bar` and `aim` may be None."""

    def __init__(self, what, against, scenario, ours, theirs, metric, kind, bar, aim):
        self.what, self.against, self.scenario, self.ours, self.theirs = what, against, scenario, ours, theirs
        self.metric, self.kind, self.bar, self.aim = metric, kind, bar, aim


def plan(options):
    """The scenarios and rows for compare.py's options. Bars hold for 2 ranks on the CPU; elsewhere there are none."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    fast = options.quick
    peer_backend = "nccl" if options.backend == "nccl" else "gloo"

    def ours(program, *arguments, backend=options.backend, ranks=options.ranks, averages=False):
        command = [os.path.join(options.build, "bin", program), "--backend", backend]
        return Run(command + [str(a) for a in arguments], ranks, averages)

    def theirs(program, *arguments, ranks=options.ranks, averages=False):
        command = [options.python, os.path.join(here, "peers", program), "--backend", peer_backend]
        return Run(command + [str(a) for a in arguments], ranks, averages)

    def steps(full, quick):
        return ("--steps", quick if fast else full, "--warmup", 5 if fast else 20)

    def step_runs(model, count, defaults=False):
        runs = {
            "overlap": ours("bench_step", *model, *count, averages=True),
            "naive": ours("bench_step", *model, *count, "--reducer", "naive", averages=True),
            "none": ours("bench_step", *model, *count, "--reducer", "none"),
        }
        if peer_backend == "gloo":
            plain = ours("bench_step", *model, *count, "--allocator", "default", averages=True)
            runs["overlap, default allocator"] = plain
        if options.backend in ("auto", "shm"):
            runs["overlap, shared state"] = ours("bench_step", *model, *count, "--update", "sharded", averages=True)
        if peer_backend == "gloo" and options.backend != "gloo":
            runs["overlap, gloo"] = ours("bench_step", *model, *count, backend="gloo", averages=True)
        if defaults:
            runs["Python DDP, defaults"] = theirs("step.py", *model, *count, averages=True)
        fused = theirs("step.py", *model, *count, "--fused", "--bucket-view", averages=True)
        runs["Python DDP, fused + bucket view"] = fused
        runs["Python, no DDP, fused"] = theirs("step.py", *model, *count, "--fused", "--no-ddp")
        return runs

    def all_reduce_runs(sizes, count, ranks):
        sizes = ("--sizes", ",".join(str(SIZES[s]) for s in sizes), "--iterations", count)
        runs = {options.backend: ours("bench_all_reduce", *sizes, ranks=ranks)}
        if peer_backend == "gloo" and options.backend != "gloo":
            runs["gloo"] = ours("bench_all_reduce", *sizes, backend="gloo", ranks=ranks)
        runs["torch.distributed"] = theirs("all_reduce.py", *sizes, ranks=ranks)
        return runs

    mini = ("--model", "linear", "--dim", 1024, "--batch", 32)
    wide = ("--model", "linear", "--dim", 4096, "--batch", 32)
    stack = ("--model", "stack", "--dim", 512, "--layers", 24, "--batch", 32)
    short = ("--steps", 20, "--warmup", 0)
    count = 15 if fast else 50
    many = [] if peer_backend == "nccl" else [4, 8]
    scenarios = [
        Scenario("mini", "step", "mini-train, Linear(1024), batch 32", step_runs(mini, steps(300, 60), defaults=True)),
        Scenario("wide", "step", "Linear(4096), batch 32", step_runs(wide, steps(60, 15))),
        Scenario("stack", "step", "24 x (Linear(512), ReLU), batch 32", step_runs(stack, steps(150, 30))),
        Scenario("all_reduce", "all_reduce", f"{options.ranks} ranks", all_reduce_runs(SIZES, count, options.ranks)),
    ]
    for n in many:
        scenarios.append(Scenario(f"all_reduce_{n}", "all_reduce", f"{n} ranks", all_reduce_runs(["4 MiB"], count, n)))
    scenarios.append(Scenario("startup", "startup", "mini-train, 20 steps", {
        "ours": ours("bench_step", *mini, *short, averages=True),
        "Python DDP": theirs("step.py", *mini, *short, averages=True)}))
    scaling = {}
    for n in [n for n in (1, 2, 4, 8) if many or n <= options.ranks]:
        count = steps(60, 15)
        scaling[f"none, {n}"] = ours("bench_step", *stack, *count, "--reducer", "none", ranks=n)
        scaling[f"overlap, {n}"] = ours("bench_step", *stack, *count, ranks=n)
        if n > 1:
            sizes = "64K,256K,1M,4M,25M,64M"
            scaling[f"all_reduce, {n}"] = ours("bench_all_reduce", "--sizes", sizes, "--iterations", 15, ranks=n)
    scenarios.append(Scenario("scaling", "scaling", "prediction against measurement", scaling))
    qwen_scenarios, qwen_rows = qwen_plan(options, here, peer_backend)
    scenarios += qwen_scenarios
    scenarios = [s for s in scenarios if s.section in (options.only or [n for n in SECTIONS if n not in ASKED_FOR])]

    mine, peer, gloo = options.backend, "torch.distributed", "torch.distributed, " + peer_backend
    defaults, fused = "Python DDP, defaults", "Python DDP, fused + bucket view"
    rows = []

    def step_row(what, scenario, against, theirs_, bar, aim, shared=False):
        rows.append(Row(what, against, scenario, "overlap", theirs_, "step_ms", "at most", bar, aim))
        if shared and options.backend in ("auto", "shm"):  # weights and optimizer state once per host: shard_over
            rows.append(Row(what + ", shared state", against, scenario, "overlap, shared state", theirs_, "step_ms",
                            "at most", bar, aim))

    def all_reduce_row(size, bar, aim, scenario="all_reduce", suffix=""):
        metric = f"ms@{SIZES[size]}"
        rows.append(Row(f"all-reduce, {size}{suffix}", gloo, scenario, mine, peer, metric, "times faster", bar, aim))

    step_row("mini-train step", "mini", defaults, defaults, 0.40, 0.30)
    step_row("mini-train step", "mini", fused, fused, 0.50, 0.40, shared=True)
    step_row("mini-train step", "mini", "the same without communication", "none", 1.3, 1.05)
    step_row("step of Linear(4096), batch 32", "wide", fused, fused, 0.5, 0.35, shared=True)
    step_row("step of 24 x Linear(512) + ReLU, batch 32", "stack", fused, fused, 0.7, 0.5, shared=True)
    all_reduce_row("4 KiB", 50, 200)
    all_reduce_row("64 KiB", 20, 50)
    for size in ("1 MiB", "4 MiB"):
        all_reduce_row(size, 10, 20)
    for size in ("25 MiB", "64 MiB"):
        all_reduce_row(size, 4, 6)
        rows.append(Row(f"all-reduce, {size}", "a measured memcpy", "all_reduce", mine, None,
                        f"of_memcpy@{SIZES[size]}", "share", 0.6, 0.8))
    for n in many:
        all_reduce_row("4 MiB", 2, 4, f"all_reduce_{n}", f", {n} ranks")
    for what, metric, bar, aim in (("start to first step, mini-train", "first_step_s", 0.05, 0.02),
                                   ("peak RSS, mini-train", "peak_rss_mib", 0.35, 0.25)):
        rows.append(Row(what, "Python DDP", "startup", "ours", "Python DDP", metric, "at most", bar, aim))
    rows += qwen_rows
    if options.ranks != 2 or options.backend not in ("auto", "shm"):
        for row in rows:
            row.bar = row.aim = None
    names = {s.name for s in scenarios}
    return scenarios, [row for row in rows if row.scenario in names]


def qwen_plan(options, here, peer_backend):
    """Pretraining of Qwen2, `qwen_pretrain` against transformers under DDP. Weights are drawn differently in Python, so
    only ours have losses in common; tests/golden compares the models."""
    repository, steps = os.path.dirname(here), 10 if options.quick else 30
    text = [os.path.join(repository, folder) for folder in ("libddp", "docs", "examples", "tests", "benchmarks")]
    library = os.path.join(options.build, "lib", "libqwen_mkl_override.so")
    same_path = ["/usr/bin/env", "LD_PRELOAD=" + library]
    scenarios, rows = [], []
    for preset in ("tiny", "small"):
        for dtype in ("float32", "bfloat16"):
            shared = ["--preset", preset, "--dtype", dtype, "--max-steps", str(steps), "--lr", "0.001"]
            data = ["--data"] + text
            settings = ["--warmup", "0", "--schedule", "constant", "--sample", "0", "--resume", "never", "--log-every",
                        "1000000", "--checkpoint-every", "1000000", "--checkpoint-dir",
                        os.path.join(options.out, "qwen")]

            def ours(kernels):
                program = [os.path.join(options.build, "bin", "qwen_pretrain"), "--backend", options.backend]
                return Run(program + shared + settings + ["--kernels", kernels] + data, options.ranks,
                           averages=dtype == "float32", json_option="--summary")

            peer = [options.python, os.path.join(here, "peers", "qwen_pretrain.py"), "--backend", peer_backend]
            name = f"qwen_{preset}_{dtype}"
            runs = {"fused": ours("auto"), "plain": ours("plain"),
                    "transformers": Run(peer + shared + data, options.ranks)}
            if os.path.exists(library):
                for run in ("fused", "transformers"):
                    runs[run + ", MKL override"] = Run(same_path + runs[run].command, options.ranks,
                                                       json_option=runs[run].json_option)
            scenarios.append(Scenario(name, "qwen", f"Qwen2 {preset}, {dtype}", runs))

            def row(what, metric, kind, bar, aim, suffix="", against="transformers + DDP"):
                rows.append(Row(f"Qwen2 {preset}, {dtype}: {what}", against, name, "fused" + suffix,
                                "transformers" + suffix, metric, kind, bar, aim))

            bar, aim = (1.35, 1.6) if dtype == "float32" else (1.45, 2.0)
            row("step", "step_s", "times faster", bar, aim)
            row("peak RSS", "peak_rss_mb", "at most", 0.4, 0.3)
            row("start to first step", "first_step_s", "at most", 0.25, 0.1)
            if os.path.exists(library):
                bar, aim = (1.25, 1.5) if dtype == "float32" else (None, None)
                row("step", "step_s", "times faster", bar, aim, ", MKL override", "the same, MKL's path for both")
    return scenarios, rows
