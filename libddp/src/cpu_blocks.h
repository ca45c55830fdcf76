// The memory of the caching CPU allocator: blocks of whole pages, in size classes, mapped from the kernel.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace ddp::detail {

constexpr int kPageBits = 12;
constexpr size_t kPage = size_t{1} << kPageBits;
constexpr size_t kHugePage = size_t{2} << 20;

constexpr size_t kFineLimit = size_t{1} << 20;
constexpr size_t kLargest = size_t{1} << 46;  // beyond what can be mapped
constexpr size_t kFineClasses = kFineLimit / kPage;
constexpr size_t kClasses = kFineClasses + (46 - 20) * 8 + 1;

struct SizeClass {
  size_t index;
  size_t bytes;
};

/// Requires: 0 < bytes <= kLargest. A class's own size belongs to that class.
constexpr SizeClass size_class(size_t bytes) {
  if (bytes <= kFineLimit) {
    const size_t pages = (bytes + kPage - 1) / kPage;
    return {pages, pages * kPage};
  }
  const auto octave = static_cast<size_t>(std::bit_width(bytes - 1)) - 1;  // 2^octave < bytes <= 2^(octave + 1)
  const size_t below = size_t{1} << octave;
  const size_t step = below / 8;
  const size_t steps = (bytes - below + step - 1) / step;  // 1 to 8
  return {kFineClasses + (octave - 20) * 8 + steps, below + steps * step};
}
static_assert(size_class(kFineLimit).index == kFineClasses && size_class(kFineLimit + 1).index == kFineClasses + 1);
static_assert(size_class(kLargest).index == kClasses - 1 && size_class(kLargest).bytes == kLargest);

// A ring with a sentinel. Blocks are in two: of their class, and of all by age.
struct Link {
  Link* previous = this;
  Link* next = this;

  bool alone() const { return next == this; }
  void insert_next(Link& item) {
    item.previous = this;
    item.next = next;
    next = next->previous = &item;
  }
  void remove() {
    previous->next = next;
    next->previous = previous;
  }
};
struct ClassLink : Link {};
struct AgeLink : Link {};

struct Block : ClassLink, AgeLink {
  void* data;
  size_t bytes;  // of its class; 0: no block of ours begins at this page
};

/// The block that begins at `data`; null for any other address. Takes no lock.
Block* find_block(const void* data);
/// A new block of a class's size; null, with errno, when memory is out.
Block* map_block(size_t bytes);
/// Gives those of a ring back to the kernel.
void unmap_blocks(ClassLink& blocks);

}  // namespace ddp::detail
