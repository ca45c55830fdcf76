// A thread that does one task after the other, for a backend whose collectives go on while their caller computes.
//
//   Worker worker;
//   auto work = c10::make_intrusive<TaskWork>(tensors);
//   worker.add(work, [=] { ... });                       // work->wait() returns when it is done, or throws what it threw
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace ddp::detail {

/// The outcome of a task.
class TaskWork : public c10d::Work {
 public:
  explicit TaskWork(std::vector<at::Tensor> result);

  std::vector<at::Tensor> result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  /// Called once, by whoever did the task.
  void done(std::exception_ptr error = nullptr);

 private:
  const std::vector<at::Tensor> result_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Thread-safe.
class Worker {
 public:
  Worker();
  /// Returns when all tasks are done.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Tasks are done in the order in which they are added. Throws CommError in a child made by fork, which has no thread.
  void add(c10::intrusive_ptr<TaskWork> work, std::function<void()> task);

 private:
  struct State;

  const std::shared_ptr<State> state_;
  const pid_t owner_;
  std::thread thread_;
};

}  // namespace ddp::detail
