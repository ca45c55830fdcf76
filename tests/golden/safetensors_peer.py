"""The Python side of safetensors_golden_test.cpp.

safetensors_peer.py golden                writes safetensors_python.safetensors, the file that is checked in
                                          (with the package safetensors 0.8.0, torch 2.15)
safetensors_peer.py write COUNT DIR       random tensors, as DIR/{i}.safetensors and, with torch.save, DIR/{i}.pt
safetensors_peer.py compare COUNT DIR     DIR/{i}.cpp.safetensors, which C++ wrote, against both

The package writes and reads where it is installed; otherwise the few lines below do, which follow the format's
description (https://github.com/huggingface/safetensors, "Format") and tensor.rs for the order. The first line of the
output says which.
"""

import json
import os
import random
import struct
import sys

import torch

try:
    import safetensors
    import safetensors.torch
except ImportError:
    safetensors = None

# From narrow to wide, as the enumeration in tensor.rs; written from the end.
NAMES = {torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
         torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
         torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.complex64: "C64",
         torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64"}


def raw(tensor):
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).clone().untyped_storage().tolist())


def write(tensors, path):
    metadata = {"format": "pt"}
    if safetensors:
        safetensors.torch.save_file(tensors, path, metadata=metadata)
        return
    order, header, data = list(NAMES), {"__metadata__": metadata}, b""
    for name, tensor in sorted(tensors.items(), key=lambda item: (-order.index(item[1].dtype), item[0].encode())):
        begin = len(data)
        data += raw(tensor)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read(path):
    if safetensors:
        return safetensors.torch.load_file(path)
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    with open(path, "rb") as file:
        content = file.read()
    size, = struct.unpack("<Q", content[:8])
    header, data, tensors, end = json.loads(content[8:8 + size]), content[8 + size:], {}, 0
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        assert begin == end and size % 8 == 0, (path, name)
        end = stop
        dtype = dtypes[entry["dtype"]]
        if begin == stop:
            tensors[name] = torch.empty(entry["shape"], dtype=dtype)
        else:
            tensors[name] = torch.frombuffer(bytearray(data[begin:stop]), dtype=dtype).reshape(entry["shape"])
    assert end == len(data), path
    return tensors


def random_tensors(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors = {}
    for _ in range(rng.choice([0, 1, 5, 30])):
        name = "".join(rng.choice("abz.09_é€😀\"\\/\n\t\x7f ") for _ in range(rng.choice([1, 3, 40])))
        shape = rng.choice([(), (0,), (1,), (3,), (2, 3), (4, 1, 5), (2, 0, 3), (1, 1, 1, 1, 1, 1, 7)])
        tensors[name] = (torch.randn(shape) * 20).to(rng.choice(list(NAMES)))
    return tensors


def write_random(count, directory):
    for i in range(count):
        tensors = random_tensors(i)
        write(tensors, f"{directory}/{i}.safetensors")
        torch.save(tensors, f"{directory}/{i}.pt")


def compare(count, directory):
    for i in range(count):
        expected, path = torch.load(f"{directory}/{i}.pt", weights_only=True), f"{directory}/{i}.cpp.safetensors"
        found = read(path)
        assert found.keys() == expected.keys(), (path, found.keys(), expected.keys())
        for name, tensor in expected.items():
            other = found[name]
            assert tensor.dtype == other.dtype and tensor.shape == other.shape and raw(tensor) == raw(other), (path, name)
        with open(path, "rb") as ours, open(f"{directory}/{i}.safetensors", "rb") as theirs:
            assert ours.read() == theirs.read(), f"{path}: other bytes"
    print(f"{count} files equal, byte for byte")


def golden():
    assert safetensors, "the golden file is made by the package: pip install safetensors"
    tensors = {}
    for dtype, name in NAMES.items():
        tensors[name.lower()] = torch.arange(1, 7, dtype=torch.float32).view(2, 3).to(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(2, 0, dtype=torch.int64)
    tensors["special"] = torch.tensor([float("inf"), -0.0, 65504.0], dtype=torch.float16)
    tensors["é \"quoted\"\n"] = torch.tensor([1, 2, 3])
    safetensors.torch.save_file(tensors, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                                      "safetensors_python.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"the package safetensors {safetensors.__version__}" if safetensors else "the format's description", flush=True)
    command, *arguments = sys.argv[1:]
    {"golden": golden, "write": lambda count, directory: write_random(int(count), directory),
     "compare": lambda count, directory: compare(int(count), directory)}[command](*arguments)
