#include "ddp/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

namespace ddp {
namespace {

// SplitMix64: the step by the golden ratio, then Stafford's mix 13.
uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void seed_all(uint64_t seed, const Place& place) { at::manual_seed(seed + static_cast<uint64_t>(place.rank)); }

at::Generator make_generator(uint64_t seed, const Place& place, uint64_t stream) {
  // One after the other, so that (1, 0) and (0, 1) are different.
  uint64_t mixed = splitmix64(seed);
  mixed = splitmix64(mixed ^ static_cast<uint64_t>(place.rank));
  mixed = splitmix64(mixed ^ stream);
  return at::detail::createCPUGenerator(mixed >> 32);
}

}  // namespace ddp
