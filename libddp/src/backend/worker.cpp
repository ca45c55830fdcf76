#include "backend/worker.h"

#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "backend/no_sigpipe.h"
#include "ddp/error.h"

namespace ddp::detail {

TaskWork::TaskWork(std::vector<at::Tensor> result)
    : result_(std::move(result)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void TaskWork::done(std::exception_ptr error) {
  // The future first: who waits for the work may look at it.
  if (error != nullptr) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(result_));
  }
  finish(std::move(error));
}

struct Worker::State {
  struct Task {
    c10::intrusive_ptr<TaskWork> work;
    std::function<void()> run;
  };

  void loop() {
    const at::NoGradGuard no_grad;
    const NoSigpipe no_sigpipe;  // tasks write to sockets
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stop || !tasks.empty(); });
        if (tasks.empty()) return;
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      std::exception_ptr error;
      try {
        task.run();
      } catch (...) {
        error = std::current_exception();
      }
      task.run = nullptr;  // what it holds is free before anyone goes on
      task.work->done(std::move(error));
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool stop = false;
};

Worker::Worker()
    : state_(std::make_shared<State>()), owner_(::getpid()), thread_([state = state_] { state->loop(); }) {}

Worker::~Worker() {
  if (owner_ != ::getpid()) {
    // A child made by fork has the object without the thread, and perhaps a locked mutex.
    new std::thread(std::move(thread_));
    return;
  }
  if (thread_.get_id() == std::this_thread::get_id()) {
    // A callback on the thread has dropped the last reference: nobody is left who could do what waits.
    std::deque<State::Task> left;
    {
      std::lock_guard lock(state_->mutex);
      state_->stop = true;
      left.swap(state_->tasks);
    }
    for (auto& task : left)
      task.work->done(std::make_exception_ptr(CommError("[ddp::ProcessGroup] the group is gone")));
    thread_.detach();
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->changed.notify_one();
  thread_.join();
}

void Worker::add(c10::intrusive_ptr<TaskWork> work, std::function<void()> task) {
  if (owner_ != ::getpid()) {
    throw CommError(
        "[ddp::ProcessGroup] this group belongs to the process that made it; a child made by fork cannot use it: fork "
        "before, or make a group in the child");
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->tasks.push_back({std::move(work), std::move(task)});
  }
  state_->changed.notify_one();
}

}  // namespace ddp::detail
