// Random numbers that differ between ranks and repeat between runs.
//
//   ddp::seed_all(42, group);                                    // dropout: another mask on each rank
//   auto generator = ddp::make_generator(42, group, row);        // augmentation of one row, on whichever thread
//   auto noise = torch::randn({8}, generator);
//
// What all ranks must draw alike (the sampler's order, initial weights) needs none of this: the sampler has its own seed,
// and DistributedDataParallel broadcasts rank 0's weights.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

#include "ddp/place.h"

namespace ddp {

/// Seeds the default generators of the CPU and of every visible CUDA device with `seed + rank`, as
/// `torch.manual_seed(seed + rank)` in Python does, and draws the same numbers as there. Call it after the group is made,
/// which is when CUDA is loaded. Thread-safe, but a thread that draws meanwhile gets either stream.
void seed_all(uint64_t seed, const Place& place);

/// A CPU generator of its own for (seed, rank, stream). With the row's index as `stream`, what a loader's worker threads
/// draw does not depend on which thread has the row. The three numbers are mixed by SplitMix64 (Steele, Lea and Flood,
/// OOPSLA 2014) into the 32 bits that libtorch's Mersenne Twister takes: streams are independent, though two of a
/// hundred thousand coincide about once. Thread-safe; the generator is for one thread at a time.
at::Generator make_generator(uint64_t seed, const Place& place, uint64_t stream);

}  // namespace ddp
