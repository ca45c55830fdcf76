"""The Python side of checkpoint_golden_test.cpp.

checkpoint_peer.py structures SEED COUNT DIR   random structures, saved as DIR/{i}.pt
checkpoint_peer.py compare COUNT DIR           DIR/{i}.pt against DIR/{i}.cpp.pt, which C++ read and wrote again
checkpoint_peer.py resave COUNT DIR            DIR/{i}.pt, which C++ wrote, loaded and saved as DIR/{i}.back.pt
checkpoint_peer.py train OPTIMIZER DIR         3 steps, DIR/python.pt as the seed script saves it; one more, DIR/next.pt
checkpoint_peer.py go_on OPTIMIZER FILE NEXT   loads C++'s checkpoint FILE, one step, compares with C++'s NEXT
checkpoint_peer.py golden                      writes checkpoint_python.pt, the file that is checked in
"""

import math
import os
import random
import sys
from collections import OrderedDict

import torch

# --- structures

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16,
          torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
          torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def tensor(rng, pool):
    if pool and rng.random() < 0.3:
        base = rng.choice(pool)  # a view, or the same again
    else:
        shape = rng.choice([(), (0,), (3,), (2, 3), (4, 1, 5), (2, 0, 3), (50,)])
        base = (torch.randn(shape) * 20).to(rng.choice(DTYPES))
        pool.append(base)
    kind = rng.randrange(9)
    if kind == 0 and base.dim() > 1:
        return base.transpose(0, 1)
    if kind == 1 and base.dim() > 0 and base.size(0) > 1:
        return base[1:]
    if kind == 2 and base.dim() == 1 and base.size(0) > 2:
        return base[::2]
    if kind == 3 and base.is_floating_point() and base.element_size() > 1:
        return torch.nn.Parameter(base) if rng.random() < 0.5 else base.clone().requires_grad_()
    if kind == 4 and base.dtype in (torch.complex64, torch.complex128):
        return base.conj()
    if kind == 5 and base.dim() > 0:
        return base[:1].expand(base.size(0), *base.shape[1:]) if base.size(0) else base
    if kind == 6 and base.dtype in (torch.complex64, torch.complex128):
        return base.clone().conj().imag  # a view that is to be negated
    if kind == 7 and base.dim() == 1 and base.size(0) > 2:
        return base.as_strided((2, 2), (1, 1), base.storage_offset())  # elements that overlap
    if kind == 8 and base.dim() > 0 and base.size(0) > 1:
        return base[1]
    return base


def text(rng):
    return "".join(rng.choice("ab_. é€\n😀\0\ud800") for _ in range(rng.choice([0, 1, 5, 300])))


def member(rng):  # of a set
    return rng.choice([None, True, rng.randrange(1000), rng.random(), text(rng), (rng.randrange(3), text(rng)), b"\xff"])


def value(rng, pool, shared, depth=0):
    kind = rng.randrange(16 if depth < 4 else 9)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice([0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -2**31, 2**31, 2**63 - 1, -2**63,
                           rng.getrandbits(rng.randrange(1, 64)), -rng.getrandbits(rng.randrange(1, 64))])
    if kind == 3:
        return rng.choice([0.0, -0.0, -1.5, 1e300, 5e-324, float("inf"), float("nan"), rng.random()])
    if kind == 4:
        return text(rng)
    if kind == 5:
        # Empty bytes: torch.save writes them in a way that torch.load(weights_only=True) refuses.
        return bytes(rng.randrange(256) for _ in range(rng.choice([1, 7, 300])))
    if kind in (6, 7, 8):
        return tensor(rng, pool)
    size = rng.choice([0, 1, 2, 3, 4, 7])
    if depth == 0 and rng.random() < 0.05:  # more than pickle writes at once, and more names than a byte can number
        many = rng.choice([1001, 2500])
        return rng.choice([{f"name {i}": i for i in range(many)}, [f"{i % 700}" for i in range(many)], list(range(many))])
    if kind == 9:
        return tuple(value(rng, pool, shared, depth + 1) for _ in range(size))
    if kind == 10:
        return torch.Size(rng.randrange(9) for _ in range(size))
    if kind == 11:
        return set(member(rng) for _ in range(size))
    if kind == 12 and shared:
        return rng.choice(shared)  # the same object a second time
    if kind == 13:
        made = OrderedDict((text(rng), value(rng, pool, shared, depth + 1)) for _ in range(size))
        made._metadata = OrderedDict([("", {"version": 1, "tensor": torch.ones(3)})])
    elif kind == 14:
        made = {rng.choice([text(rng), rng.randrange(1000)]): value(rng, pool, shared, depth + 1) for _ in range(size)}
    else:
        made = [value(rng, pool, shared, depth + 1) for _ in range(size)]
    shared.append(made)
    return made


def structures(seed, count, directory):
    for i in range(count):
        rng = random.Random(seed + i)
        torch.manual_seed(seed + i)
        pool, shared = [], []
        torch.save({"value": [value(rng, pool, shared) for _ in range(12)]}, f"{directory}/{i}.pt")


def raw(t):
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).clone().untyped_storage().tolist()


def same(a, b, storages, where=""):
    """Equal as C++ has to keep it: sets become lists, torch.Size a tuple, OrderedDict a dict, parameters tensors."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape, (where, a, b)
        assert raw(a) == raw(b), (where, a, b)
        if not a.is_conj() and not a.is_neg():
            assert a.stride() == b.stride(), (where, a.stride(), b.stride())
            key = a.untyped_storage().data_ptr()
            if key:  # what shared memory shares it still
                assert storages.setdefault(key, b.untyped_storage().data_ptr()) == b.untyped_storage().data_ptr(), where
        return
    if isinstance(a, (set, frozenset)):
        assert isinstance(b, list) and set(b) == a, (where, a, b)
        return
    if isinstance(a, dict):
        assert isinstance(b, dict) and list(a) == list(b) and list(map(type, a)) == list(map(type, b)), (where, a, b)
        for key in a:
            same(a[key], b[key], storages, f"{where}[{key!r}]")
        return
    if isinstance(a, (list, tuple)):
        assert type(b) is (tuple if isinstance(a, tuple) else list) and len(a) == len(b), (where, a, b)
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, storages, f"{where}[{i}]")
        return
    if isinstance(a, float):
        assert isinstance(b, float) and (a == b or math.isnan(a) and math.isnan(b)), (where, a, b)
        assert math.copysign(1, a) == math.copysign(1, b), (where, a, b)
        return
    assert type(a) is type(b) and a == b, (where, a, b)


def compare(count, directory):
    for i in range(count):
        original = torch.load(f"{directory}/{i}.pt", weights_only=True)
        for mmap in (False, True):
            same(original, torch.load(f"{directory}/{i}.cpp.pt", weights_only=True, mmap=mmap), {})
    print(f"{count} structures equal")


def resave(count, directory):
    for i in range(count):
        loaded = torch.load(f"{directory}/{i}.pt", weights_only=True)
        same(loaded, torch.load(f"{directory}/{i}.pt", weights_only=True, mmap=True), {})
        torch.save(loaded, f"{directory}/{i}.back.pt")


# --- training


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.gain = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        return self.norm(x) * self.gain


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.block = Block()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(4, 2)
        self.unused = torch.nn.Linear(1, 1)  # has no optimizer state
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_((torch.arange(p.numel()) % 7 - 3).view_as(p) * 0.1 + 0.01 * i)

    def forward(self, x):
        return self.head(torch.tanh(self.block(self.first(x)))) * self.scale


def optimizer(name, model):
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.05, betas=(0.8, 0.95), amsgrad=True)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)


def step(model, optim, number):
    x = (torch.arange(15) % 5 - 2).view(5, 3) * 0.3 + 0.1 * number
    optim.zero_grad()
    model(x).square().sum().backward()
    optim.step()


def train(name, directory):
    model = Net()
    optim = optimizer(name, model)
    for i in range(3):
        step(model, optim, i)
    torch.save({"epoch": 2, "step": 3, "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optim.state_dict(), "loss": 0.5}, f"{directory}/python.pt")
    step(model, optim, 3)
    torch.save(model.state_dict(), f"{directory}/next.pt")


def go_on(name, file, next_file):
    checkpoint = torch.load(file, weights_only=True, mmap=True)
    model = Net()
    optim = optimizer(name, model)
    for group in optim.param_groups:
        group["lr"] = 7.0  # the file's wins
    assert type(checkpoint["model_state_dict"]) is OrderedDict
    assert list(checkpoint["model_state_dict"]) == list(model.state_dict())
    model.load_state_dict(checkpoint["model_state_dict"])
    reference_model = Net()
    reference = optimizer(name, reference_model)
    step(reference_model, reference, 0)
    ours, theirs = checkpoint["optimizer_state_dict"], reference.state_dict()
    assert list(ours) == list(theirs)
    assert [list(g) for g in ours["param_groups"]] == [list(g) for g in theirs["param_groups"]]
    assert ours["param_groups"] == theirs["param_groups"], (ours["param_groups"], theirs["param_groups"])
    assert [(k, list(v)) for k, v in ours["state"].items()] == [(k, list(v)) for k, v in theirs["state"].items()]
    for k, entry in theirs["state"].items():
        for name_, t in entry.items():
            assert ours["state"][k][name_].dtype == t.dtype and ours["state"][k][name_].shape == t.shape
    optim.load_state_dict(ours)
    torch.set_rng_state(checkpoint["libddp"]["cpu_rng_states"][0])
    step(model, optim, checkpoint["step"])
    expected = torch.load(next_file, weights_only=True)
    worst = max((model.state_dict()[k] - v).abs().max().item() for k, v in expected.items())
    assert worst <= 1e-6, worst
    print(f"{name}: largest difference {worst}")


# --- the checked-in file


def golden():
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    weights = OrderedDict([("weight", base), ("bias", base[0])])
    weights._metadata = OrderedDict([("", {"version": 1})])
    torch.save({
        "epoch": 1, "step": 7, "loss": 0.5, "none": None, "flag": True, "big": 2**40, "small": -2**63, "text": "é€",
        "bytes": b"\x00\x80\xff", "tuple": (1, 2.5, "x"), "set": {3}, "size": torch.Size([2, 3]),
        "model_state_dict": weights,
        "transposed": base.t(), "parameter": torch.nn.Parameter(torch.tensor([1.5, -2.0])),
        "bfloat16": torch.tensor([1.0, 2.5], dtype=torch.bfloat16), "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "conj": torch.tensor([1 + 2j]).conj(), "scalar": torch.tensor(3), "empty": torch.empty(2, 0),
    }, os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoint_python.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *arguments = sys.argv[1:]
    {"structures": lambda seed, count, directory: structures(int(seed), int(count), directory),
     "compare": lambda count, directory: compare(int(count), directory),
     "resave": lambda count, directory: resave(int(count), directory),
     "train": train, "go_on": go_on, "golden": golden}[command](*arguments)
