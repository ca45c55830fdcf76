#include "ddp/prefetch.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include "cuda_module.h"
#include "ddp/error.h"
#include "error_text.h"
#include "side_stream.h"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// For this thread only: at::set_num_threads would set it for threads that begin later, too.
void use_one_openmp_thread() {
  at::get_num_threads();  // libtorch sets a thread's number when it is first asked for, which must not come after this
  using SetThreads = void (*)(int);
  if (auto* set = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
}

// A thread that wakes up takes the core from one that is at work, which here is the loop that has just woken it: where
// all cores are busy, the loop would wait for the batch after the next. A thread of this kind waits for a free core, or
// for its turn.
void let_the_loop_go_first() {
  const sched_param none{};
  sched_setscheduler(0, SCHED_BATCH, &none);
}

struct Job {
  int64_t number = 0;  // of the batch in its loop
  std::vector<size_t> rows;
};

struct Made {
  Job job;
  std::shared_ptr<void> batch = nullptr;
  std::exception_ptr error = nullptr;  // instead of a batch
  SideStream::Copies copies = {};
};

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  double& seconds_;
  Clock::time_point start_ = Clock::now();
};

std::string rows_text(const std::vector<size_t>& rows) {
  constexpr size_t kShown = 8;
  const auto end = rows.begin() + static_cast<ptrdiff_t>(std::min(rows.size(), kShown));
  return fmt::format("{}{}", fmt::join(rows.begin(), end, ", "), rows.size() > kShown ? ", ..." : "");
}

// The sampler is used by the loop's thread alone, so its state is the same whenever the other thread gets on. Jobs and
// batches are the two ends of one queue: the thread takes the oldest job, the loop the oldest batch.
class Queue final : public PrefetchQueue {
 public:
  Queue(DistributedSampler sampler, size_t batch_size, PrefetcherOptions options, MakeBatch make, VisitBatch visit)
      : sampler_(std::move(sampler)),
        batch_size_(batch_size),
        options_(options),
        make_(std::move(make)),
        visit_(std::move(visit)) {
    if (batch_size_ == 0 || batch_size_ > static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max())) {
      refuse(fmt::format("the batch size is {}; give a positive one", static_cast<ptrdiff_t>(batch_size_)));
    }
    if (options_.timeout <= std::chrono::milliseconds(0)) refuse("the timeout must be positive");
    // Added to the clock, the longest ones would overflow.
    options_.timeout = std::min<std::chrono::milliseconds>(options_.timeout, std::chrono::hours(24 * 365));
    if (options_.device.is_cpu()) return;
    if (!options_.device.is_cuda()) refuse(fmt::format("the device is {}; give the CPU or a CUDA device", device()));
    if (const int count = visible_cuda_devices(); std::max<int>(options_.device.index(), 0) >= count) {
      refuse(fmt::format("the device is {}, and this process can use {} CUDA devices", device(), count));
    }
    side_stream_.emplace(options_.device, options_.pin_memory);
  }

  ~Queue() override {
    {
      std::lock_guard lock(mutex_);
      quit_ = true;
    }
    job_came_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  uint64_t begin() override {
    const Stopwatch stopwatch(waited_);
    drop_all();
    sampler_.reset();
    epoch_ = sampler_.epoch();
    drawn_ = handed_out_ = 0;
    epoch_has_more_ = true;
    failed_.reset();
    if (options_.depth > 0 && !thread_.joinable()) thread_ = std::thread([this] { run(); });
    for (size_t i = 0; i < options_.depth; ++i) draw();
    return pass_;
  }

  std::shared_ptr<void> next(uint64_t pass) override {
    const Stopwatch stopwatch(waited_);
    if (pass != pass_) {
      throw ConfigError(fmt::format(
          "[ddp::Prefetcher] {}: another loop over it was begun while this one was under way; make a second prefetcher "
          "with a sampler of its own",
          sampler_.place().name()));
    }
    if (failed_) throw_failure();
    draw();
    if (handed_out_ == drawn_) return nullptr;
    Made made = options_.depth == 0 ? make(take_job()) : wait_for_batch();
    ++handed_out_;
    if (made.error) {
      failed_.emplace(std::move(made));
      throw_failure();
    }
    if (side_stream_) side_stream_->arrive(made.copies);
    return std::move(made.batch);
  }

  void leave(uint64_t pass) noexcept override {
    if (pass != pass_) return;
    drop_all();
    drawn_ = handed_out_ = 0;
    epoch_has_more_ = false;
  }

  double waited() const override { return waited_; }

 private:
  std::string device() const { return options_.device.str(); }

  [[noreturn]] void refuse(const std::string& why) const {
    throw ConfigError(fmt::format("[ddp::Prefetcher] {}: {}", sampler_.place().name(), why));
  }

  // Forgets the jobs and batches of a loop; what the thread is at is dropped when it is done, and not waited for.
  void drop_all() {
    std::deque<Job> jobs;
    std::deque<Made> batches;  // end when the lock is free again
    std::lock_guard lock(mutex_);
    ++pass_;
    jobs.swap(jobs_);
    batches.swap(batches_);
  }

  // Asks the thread for one batch more, unless the epoch has no more.
  void draw() {
    if (!epoch_has_more_) return;
    auto rows = sampler_.next(batch_size_);
    epoch_has_more_ = rows && (rows->size() == batch_size_ || !options_.drop_last);
    if (!epoch_has_more_) return;
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back({.number = drawn_++, .rows = std::move(*rows)});
    }
    job_came_.notify_one();
  }

  Job take_job() {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }

  Made wait_for_batch() {
    std::unique_lock lock(mutex_);
    if (!batch_came_.wait_for(lock, options_.timeout, [&] { return !batches_.empty(); })) {
      throw DataError(fmt::format(
          "[ddp::Prefetcher] {}: waited {} ms for batch {} of this loop over epoch {}; see what its making waits for, "
          "or raise the timeout",
          sampler_.place().name(), options_.timeout.count(), handed_out_, epoch_));
    }
    Made made = std::move(batches_.front());
    batches_.pop_front();
    return made;
  }

  [[noreturn]] void throw_failure() const {
    const std::string message = fmt::format(
        "[ddp::Prefetcher] {}: batch {} of this loop over epoch {} (rows {}) could not be made: {}",
        sampler_.place().name(), failed_->job.number, epoch_, rows_text(failed_->job.rows), error_text(failed_->error));
    try {
      std::rethrow_exception(failed_->error);
    } catch (...) {
      std::throw_with_nested(DataError(message));
    }
  }

  Made make(Job job) {
    Made made{.job = std::move(job)};
    try {
      at::NoGradGuard no_grad;
      // Without a thread of its own there is nothing that a second stream could run beside.
      const auto on_side = side_stream_ && options_.depth > 0 ? side_stream_->enter() : nullptr;
      made.batch = make_(made.job.rows);
      if (side_stream_) made.copies = side_stream_->copy([&](const auto& f) { visit_(made.batch.get(), f); });
    } catch (...) {
      made.error = std::current_exception();
      made.batch.reset();
    }
    return made;
  }

  // The thread.
  void run() {
    pthread_setname_np(pthread_self(), "ddp-prefetch");
    use_one_openmp_thread();
    let_the_loop_go_first();
    std::unique_lock lock(mutex_);
    while (true) {
      job_came_.wait(lock, [&] { return quit_ || !jobs_.empty(); });
      if (quit_) return;
      Job job = take_job();
      const uint64_t pass = pass_;
      lock.unlock();
      Made made = make(std::move(job));
      lock.lock();
      if (pass == pass_) {
        batches_.push_back(std::move(made));
        batch_came_.notify_one();
      } else {
        lock.unlock();  // its end may take time
        made = {};
        lock.lock();
      }
    }
  }

  DistributedSampler sampler_;
  size_t batch_size_;
  PrefetcherOptions options_;
  MakeBatch make_;
  VisitBatch visit_;
  std::optional<SideStream> side_stream_;

  // Of the loop's thread.
  double waited_ = 0;
  int64_t epoch_ = 0;
  int64_t drawn_ = 0;  // batches asked for in this loop
  int64_t handed_out_ = 0;
  bool epoch_has_more_ = false;
  std::optional<Made> failed_;  // where this loop came to its end

  std::mutex mutex_;  // guards what follows; the loop's thread alone changes pass_, and reads it freely
  std::condition_variable job_came_, batch_came_;
  std::deque<Job> jobs_;
  std::deque<Made> batches_;  // in order, because one thread makes them
  uint64_t pass_ = 0;
  bool quit_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<PrefetchQueue> make_prefetch_queue(DistributedSampler sampler, size_t batch_size,
                                                   PrefetcherOptions options, MakeBatch make, VisitBatch visit) {
  return std::make_unique<Queue>(std::move(sampler), batch_size, options, std::move(make), std::move(visit));
}

void throw_unknown_batch(const char* type) {
  throw ConfigError(fmt::format(
      "[ddp::Prefetcher] the tensors of a batch of type {} are not known, so it cannot be moved to a device; "
      "write for_each_tensor for it (for_each_tensor.h), or move it in the loop",
      c10::demangle(type)));
}

}  // namespace ddp::detail
