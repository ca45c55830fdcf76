#include "staging.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ddp::detail {
namespace {

constexpr size_t kPiece = size_t{2} << 20;
constexpr size_t kPerThread = size_t{16} << 20;
constexpr size_t kMostThreads = 4;

struct Piece {
  char* to;
  const char* from;
  size_t bytes;
};

torch::Tensor allocate(int64_t bytes, bool pinned) {
  const auto options = torch::dtype(torch::kByte);
  if (pinned) {
    try {
      return torch::empty({bytes}, options.pinned_memory(true));
    } catch (const c10::Error&) {  // the driver may refuse to pin that much; the copy is slower then
    }
  }
  return torch::empty({bytes}, options);
}

// Past the cache: plain stores would first read what they overwrite, a third of the traffic.
void copy_piece(Piece piece) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  const bool aligned = reinterpret_cast<uintptr_t>(piece.to) % sizeof(__m128i) == 0;
  for (; aligned && piece.bytes >= kLine; piece.to += kLine, piece.from += kLine, piece.bytes -= kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(piece.from);
    auto* to = reinterpret_cast<__m128i*>(piece.to);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(piece.to, piece.from, piece.bytes);
}

// On threads of its own, whatever OMP_NUM_THREADS says: the other ranks of the host wait for this one meanwhile.
void copy_pieces(const std::vector<Piece>& pieces, size_t bytes) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) copy_piece(pieces[i]);
  };
  const size_t threads = std::min({kMostThreads, size_t{std::thread::hardware_concurrency()}, bytes / kPerThread + 1});
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < threads) others.emplace_back(work);
  } catch (const std::system_error&) {  // fewer, then
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace

bool Staging::fits(size_t index, const io::Pickled::Storage& storage) const {
  return index < buffers_.size() && buffers_[index].defined() &&
         static_cast<uint64_t>(buffers_[index].numel()) == storage.bytes;
}

uint64_t Staging::missing(const std::vector<io::Pickled::Storage>& storages) const {
  uint64_t bytes = 0, given_back = 0;
  for (size_t i = 0; i < storages.size(); ++i) {
    if (!fits(i, storages[i])) bytes += storages[i].bytes;
  }
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].defined() && (i >= storages.size() || !fits(i, storages[i]))) {
      given_back += static_cast<uint64_t>(buffers_[i].numel());
    }
  }
  return bytes > given_back ? bytes - given_back : 0;
}

void Staging::copy(std::vector<io::Pickled::Storage>& storages) {
  torch::NoGradGuard no_grad;
  // First all that does not fit is given back, then what is missing is taken.
  buffers_.resize(storages.size());
  for (size_t i = 0; i < storages.size(); ++i) {
    if (!fits(i, storages[i])) buffers_[i] = torch::Tensor();
  }
  std::vector<torch::Device> devices;
  std::vector<Piece> pieces;
  size_t bytes_on_cpu = 0;
  for (size_t i = 0; i < storages.size(); ++i) {
    const auto& [storage, size] = storages[i];
    const auto bytes = static_cast<int64_t>(size);
    const bool on_cpu = storage.device_type() == torch::kCPU;
    if (!buffers_[i].defined()) buffers_[i] = allocate(bytes, storage.device_type() == torch::kCUDA);
    if (bytes == 0) continue;
    if (on_cpu) {
      auto* to = static_cast<char*>(buffers_[i].mutable_data_ptr());
      const auto* from = static_cast<const char*>(storage.data());
      for (size_t done = 0; done < size; done += kPiece) {
        pieces.push_back({to + done, from + done, std::min<size_t>(kPiece, size - done)});
      }
      bytes_on_cpu += size;
      continue;
    }
    const torch::Device device = storage.device();
    const auto live = torch::empty({0}, torch::dtype(torch::kByte).device(device)).set_(storage, 0, {bytes}, {1});
    buffers_[i].copy_(live, /*non_blocking=*/true);
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  }
  copy_pieces(pieces, bytes_on_cpu);
  for (torch::Device device : devices) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
  for (size_t i = 0; i < storages.size(); ++i) storages[i].storage = buffers_[i].storage();
}

}  // namespace ddp::detail
