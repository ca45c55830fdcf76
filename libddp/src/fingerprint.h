// A number that stands for what must be equal on all ranks.
#pragma once

#include <bit>
#include <cstdint>

namespace ddp::detail {

/// FNV-1a over words, with a mix after each: any flipped bit changes it.
class Fingerprint {
 public:
  void add(int64_t value) {
    hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 0x100000001b3;
    hash_ ^= hash_ >> 29;
  }
  void add(double value) { add(std::bit_cast<int64_t>(value)); }
  int64_t value() const { return static_cast<int64_t>(hash_); }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace ddp::detail
