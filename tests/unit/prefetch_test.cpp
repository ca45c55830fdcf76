#include "ddp/prefetch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "ddp/error.h"
#include "ddp/loop.h"
#include "support/catch.h"

using ddp::DistributedSampler;
using ddp::Prefetcher;
using ddp::test::ContainsSubstring;
using ddp::test::message_of;
using namespace std::chrono_literals;

namespace {

using Rows = std::vector<size_t>;

// A batch is the list of its rows, so two loaders are compared by what they ask for.
struct RowsOf : torch::data::datasets::BatchDataset<RowsOf, Rows> {
  explicit RowsOf(size_t n) : n(n) {}
  Rows get_batch(c10::ArrayRef<size_t> rows) override { return rows.vec(); }
  std::optional<size_t> size() const override { return n; }
  size_t n;
};

auto torch_loader(const DistributedSampler& sampler, size_t batch, bool drop_last = false) {
  return torch::data::make_data_loader(RowsOf(sampler.dataset_size()), sampler,
                                       torch::data::DataLoaderOptions(batch).drop_last(drop_last));
}

Rows copy_rows(const Rows& rows) { return rows; }

struct Case {
  size_t n;
  ddp::Place place;
  size_t batch;
  DistributedSampler::Options sampler;
  bool drop_last;

  DistributedSampler make_sampler() const { return {n, place, sampler}; }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const size_t n : {1, 7, 32}) {
    for (const ddp::Place place : {ddp::Place{0, 1}, ddp::Place{1, 2}, ddp::Place{2, 3}}) {
      for (const size_t batch : {1, 3, 8, 100}) {
        for (const bool shuffle : {false, true}) {
          for (const int drop : {0, 1, 2, 3}) {
            all.push_back({n, place, batch, {.shuffle = shuffle, .seed = n, .drop_last = (drop & 1) != 0}, drop > 1});
          }
        }
      }
    }
  }
  return all;
}

// Everything that a loop over some epochs shows: batches, places in windows, and the sampler's position at each.
// `seen` is continued; an epoch that was gone through is a line, too, unless the run is to be stopped.
template <class Loader>
void run_epochs(std::ostream& seen, DistributedSampler sampler, Loader& loader, int epochs, int64_t window,
                std::optional<int> stop_after = std::nullopt) {
  for (auto epoch : ddp::epochs(sampler, epochs)) {
    for (auto&& [batch, micro] : epoch.accumulate(loader, window)) {
      seen << epoch << ':';
      for (const size_t row : batch) seen << ' ' << row;
      seen << " (" << micro.index() << '/' << micro.count() << ") at " << sampler.consumed() << '\n';
      if (micro.last() && stop_after && --*stop_after == 0) return;
    }
    if (!stop_after) seen << (sampler.complete() ? "complete\n" : "not complete\n");
  }
}

bool eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

}  // namespace

TEST_CASE("prefetch: batches, windows and positions are those of torch's loader, at any depth") {
  size_t compared = 0;
  for (const Case& c : cases()) {
    const auto expected_sampler = c.make_sampler();
    auto loader = torch_loader(expected_sampler, c.batch, c.drop_last);
    std::ostringstream expected;
    run_epochs(expected, expected_sampler, *loader, 2, 2);
    for (const size_t depth : {0, 1, 2, 5}) {
      const auto sampler = c.make_sampler();
      Prefetcher ours(sampler, c.batch, RowsOf(c.n), {.drop_last = c.drop_last, .depth = depth});
      INFO(c.n << " rows, " << c.place.name() << ", batch " << c.batch << ", depth " << depth);
      std::ostringstream seen;
      run_epochs(seen, sampler, ours, 2, 2);
      REQUIRE(seen.str() == expected.str());
      CHECK(sampler.state_dict() == expected_sampler.state_dict());
      compared += seen.str().size();
    }
  }
  CHECK(compared > 10'000);
}

TEST_CASE("prefetch: without the loops of loop.h, each loop is the next epoch, as torch's") {
  DistributedSampler theirs(20, ddp::Place{0, 2}), ours(20, ddp::Place{0, 2});
  auto loader = torch_loader(theirs, 3);
  Prefetcher prefetcher(ours, 3, copy_rows);
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::vector<Rows> expected, seen;
    for (const auto& batch : *loader) expected.push_back(batch);
    for (const auto& batch : prefetcher) seen.push_back(batch);
    CHECK(seen == expected);
    CHECK(seen.size() == 4);
    CHECK(ours.epoch() == theirs.epoch());
  }
  static_assert(std::input_iterator<Prefetcher<Rows>::Iterator>);
}

TEST_CASE("prefetch: a run that is stopped and resumed has the batches of one that was not") {
  const auto fresh = [] { return DistributedSampler(64, ddp::Place{0, 2}, {.seed = 5}); };
  constexpr int kNever = 1000;
  const auto golden_sampler = fresh();
  auto loader = torch_loader(golden_sampler, 2);
  std::ostringstream golden;
  run_epochs(golden, golden_sampler, *loader, 3, 3, kNever);
  for (const size_t depth : {0, 1, 4}) {
    std::ostringstream seen;
    auto sampler = fresh();
    for (const int windows : {3, 1, 2, 4, kNever}) {  // 6 windows an epoch: in the middle, at its end, in the next
      Prefetcher ours(sampler, 2, copy_rows, {.depth = depth});
      run_epochs(seen, sampler, ours, 3, 3, windows);
      const ddp::State state = sampler.state_dict();
      sampler = fresh();
      sampler.load_state_dict(state);
    }
    CHECK(seen.str() == golden.str());
  }
}

TEST_CASE("prefetch: set_epoch in the middle of a loop takes effect with the next") {
  const auto run = [](DistributedSampler sampler, auto& loader) {
    std::vector<Rows> seen;
    for (int pass = 0; pass < 2; ++pass) {
      for (auto& batch : loader) {
        seen.push_back(batch);
        if (seen.size() == 2) sampler.set_epoch(7);
      }
    }
    return std::pair(seen, sampler.state_dict());
  };
  const DistributedSampler theirs(24, ddp::Place{}), ours(24, ddp::Place{});
  auto loader = torch_loader(theirs, 4);
  Prefetcher prefetcher(ours, 4, copy_rows);
  const auto expected = run(theirs, *loader), seen = run(ours, prefetcher);
  CHECK(seen.first == expected.first);
  CHECK(seen.first.size() == 12);
  CHECK(seen.second == expected.second);
}

TEST_CASE("prefetch: leaving early drops what was made ahead, and the loop may be begun again") {
  const auto run = [](DistributedSampler sampler, auto& loader) {
    std::vector<std::pair<int, size_t>> seen;
    for (auto epoch : ddp::epochs(sampler, 3)) {
      int64_t used = 0;
      for (auto& batch : epoch.batches(loader)) {
        seen.emplace_back(epoch, batch.front());
        if (++used == 2) break;
      }
      if (epoch == 1) break;
    }
    const auto middle = sampler.state_dict();
    for (auto epoch : ddp::epochs(sampler, 2)) {
      for (auto& batch : epoch.batches(loader)) seen.emplace_back(epoch, batch.front());
    }
    try {
      for (auto& batch : loader) throw batch.front();
    } catch (size_t row) {
      seen.emplace_back(-1, row);
    }
    for (auto& batch : loader) seen.emplace_back(9, batch.front());
    return std::tuple(seen, middle, sampler.state_dict());
  };
  const DistributedSampler theirs(32, ddp::Place{});
  auto loader = torch_loader(theirs, 2);
  const auto expected = run(theirs, *loader);
  for (const size_t depth : {0, 2, 9}) {
    const DistributedSampler ours(32, ddp::Place{});
    Prefetcher prefetcher(ours, 2, copy_rows, {.depth = depth});
    CHECK(run(ours, prefetcher) == expected);
  }
}

TEST_CASE("prefetch: a batch that cannot be made is an error in its turn, with its number, its rows and the reason") {
  for (const size_t depth : {0, 3}) {
    DistributedSampler sampler(40, ddp::Place{1, 2}, {.shuffle = false});
    bool broken = true;
    Prefetcher prefetcher(sampler, 4,
                          [&](const Rows& rows) {
                            if (broken && rows.front() == 25) throw std::out_of_range("row 25 is torn");
                            return rows;
                          },
                          {.depth = depth});
    int used = 0;
    const auto loop = [&] {
      for (auto epoch : ddp::epochs(sampler, 1)) {
        for ([[maybe_unused]] auto& batch : epoch.batches(prefetcher)) ++used;
      }
    };
    const auto text = message_of<ddp::DataError>(loop);
    CHECK(used == 3);
    CHECK(sampler.consumed() == 24);  // what was used, by both ranks
    CHECK_THAT(text, ContainsSubstring("[ddp::Prefetcher] rank 1/2: batch 3 of this loop over epoch 0") &&
                         ContainsSubstring("25, 27, 29, 31") && ContainsSubstring("row 25 is torn"));

    // By hand: the loop stays where it failed, and the first exception is inside.
    sampler.set_epoch(0);
    auto it = prefetcher.begin();
    ++it, ++it;
    for (int i = 0; i < 2; ++i) {
      try {
        ++it;
        FAIL("no error");
      } catch (const ddp::DataError& error) {
        CHECK(error.what() == text);
        CHECK_THROWS_AS(std::rethrow_if_nested(error), std::out_of_range);
      }
    }

    broken = false;
    sampler.set_epoch(0);
    used = 0;
    loop();
    CHECK(used == 5);
  }
}

TEST_CASE("prefetch: errors of libtorch come without their backtrace, and others than exceptions come too") {
  DistributedSampler sampler(4, ddp::Place{});
  Prefetcher of_torch(sampler, 2, [](const Rows&) { return torch::ones({2}).view({3}); });
  const auto text = message_of<ddp::DataError>([&] { of_torch.begin(); });
  CHECK_THAT(text, ContainsSubstring("shape '[3]' is invalid"));
  CHECK(text.find('\n') == std::string::npos);
  Prefetcher of_int(sampler, 2, [](const Rows&) -> int { throw 5; });
  CHECK_THAT(message_of<ddp::DataError>([&] { of_int.begin(); }), ContainsSubstring("no std::exception"));
}

TEST_CASE("prefetch: a slow source is waited for, a slow loop is not, and no more than depth is made ahead") {
  std::atomic<int> made{0};
  auto source_sleep = 0ms;
  const DistributedSampler sampler(24, ddp::Place{}, {.shuffle = false});
  Prefetcher prefetcher(sampler, 2,
                        [&](const Rows& rows) {
                          std::this_thread::sleep_for(source_sleep);
                          ++made;
                          return rows;
                        },
                        {.depth = 3});

  int used = 0;
  for (auto& batch : prefetcher) {
    CHECK(batch.front() == static_cast<size_t>(2 * used));
    ++used;
    CHECK(eventually([&] { return made == std::min(used + 3, 12); }));
    std::this_thread::sleep_for(2ms);  // the thread would have gone on if it could
    CHECK(made.load() == std::min(used + 3, 12));
  }
  CHECK(used == 12);

  source_sleep = 10ms;
  const double before = prefetcher.waited();
  CHECK(before < 1);
  for (auto& batch : prefetcher) used += batch.empty() ? 100 : 1;
  CHECK(used == 24);
  const double waited = prefetcher.waited() - before;
  CHECK(waited > 0.11);  // 12 batches of 10 ms, the loop itself takes none
  CHECK(waited < 5);

  Prefetcher synchronous(sampler, 2, [](const Rows& rows) { return std::this_thread::sleep_for(5ms), rows; },
                         {.depth = 0});
  for ([[maybe_unused]] auto& batch : synchronous) {
  }
  CHECK(synchronous.waited() > 0.055);
}

TEST_CASE("prefetch: a loop is left without a wait, of its batches the one in the making is the last that is made") {
  std::atomic<int> begun{0};
  std::atomic<bool> release{false};
  const auto blocks_second = [&](const Rows& rows) {
    if (++begun == 2) eventually([&] { return release.load(); });
    return rows.front();
  };
  DistributedSampler sampler(100, ddp::Place{}, {.shuffle = false});
  auto prefetcher =
      std::make_unique<Prefetcher<size_t>>(sampler, 1, blocks_second, ddp::PrefetcherOptions{.depth = 10});
  for (const size_t row : *prefetcher) {
    CHECK(row == 0);
    CHECK(eventually([&] { return begun == 2; }));
    break;  // waits 10 s if it waits for `release`
  }
  CHECK_FALSE(release.load());
  sampler.set_epoch(0);
  std::jthread later([&] {
    std::this_thread::sleep_for(20ms);
    release = true;
  });
  {
    const auto again = prefetcher->begin();
    CHECK(*again == 0);  // not the 1 of the loop that was left
    CHECK(release.load());
    CHECK(eventually([&] { return begun == 13; }));  // 2, then this loop's first and ten ahead: nothing else
  }
  later.join();

  release = false;
  begun = 0;
  sampler.set_epoch(0);
  {
    const auto last = prefetcher->begin();
    CHECK(eventually([&] { return begun == 2; }));
  }
  later = std::jthread([&] {
    std::this_thread::sleep_for(20ms);
    release = true;
  });
  prefetcher.reset();  // waits for the one in the making
  CHECK(release.load());
  CHECK(begun.load() == 2);
}

TEST_CASE("prefetch: a wait has an end") {
  std::atomic<bool> release{false};
  Prefetcher prefetcher(DistributedSampler(8, ddp::Place{0, 2}), 1,
                        [&](const Rows& rows) {
                          if (!release) eventually([&] { return release.load(); });
                          return rows;
                        },
                        {.timeout = 200ms});
  CHECK_THAT(message_of<ddp::DataError>([&] { prefetcher.begin(); }),
             ContainsSubstring("rank 0/2: waited 200 ms for batch 0 of this loop over epoch 0"));
  release = true;
  int used = 0;
  for ([[maybe_unused]] auto& batch : prefetcher) ++used;
  CHECK(used == 4);
}

TEST_CASE("prefetch: one loop at a time") {
  DistributedSampler sampler(8, ddp::Place{});
  Prefetcher prefetcher(sampler, 2, copy_rows);
  auto outer = prefetcher.begin();
  int inner = 0;
  for ([[maybe_unused]] auto& batch : prefetcher) ++inner;
  CHECK(inner == 4);
  CHECK_THAT(message_of<ddp::ConfigError>([&] { ++outer; }), ContainsSubstring("second prefetcher"));
}

TEST_CASE("prefetch: the thread leaves the default generator alone, has no grad mode and one OpenMP thread") {
  struct Threads {
    explicit Threads(int n) { at::set_num_threads(n); }
    ~Threads() { at::set_num_threads(1); }
  } const threads(3);
  auto& generator = at::detail::getDefaultCPUGenerator();
  torch::manual_seed(3);
  const auto state = generator.get_state().clone();
  const auto expected = torch::rand({4});
  torch::manual_seed(3);

  for (const size_t depth : {0, 2}) {
    std::map<std::string, int> seen;
    const auto main_thread = std::this_thread::get_id();
    Prefetcher prefetcher(DistributedSampler(12, ddp::Place{}), 3,
                          [&](const Rows& rows) {
                            seen["grad mode"] += torch::GradMode::is_enabled();
                            seen["threads"] += at::get_num_threads();
                            seen["main thread"] += std::this_thread::get_id() == main_thread;
                            return torch::ones({static_cast<int64_t>(rows.size())}, torch::requires_grad()) * 2;
                          },
                          {.depth = depth});
    for (auto& batch : prefetcher) CHECK_FALSE(batch.requires_grad());
    CHECK(seen["grad mode"] == 0);
    CHECK(seen["threads"] == (depth == 0 ? 12 : 4));
    CHECK(seen["main thread"] == (depth == 0 ? 4 : 0));
    CHECK(torch::equal(generator.get_state(), state));
    CHECK(torch::GradMode::is_enabled());
    CHECK(at::get_num_threads() == 3);
    int of_new_thread = 0;
    std::thread([&] { of_new_thread = at::get_num_threads(); }).join();
    CHECK(of_new_thread == 3);
  }
  CHECK(torch::equal(torch::rand({4}), expected));
}

TEST_CASE("prefetch: any batch, any source") {
  struct Token {
    std::unique_ptr<size_t> row;
  };
  DistributedSampler sampler(6, ddp::Place{}, {.shuffle = false});
  auto offset = std::make_unique<size_t>(10);  // a source that cannot be copied, a batch that cannot either
  Prefetcher moved(sampler, 1, [offset = std::move(offset)](const auto& rows) {
    return Token{std::make_unique<size_t>(*offset + rows.front())};
  });
  size_t sum = 0;
  for (auto epoch : ddp::epochs(sampler, 1)) {
    for (auto&& [batch, micro] : epoch.accumulate(moved, 4)) sum += *std::move(batch.row);
  }
  CHECK(sum == 75);

  // A torch data set with its transforms, as a loader takes it.
  struct Numbers : torch::data::datasets::Dataset<Numbers> {
    torch::data::Example<> get(size_t i) override { return {torch::tensor({float(i)}), torch::tensor({float(2 * i)})}; }
    std::optional<size_t> size() const override { return 6; }
  };
  sampler.set_epoch(0);
  Prefetcher examples(sampler, 4, Numbers().map(torch::data::transforms::Stack<>()));
  std::vector<torch::data::Example<>> seen;
  for (auto& batch : examples) seen.push_back(batch);
  REQUIRE(seen.size() == 2);
  CHECK(torch::equal(seen[0].target, torch::tensor({{0.f}, {2.f}, {4.f}, {6.f}})));
  CHECK(torch::equal(seen[1].data, torch::tensor({{4.f}, {5.f}})));

  // It is a value that can be moved, and a type that can be named.
  Prefetcher<torch::data::Example<>> elsewhere(std::move(examples));
  CHECK(elsewhere.begin()->data.size(0) == 4);
}

TEST_CASE(
    "prefetch: tensors of a batch are found as in for_each_tensor.h, an unknown type is an error when it counts") {
  const auto sum_of = [](auto&& batch) {
    double sum = 0;
    ddp::detail::visit_batch(batch, [&](torch::Tensor& t) { sum += t.sum().item<double>(); });
    return sum;
  };
  using Example = torch::data::Example<>;
  const auto t = [](double value) { return torch::full({2}, value); };
  CHECK(sum_of(t(1)) == 2);
  CHECK(sum_of(Example{t(1), t(2)}) == 6);
  CHECK(sum_of(torch::data::TensorExample{t(3)}) == 6);
  CHECK(sum_of(std::vector<Example>{{t(1), t(2)}, {t(3), t(4)}}) == 20);
  CHECK(sum_of(std::map<std::string, torch::Tensor>{{"a", t(1)}, {"b", t(2)}}) == 6);
  CHECK(sum_of(std::tuple(t(1), 5, std::string("x"), std::optional<Example>())) == 2);
  struct Unknown {
    torch::Tensor t;
  };
  CHECK_THAT(message_of<ddp::ConfigError>([&] { sum_of(std::pair(t(1), Unknown{})); }),
             ContainsSubstring("Unknown") && ContainsSubstring("for_each_tensor"));
}

TEST_CASE("prefetch: options that cannot be are refused") {
  const DistributedSampler sampler(8, ddp::Place{1, 2});
  const auto refusal = [&](size_t batch, ddp::PrefetcherOptions options) {
    return message_of<ddp::ConfigError>([&] { Prefetcher(sampler, batch, copy_rows, options); });
  };
  CHECK_THAT(refusal(0, {}), ContainsSubstring("rank 1/2: the batch size is 0"));
  CHECK_THAT(refusal(static_cast<size_t>(-1), {}), ContainsSubstring("batch size is -1"));
  CHECK_THAT(refusal(1, {.timeout = 0ms}), ContainsSubstring("timeout"));
  CHECK_THAT(refusal(1, {.device = torch::kMeta}), ContainsSubstring("meta"));
  if (std::filesystem::exists("/dev/nvidiactl")) return;
  CHECK_THAT(refusal(1, {.device = torch::kCUDA}), ContainsSubstring("can use 0 CUDA devices"));
}
