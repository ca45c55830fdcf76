#include "ddp/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Flags.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "ddp/error.h"
#include "memory_limit.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);

namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;

// In a process of its own: the allocator cannot be taken out again, and the other tests are to have c10's.
void alone(const std::function<void()>& body) {
  run_ranks(1, [&](int) { body(); });
}

c10::DataPtr get(size_t bytes) { return c10::GetCPUAllocator()->allocate(bytes); }

// A block that was written to.
c10::DataPtr touched(size_t bytes, int value = 1) {
  auto data = get(bytes);
  std::memset(data.get(), value, bytes);
  return data;
}

// Bytes: of address space, and in memory.
std::pair<size_t, size_t> memory() {
  std::ifstream file("/proc/self/statm");
  size_t size = 0, resident = 0;
  file >> size >> resident;
  return {size * 4096, resident * 4096};
}

torch::Tensor tensor_of(size_t bytes) { return torch::ones({static_cast<int64_t>(bytes / 4)}); }

}  // namespace

TEST_CASE("CPU allocator: without the call, c10's own allocator is untouched") {
  alone([] {
    auto* own = c10::GetDefaultCPUAllocator();
    message_of<ddp::ConfigError>([] { ddp::use_caching_cpu_allocator({.min_block = 1}); });
    auto tensor = tensor_of(8 * kMiB);
    DDP_CHECK(!ddp::caching_cpu_allocator_in_use());
    DDP_CHECK(ddp::trim_cpu_allocator() == 0);
    DDP_CHECK(c10::GetCPUAllocator() == own);
    DDP_CHECK(tensor.storage().allocator() == own);
    DDP_CHECK(tensor.storage().data_ptr().get_deleter() == own->raw_deleter());
    tensor.reset();
    const auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.allocated == 0 && stats.cached == 0 && stats.limit == 0 && stats.peak == 0);
    DDP_CHECK(stats.hits == 0 && stats.misses == 0 && stats.trims == 0);
    ddp::use_caching_cpu_allocator();
    DDP_CHECK(ddp::caching_cpu_allocator_in_use());
    DDP_CHECK(tensor_of(8 * kMiB).storage().data_ptr().get_deleter() != own->raw_deleter());
  });
}

TEST_CASE("CPU allocator: a freed block serves the next request of its class, and is counted") {
  alone([] {
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kMiB});
    DDP_CHECK(ddp::cpu_allocator_stats().limit == int64_t{64 * kMiB});
    auto first = get(kMiB), second = get(kMiB);
    void *a = first.get(), *b = second.get();
    DDP_CHECK(a != b);
    first.clear(), second.clear();
    auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.allocated == 0 && stats.cached == int64_t{2 * kMiB} && stats.peak == int64_t{2 * kMiB});
    DDP_CHECK(stats.hits == 0 && stats.misses == 2 && stats.trims == 0);

    auto again = get(kMiB - 4095);  // the last byte of the class below is at kMiB - 4096
    DDP_CHECK(again.get() == b);    // the newest
    auto other = get(kMiB + 1);
    DDP_CHECK(other.get() != a);
    auto small = get(64 * kKiB - 1);
    stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.allocated == int64_t{kMiB + kMiB + kMiB / 8} && stats.cached == int64_t{kMiB});
    DDP_CHECK(stats.peak == stats.allocated && stats.hits == 1 && stats.misses == 3);
    again.clear(), other.clear(), small.clear();
    stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.allocated == 0 && stats.cached == int64_t{3 * kMiB + kMiB / 8});
    DDP_CHECK(get(kMiB).get() == b);
  });
}

TEST_CASE("CPU allocator: a block is aligned and at most an eighth too large") {
  alone([] {
    ddp::use_caching_cpu_allocator({.min_block = 4 * kKiB, .max_cached = 16 * kMiB});
    std::vector<size_t> sizes;
    for (size_t power = 4 * kKiB; power <= 1024 * kMiB; power *= 2) {
      for (size_t eighths = 8; eighths < 16; ++eighths) {
        for (size_t more : {0, 1}) sizes.push_back(power / 8 * eighths + more);
      }
    }
    for (size_t size : sizes) {
      const auto before = ddp::cpu_allocator_stats();
      auto block = get(size);
      const auto held = static_cast<size_t>(ddp::cpu_allocator_stats().allocated - before.allocated);
      DDP_CHECK(held >= size && held < size + std::max(4 * kKiB, size / 8));
      if (size % 4096 == 0 && size <= kMiB) DDP_CHECK(held == size);
      if ((size & (size - 1)) == 0) DDP_CHECK(held == size);
      DDP_CHECK(reinterpret_cast<uintptr_t>(block.get()) % (held >= 2 * kMiB ? 2 * kMiB : 4 * kKiB) == 0);
      static_cast<char*>(block.get())[0] = 1;
      static_cast<char*>(block.get())[held - 1] = 1;
      block.clear();
      const auto after = ddp::cpu_allocator_stats();
      DDP_CHECK(after.allocated == before.allocated && after.cached <= after.limit);
    }
  });
}

TEST_CASE("CPU allocator: what is kept stays under the limit, and what was freed longest ago goes first") {
  alone([] {
    ddp::use_caching_cpu_allocator({.max_cached = 4 * kMiB});
    std::vector<c10::DataPtr> blocks;
    std::vector<void*> order;
    for (int i = 0; i < 6; ++i) blocks.push_back(get(kMiB));
    for (auto& block : blocks) {
      order.push_back(block.get());
      block.clear();
      DDP_CHECK(ddp::cpu_allocator_stats().cached <= int64_t{4 * kMiB});
    }
    auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.cached == int64_t{4 * kMiB} && stats.trims == 2);
    for (int i = 5; i >= 2; --i)
      DDP_CHECK((blocks[static_cast<size_t>(i)] = get(kMiB)).get() == order[static_cast<size_t>(i)]);
    DDP_CHECK(ddp::cpu_allocator_stats().hits == 4);
    blocks.clear();

    get(5 * kMiB).clear();  // larger than the limit: not kept, and nothing has to go for it
    stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.cached == int64_t{4 * kMiB} && stats.trims == 3);
    get(kMiB + kMiB / 2).clear();  // another class: two of the oldest go
    stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.cached == int64_t{3 * kMiB + kMiB / 2} && stats.trims == 5);

    ddp::use_caching_cpu_allocator({.max_cached = 2 * kMiB});  // a second call sets the limit anew
    stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.limit == int64_t{2 * kMiB} && stats.cached == int64_t{kMiB + kMiB / 2} && stats.trims == 7);
  });
}

TEST_CASE("CPU allocator: a trim gives memory back to the kernel") {
  alone([] {
    ddp::use_caching_cpu_allocator({.max_cached = 256 * kMiB});
    touched(kMiB).clear();
    ddp::trim_cpu_allocator();
    const size_t start = memory().second;
    {
      std::vector<c10::DataPtr> blocks;
      for (int i = 0; i < 32; ++i) blocks.push_back(touched(kMiB));
      blocks.push_back(touched(64 * kMiB));
    }
    DDP_CHECK(memory().second > start + 90 * kMiB);
    DDP_CHECK(ddp::trim_cpu_allocator(int64_t{64 * kMiB}) == int64_t{32 * kMiB});  // the small ones are older
    DDP_CHECK(ddp::cpu_allocator_stats().cached == int64_t{64 * kMiB});
    DDP_CHECK(memory().second < start + 70 * kMiB);
    DDP_CHECK(ddp::trim_cpu_allocator() == int64_t{64 * kMiB});
    DDP_CHECK(memory().second < start + 4 * kMiB);
    DDP_CHECK(ddp::trim_cpu_allocator() == 0 && ddp::cpu_allocator_stats().cached == 0);
    DDP_CHECK(ddp::cpu_allocator_stats().trims == 34);
    message_of<ddp::ConfigError>([] { ddp::trim_cpu_allocator(-1); });

    auto large = touched(64 * kMiB);  // above the limit: back at once
    ddp::use_caching_cpu_allocator({.max_cached = kMiB});
    large.clear();
    DDP_CHECK(memory().second < start + 4 * kMiB);
  });
}

TEST_CASE("CPU allocator: views, shared storages, resize_ and from_blob") {
  alone([] {
    ddp::use_caching_cpu_allocator({.max_cached = 256 * kMiB});
    auto in_use = [] { return ddp::cpu_allocator_stats().allocated; };
    {
      auto tensor = tensor_of(4 * kMiB);
      auto view = tensor.view({1024, 1024});
      auto row = view[7];
      auto alias = torch::empty({0}).set_(tensor.storage(), 5, {3}, {1});
      tensor.reset(), view.reset();
      DDP_CHECK(in_use() == int64_t{4 * kMiB});  // once, for all
      auto other = torch::zeros({1024, 1024});   // must not get the same block
      DDP_CHECK(row.sum().item<float>() == 1024 && alias.sum().item<float>() == 3);
      row.reset();
      DDP_CHECK(in_use() == int64_t{8 * kMiB});
    }
    DDP_CHECK(in_use() == 0);
    {
      auto tensor = torch::arange(65536);
      tensor.resize_({1 << 20});
      DDP_CHECK(in_use() == int64_t{8 * kMiB});
      DDP_CHECK(tensor.slice(0, 0, 65536).equal(torch::arange(65536)));
      tensor.resize_({100});  // keeps its storage
      DDP_CHECK(in_use() == int64_t{8 * kMiB} && tensor.equal(torch::arange(100)));
      tensor.storage().unsafeGetStorageImpl()->release_resources();
    }
    DDP_CHECK(in_use() == 0);
    {
      auto owner = std::make_shared<c10::DataPtr>(touched(kMiB, 0));
      int freed = 0;
      auto tensor = torch::from_blob(owner->get(), {int64_t{kMiB / 4}}, [&freed, owner](void*) { ++freed; });
      owner.reset();
      auto copy = tensor.clone().add_(1);
      tensor.set_data(copy);  // drops the blob
      DDP_CHECK(freed == 1 && in_use() == int64_t{kMiB} && tensor.sum().item<float>() == kMiB / 4);
    }
    DDP_CHECK(in_use() == 0);
    {
      auto tensor = tensor_of(kMiB);
      auto lazy = at::_lazy_clone(tensor);  // shares the block until one writes: wraps its deleter
      DDP_CHECK(in_use() == int64_t{kMiB});
      lazy.add_(1);
      DDP_CHECK(in_use() == int64_t{2 * kMiB} && tensor[5].item<float>() == 1 && lazy[5].item<float>() == 2);
    }
    DDP_CHECK(in_use() == 0);
  });
}

TEST_CASE("CPU allocator: a step gives the same numbers, from the second on without a new block") {
  alone([] {
    torch::manual_seed(1);
    torch::nn::Linear layer(300, 500);
    auto input = torch::randn({200, 300});
    auto step = [&] {
      layer->zero_grad();
      torch::relu(layer(input)).pow(2).sum().backward();
      return layer->weight.grad().clone();
    };
    const auto expected = step();
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kMiB});
    for (int i = 0; i < 3; ++i) {  // the gradient of the step before is freed in the next
      DDP_CHECK(step().equal(expected));
    }
    const auto warm = ddp::cpu_allocator_stats();
    for (int i = 0; i < 5; ++i) DDP_CHECK(step().equal(expected));
    const auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.misses == warm.misses && stats.hits >= warm.hits + 5 * 4 && stats.peak == warm.peak);
  });
}

TEST_CASE("CPU allocator: blocks are freed by the allocator they came from, whichever is set") {
  alone([] {
    auto old = tensor_of(kMiB), grown = tensor_of(kMiB);
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kMiB});
    auto ours = tensor_of(kMiB);
    old.reset();
    grown.resize_({int64_t{kMiB}});  // its storage keeps c10's allocator
    auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.allocated == int64_t{kMiB} && stats.cached == 0 && stats.misses == 1);

    auto* allocator = c10::GetCPUAllocator();
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kMiB});
    DDP_CHECK(c10::GetCPUAllocator() == allocator);
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 200);
    DDP_CHECK(!ddp::caching_cpu_allocator_in_use());
    auto newest = tensor_of(kMiB);
    ours.reset();
    stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.allocated == 0 && stats.cached == int64_t{kMiB} && stats.misses == 1 && stats.hits == 0);
    DDP_CHECK(newest.storage().data_ptr().get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter());
    DDP_CHECK(ddp::trim_cpu_allocator() == int64_t{kMiB});

    auto call = [] { ddp::use_caching_cpu_allocator(); };
    DDP_CHECK(message_of<ddp::ConfigError>(call).find("priority above 100") != std::string::npos);
    struct Other final : c10::Allocator {
      c10::DataPtr allocate(size_t n) override { return c10::GetDefaultCPUAllocator()->allocate(n); }
      void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
    } other;
    c10::SetCPUAllocator(&other, 200);
    DDP_CHECK(message_of<ddp::ConfigError>(call).find("set after the first call") != std::string::npos);
  });
}

TEST_CASE("CPU allocator: an allocator without the raw interface can be below") {
  alone([] {
    static int freed = 0;
    struct Other final : c10::Allocator {
      c10::DataPtr allocate(size_t n) override {
        auto* context = new std::vector<char>(n);
        return {context->data(), context,
                [](void* p) {
                  ++freed;
                  delete static_cast<std::vector<char>*>(p);
                },
                c10::Device(c10::DeviceType::CPU)};
      }
      void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
    };
    c10::SetCPUAllocator(new Other, 50);
    ddp::use_caching_cpu_allocator({.max_cached = kMiB});
    DDP_CHECK(c10::GetCPUAllocator()->raw_deleter() == nullptr);
    touched(100).clear();
    DDP_CHECK(freed == 1);
    touched(kMiB).clear();
    DDP_CHECK(freed == 1 && ddp::cpu_allocator_stats().cached == int64_t{kMiB});
  });
}

TEST_CASE("CPU allocator: the raw interface frees small, large and no blocks by one deleter") {
  alone([] {
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kMiB});
    auto* allocator = c10::GetCPUAllocator();
    DDP_CHECK(allocator->raw_allocate(0) == nullptr);
    allocator->raw_deallocate(nullptr);
    DDP_CHECK(allocator->allocate(0).get() == nullptr);
    std::vector<std::pair<void*, size_t>> blocks;
    for (size_t i = 0; i < 3000; ++i) {
      const size_t size = i % 10 == 0 ? 64 * kKiB + i : i;
      DDP_CHECK(allocator->allocate(size).get_deleter() == allocator->raw_deleter());
      void* data = allocator->raw_allocate(size);
      std::memset(data, static_cast<int>(i), size);
      blocks.emplace_back(data, size);
    }
    for (auto [data, size] : blocks) {
      DDP_CHECK(static_cast<char*>(data)[0] == static_cast<char*>(data)[size - 1]);
      allocator->raw_deallocate(data);
    }
    const auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.allocated == 0 && stats.hits + stats.misses == 2 * 300);

    auto source = touched(kMiB, 3);
    auto clone = allocator->clone(source.get(), kMiB);
    DDP_CHECK(std::memcmp(source.get(), clone.get(), kMiB) == 0 && allocator->is_simple_data_ptr(clone));
    source.clear(), clone.clear();
    FLAGS_caffe2_cpu_allocator_do_zero_fill = true;
    DDP_CHECK(static_cast<char*>(get(kMiB).get())[7] == 0);
  });
}

TEST_CASE("CPU allocator: blocks of the allocator before are told from ours at any address") {
  alone([] {
    static int freed = 0;
    struct Pages final : c10::Allocator {  // each block begins at a page, as ours do
      static void free(void* p) {
        ++freed;
        ::munmap(p, 4096);
      }
      c10::DataPtr allocate(size_t) override {
        void* p = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return {p, p, &free, c10::Device(c10::DeviceType::CPU)};
      }
      c10::DeleterFnPtr raw_deleter() const override { return &free; }
      void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
    };
    c10::SetCPUAllocator(new Pages, 50);
    ddp::use_caching_cpu_allocator({.max_cached = 256 * kMiB});
    auto* allocator = c10::GetCPUAllocator();
    std::vector<void*> small, large;
    int ours_before = 0;
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 100; ++i) {
        small.push_back(allocator->raw_allocate(100));
        ours_before += std::find(large.begin(), large.end(), small.back()) != large.end();
      }
      large.clear();
      for (int i = 0; i < 100; ++i) large.push_back(allocator->raw_allocate(64 * kKiB));
      for (void* data : large) allocator->raw_deallocate(data);
      DDP_CHECK(ddp::trim_cpu_allocator() == int64_t{100 * 64 * kKiB});  // the addresses are free for the others
    }
    DDP_CHECK(freed == 0 && ours_before > 0);
    for (void* data : small) allocator->raw_deallocate(data);
    DDP_CHECK(freed == 300 && ddp::cpu_allocator_stats().cached == 0);
  });
}

TEST_CASE("CPU allocator: when memory is out, the cache is given up first, then c10's error is thrown") {
  alone([] {
    auto limit_to = [](size_t more) {
      rlimit limit{};
      ::getrlimit(RLIMIT_AS, &limit);
      limit.rlim_cur = memory().first + more;
      ::setrlimit(RLIMIT_AS, &limit);
    };
    ddp::use_caching_cpu_allocator({.max_cached = 512 * kMiB});
    get(256 * kMiB).clear();
    limit_to(32 * kMiB);
    auto block = get(200 * kMiB);
    auto stats = ddp::cpu_allocator_stats();
    DDP_CHECK(stats.cached == 0 && stats.trims == 1 && stats.allocated == int64_t{208 * kMiB});
    auto message = message_of<c10::OutOfMemoryError>([] { get(1024 * 1024 * kMiB); });
    DDP_CHECK(message.find("1099511627776 bytes were asked for, with 218103808 bytes in use") != std::string::npos);
    DDP_CHECK(ddp::cpu_allocator_stats().allocated == int64_t{208 * kMiB});
    message_of<c10::Error>([] { torch::empty({int64_t{1} << 38}); });
    message = message_of<c10::Error>([] { get(static_cast<size_t>(-8)); });  // c10's own
    DDP_CHECK(message.find("[ddp::") == std::string::npos);
    block.clear();
    DDP_CHECK(ddp::cpu_allocator_stats().cached == int64_t{208 * kMiB});

    // Also for what the allocator before is asked for.
    ddp::use_caching_cpu_allocator({.min_block = 400 * kMiB, .max_cached = 512 * kMiB});
    limit_to(8 * kMiB);
    block = get(100 * kMiB);
    DDP_CHECK(ddp::cpu_allocator_stats().cached == 0 && ddp::cpu_allocator_stats().trims == 2);
    message_of<c10::Error>([] { get(300 * kMiB); });
  });
}

TEST_CASE("CPU allocator: a forked child has a working allocator, whatever the parent's threads did") {
  alone([] {
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kMiB});
    auto kept = touched(kMiB, 7);
    touched(2 * kMiB, 8).clear();
    std::atomic<bool> stop{false};
    std::thread busy([&] {  // has the lock for much of the time
      while (!stop) get(64 * kKiB);
    });
    int failed = 0;
    for (int i = 0; i < 50 && failed == 0; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(10);
        auto* data = static_cast<char*>(kept.get());
        bool ok = data[0] == 7 && data[kMiB - 1] == 7;
        auto reused = touched(2 * kMiB, 9);
        std::memset(data, 9, kMiB);
        kept.clear();
        auto* again = static_cast<char*>(touched(kMiB, 5).get());
        ok = ok && again == data;
        reused.clear();
        ok = ok && ddp::trim_cpu_allocator() >= int64_t{3 * kMiB} && ddp::caching_cpu_allocator_in_use();
        ddp::use_caching_cpu_allocator({.max_cached = 32 * kMiB});
        touched(64 * kKiB).clear();
        ::_exit(ok ? 0 : 1);
      }
      int status = 0;
      DDP_CHECK(::waitpid(child, &status, 0) == child);
      failed = status;
    }
    stop = true;
    busy.join();
    DDP_CHECK(failed == 0);  // 14: SIGALRM, the child hung
    DDP_CHECK(static_cast<char*>(kept.get())[0] == 7 && static_cast<char*>(kept.get())[kMiB - 1] == 7);
    auto reused = get(2 * kMiB);
    DDP_CHECK(static_cast<char*>(reused.get())[0] == 8 && ddp::cpu_allocator_stats().limit == int64_t{64 * kMiB});
  });
}

TEST_CASE("CPU allocator: PyTorch's memory profiler sees blocks come and go") {
  alone([] {
    struct Reporter final : c10::MemoryReportingInfoBase {
      std::vector<int64_t> seen;
      void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override { seen.push_back(bytes); }
      bool memoryProfilingEnabled() const override { return true; }
    };
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kMiB});
    auto reporter = std::make_shared<Reporter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reporter);
    get(100'000).clear();
    get(90'000).clear();
    get(100).clear();
    DDP_CHECK(reporter->seen == std::vector<int64_t>{100'000, -100'000, 90'000, -90'000, 100, -100});
  });
}

TEST_CASE("CPU allocator: options outside their bounds are refused") {
  alone([] {
    auto refusal = [](ddp::CpuAllocatorOptions options) {
      return message_of<ddp::ConfigError>([&] { ddp::use_caching_cpu_allocator(options); });
    };
    const auto negative = static_cast<size_t>(-1);
    DDP_CHECK(refusal({.min_block = 0}).find("min_block is 0 bytes") != std::string::npos);
    DDP_CHECK(refusal({.min_block = 4095}).find("4096 to 2^46") != std::string::npos);
    DDP_CHECK(refusal({.min_block = negative}).find("min_block is 18446744073709551615") != std::string::npos);
    DDP_CHECK(refusal({.max_cached = negative}).find("a negative number?") != std::string::npos);
    DDP_CHECK(refusal({.max_cached = 0}).find("no block would be kept") != std::string::npos);
    DDP_CHECK(refusal({.max_cached = 64 * kKiB - 1}).find("less than min_block") != std::string::npos);
    DDP_CHECK(!ddp::caching_cpu_allocator_in_use());
    ddp::use_caching_cpu_allocator({.max_cached = 64 * kKiB});
    get(64 * kKiB).clear();
    DDP_CHECK(ddp::cpu_allocator_stats().cached == int64_t{64 * kKiB});
  });
}

TEST_CASE("CPU allocator: the default limit is a quarter of the memory, shared by the ranks of the host") {
  const auto available = static_cast<int64_t>(ddp::detail::memory_limit(""));
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  if (limit.rlim_cur != RLIM_INFINITY) DDP_SKIP("the address space is limited");
  CHECK(available > int64_t{64 * kMiB});
  run_ranks(2, [&](int) {
    ddp::use_caching_cpu_allocator();
    DDP_CHECK(ddp::cpu_allocator_stats().limit == available / 8);
  });
}

TEST_CASE("CPU allocator: the memory limit is the least of the machine's and the cgroups'") {
  TempDir root;
  auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root / name).parent_path());
    std::ofstream(root / name) << text;
  };
  auto limit = [&] { return ddp::detail::memory_limit(root.path()); };
  write("proc/meminfo", "MemTotal:       1000000 kB\nMemFree:  5 kB\n");
  CHECK(limit() == 1'024'000'000);
  write("proc/self/cgroup", "0::/job/step\n");
  CHECK(limit() == 1'024'000'000);  // no file
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  CHECK(limit() == 1'024'000'000);
  write("sys/fs/cgroup/job/memory.max", "500000000\n");
  CHECK(limit() == 500'000'000);
  write("sys/fs/cgroup/job/step/memory.max", "400000000\n");
  CHECK(limit() == 400'000'000);
  write("sys/fs/cgroup/memory.max", "300000000\n");  // a container's own root
  CHECK(limit() == 300'000'000);
  write("proc/self/cgroup", "4:cpu,memory:/docker/a:b\n3:cpuset:/\n");
  CHECK(limit() == 1'024'000'000);
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(limit() == 1'024'000'000);
  write("sys/fs/cgroup/memory/docker/a:b/memory.limit_in_bytes", "200000000\n");
  CHECK(limit() == 200'000'000);
}
