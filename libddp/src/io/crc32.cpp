#include "io/crc32.h"

#include <array>
#include <bit>
#include <cstring>

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

}  // namespace

uint32_t crc32(const void* data, size_t size, uint32_t previous) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = ~previous;
  for (; size >= 16; size -= 16, bytes += 16) {
    uint32_t words[4];
    std::memcpy(words, bytes, sizeof words);
    crc = fold(words[0] ^ crc, 12) ^ fold(words[1], 8) ^ fold(words[2], 4) ^ fold(words[3], 0);
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xff];
  return ~crc;
}

}  // namespace ddp::io
