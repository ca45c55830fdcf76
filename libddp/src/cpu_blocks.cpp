#include "cpu_blocks.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>

namespace ddp::detail {
namespace {

// The block that begins at an address, in two steps, without a lock: a table of chunks of 1 GiB, and for each chunk
// that has had a block, a record for each of its pages. Both are zero pages, of which only those that are used take
// memory. Tells our pointers from those of the allocator before, which a raw_deallocate has to.
constexpr int kChunkBits = 30;
constexpr size_t kPagesPerChunk = size_t{1} << (kChunkBits - kPageBits);
constexpr size_t kChunkTableBytes = kPagesPerChunk * sizeof(Block);
constinit std::array<std::atomic<Block*>, size_t{1} << (48 - kChunkBits)> g_chunks{};
static_assert(sizeof(void*) == 8);

void* map_pages(size_t bytes, int flags = 0) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

/// The record of the page at `address`, null when there is none and none can be made.
Block* record_at(uintptr_t address, bool make) {
  const size_t chunk = address >> kChunkBits;
  if (chunk >= g_chunks.size()) return nullptr;
  Block* records = g_chunks[chunk].load(std::memory_order_acquire);
  if (records == nullptr) {
    if (!make) return nullptr;
    void* table = map_pages(kChunkTableBytes, MAP_NORESERVE);
    if (table == nullptr) return nullptr;
    ::madvise(table, kChunkTableBytes, MADV_NOHUGEPAGE);  // a few of its pages are used
    if (g_chunks[chunk].compare_exchange_strong(records, static_cast<Block*>(table), std::memory_order_acq_rel)) {
      records = static_cast<Block*>(table);
    } else {
      ::munmap(table, kChunkTableBytes);
    }
  }
  return &records[(address >> kPageBits) % kPagesPerChunk];
}

void unmap_block(Block& block) {
  void* data = block.data;
  const size_t bytes = block.bytes;
  std::atomic_ref(block.bytes).store(0, std::memory_order_release);  // before another can have the address
  // A hole in a mapping makes two of it, and their number is limited: then the memory goes and the addresses stay.
  if (::munmap(data, bytes) != 0) ::madvise(data, bytes, MADV_DONTNEED);
}

}  // namespace

Block* find_block(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % kPage != 0) return nullptr;
  Block* block = record_at(address, /*make=*/false);
  if (block == nullptr) return nullptr;
  return std::atomic_ref(block->bytes).load(std::memory_order_acquire) != 0 ? block : nullptr;
}

Block* map_block(size_t bytes) {
  const bool huge = bytes >= kHugePage;
  const size_t span = huge ? bytes + kHugePage - kPage : bytes;
  auto* start = static_cast<char*>(map_pages(span));
  if (start == nullptr) return nullptr;
  char* data = start;
  if (huge) {
    const auto address = reinterpret_cast<uintptr_t>(start);
    data += (kHugePage - address % kHugePage) % kHugePage;
    if (data > start) ::munmap(start, static_cast<size_t>(data - start));
    char* end = data + bytes;
    if (start + span > end) ::munmap(end, static_cast<size_t>(start + span - end));
    // A fault per 2 MiB, not per 4 KiB: 5 to 10 times as fast to touch. Where it is refused, it works without.
    ::madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
  Block* block = record_at(reinterpret_cast<uintptr_t>(data), /*make=*/true);
  if (block == nullptr) {
    ::munmap(data, bytes);
    errno = ENOMEM;
    return nullptr;
  }
  std::atomic_ref bytes_there(block->bytes);
  bytes_there.load(std::memory_order_acquire);  // 0: after all that the last owner of these addresses did
  block->data = data;
  bytes_there.store(bytes, std::memory_order_release);
  return block;
}

void unmap_blocks(ClassLink& blocks) {
  while (!blocks.alone()) {
    auto* block = static_cast<Block*>(static_cast<ClassLink*>(blocks.next));
    block->ClassLink::remove();
    unmap_block(*block);
  }
}

}  // namespace ddp::detail
