// The checksum of zip files (CRC-32, reflected polynomial 0xEDB88320).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp::io {

/// The checksum of `size` more bytes after those that gave `previous`; start with 0.
uint32_t crc32(const void* data, size_t size, uint32_t previous = 0);

}  // namespace ddp::io
