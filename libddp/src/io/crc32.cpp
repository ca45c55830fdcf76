#include "io/crc32.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ddp::io {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr size_t kSlices = 16;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// Table k advances a byte's remainder by k more bytes, so that 16 bytes are folded with 16 independent
// look-ups (Kounavis and Berry, "A Systematic Approach to Building High Performance Software-based CRC
// Generators", 2005).
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1) ? kPolynomial : 0);
    tables[0][byte] = remainder;
  }
  for (size_t slice = 1; slice < kSlices; ++slice) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();
static_assert(std::endian::native == std::endian::little, "checkpoints are written and read on little-endian machines");

uint32_t fold(uint32_t word, size_t slice) {
  return kTables[slice + 3][word & 0xff] ^ kTables[slice + 2][(word >> 8) & 0xff] ^
         kTables[slice + 1][(word >> 16) & 0xff] ^ kTables[slice][word >> 24];
}

#if defined(__x86_64__)

// x^n modulo the polynomial, reflected, one bit up as the product of two reflected numbers has it.
constexpr uint64_t power_of_x(int n) {
  uint32_t remainder = 0x80000000u;
  for (int i = 0; i < n; ++i) remainder = (remainder >> 1) ^ ((remainder & 1) ? kPolynomial : 0);
  return uint64_t{remainder} << 1;
}

// Moves 128 bits by `distance` bits and adds what stands there.
template <int distance>
__attribute__((target("pclmul,sse4.1"))) inline __m128i move_on(__m128i value, __m128i there) {
  constexpr uint64_t kLow = power_of_x(distance + 32), kHigh = power_of_x(distance - 32);
  const __m128i factors = _mm_set_epi64x(static_cast<int64_t>(kHigh), static_cast<int64_t>(kLow));
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00), high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

// Takes the blocks of 64 bytes at the front, four lanes at once, and returns 16 bytes that have the same remainder
// (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009).
// Requires: size >= 64.
__attribute__((target("pclmul,sse4.1"))) std::array<unsigned char, 16> fold_blocks(const unsigned char*& bytes,
                                                                                   size_t& size, uint32_t crc) {
  const auto load = [](const unsigned char* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  __m128i lanes[4] = {load(bytes), load(bytes + 16), load(bytes + 32), load(bytes + 48)};
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (bytes += 64, size -= 64; size >= 64; bytes += 64, size -= 64) {
    lanes[0] = move_on<512>(lanes[0], load(bytes));
    lanes[1] = move_on<512>(lanes[1], load(bytes + 16));
    lanes[2] = move_on<512>(lanes[2], load(bytes + 32));
    lanes[3] = move_on<512>(lanes[3], load(bytes + 48));
  }
  const __m128i all = move_on<128>(move_on<128>(move_on<128>(lanes[0], lanes[1]), lanes[2]), lanes[3]);
  std::array<unsigned char, 16> left;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left.data()), all);
  return left;
}

const bool kCanFold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");

#endif

uint32_t by_tables(const unsigned char* bytes, size_t size, uint32_t crc) {
  for (; size >= 16; size -= 16, bytes += 16) {
    uint32_t words[4];
    std::memcpy(words, bytes, sizeof words);
    crc = fold(words[0] ^ crc, 12) ^ fold(words[1], 8) ^ fold(words[2], 4) ^ fold(words[3], 0);
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xff];
  return crc;
}

}  // namespace

uint32_t crc32(const void* data, size_t size, uint32_t previous) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = ~previous;
#if defined(__x86_64__)
  if (kCanFold && size >= 256) {
    const auto left = fold_blocks(bytes, size, crc);
    crc = by_tables(left.data(), left.size(), 0);
  }
#endif
  return ~by_tables(bytes, size, crc);
}

}  // namespace ddp::io
