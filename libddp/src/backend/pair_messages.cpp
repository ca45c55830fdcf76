#include "backend/pair_messages.h"

#include <fmt/format.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "backend/gloo.h"
#include "backend/plain.h"
#include "backend/worker.h"
#include "ddp/error.h"
#include "error_text.h"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

}  // namespace

// The connection of this rank and one other.
class PairMessages::Pair {
 public:
  Pair(c10::intrusive_ptr<c10d::Store> store, int me, milliseconds timeout)
      : store_(std::move(store)), me_(me), timeout_(timeout) {}
  ~Pair() {
    closing_ = true;
    if (owner_ != ::getpid()) gloo_.release();  // a child made by fork has none of its threads
  }

  void add(c10::intrusive_ptr<TaskWork> work, std::function<void()> task) {
    worker_.add(std::move(work), std::move(task));
  }

  // On the worker's thread. Asks in between, because a wait in the store would keep it from all others of this process.
  c10d::Backend& gloo() {
    if (gloo_ != nullptr) return *gloo_;
    const auto key = [](int rank) { return fmt::format("ready/{}", rank); };
    store_->set(key(me_), "1");
    for (const auto deadline = Clock::now() + timeout_; !store_->check({key(1 - me_)});) {
      if (closing_) throw CommError("the group is gone");
      if (Clock::now() >= deadline) throw TimeoutError("it did not start a message with this rank");
      std::this_thread::sleep_for(milliseconds(2));
    }
    gloo_ = make_gloo(store_, me_, 2, timeout_);
    return *gloo_;
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int me_;
  const milliseconds timeout_;
  const pid_t owner_ = ::getpid();
  std::atomic<bool> closing_ = false;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  Worker worker_;  // ends first
};

// Two steps: it is started on the pair's thread, and then it is Gloo's.
class PairMessages::Message : public c10d::Work {
 public:
  Message(std::string who, std::shared_ptr<Pair> pair, std::shared_ptr<Plain> plain, bool received, int peer)
      : who_(std::move(who)), pair_(std::move(pair)), plain_(std::move(plain)), received_(received), peer_(peer) {}

  void start(c10d::Backend& gloo, int other, int tag) {
    const shm::Buffer buffer = plain_->buffer();
    if (buffer.count == 0) return;
    // Bytes: Gloo refuses some dtypes. The memory is the tensor's, for as long as the message needs it.
    std::vector<at::Tensor> tensors{at::from_blob(
        buffer.data, {buffer.bytes()}, [keep = plain_](void*) {}, at::TensorOptions(at::kByte))};
    inner_ = received_ ? gloo.recv(tensors, other, tag) : gloo.send(tensors, other, tag);
  }

  c10::intrusive_ptr<TaskWork> started = c10::make_intrusive<TaskWork>(std::vector<at::Tensor>());

  bool isCompleted() override {
    return done_ || (started->isCompleted() && (inner_ == nullptr || inner_->isCompleted()));
  }
  bool isSuccess() const override { return done_; }
  int sourceRank() const override { return peer_; }
  void synchronize() override { wait(c10d::kUnsetTimeout); }
  bool wait(milliseconds timeout) override {
    if (done_) return true;
    try {
      started->wait();
      if (inner_ != nullptr) timeout > milliseconds::zero() ? inner_->wait(timeout) : inner_->wait();
    } catch (const std::exception& e) {
      const std::string text = fmt::format("{}: {}", who_, error_text(e));
      if (text.find("imed out") != std::string::npos || dynamic_cast<const TimeoutError*>(&e) != nullptr) {
        throw TimeoutError(text);
      }
      if (text.find("onnection") != std::string::npos) throw PeerError(text);
      throw CommError(text);
    }
    if (received_) plain_->put_back();
    done_ = true;
    return true;
  }

 private:
  const std::string who_;
  const std::shared_ptr<Pair> pair_;
  const std::shared_ptr<Plain> plain_;
  const bool received_;
  const int peer_;
  c10::intrusive_ptr<c10d::Work> inner_;  // once started
  bool done_ = false;
};

PairMessages::PairMessages(c10::intrusive_ptr<c10d::Store> store, Place place, std::string group, milliseconds timeout)
    : store_(std::move(store)), place_(place), group_(std::move(group)), timeout_(timeout) {}

PairMessages::~PairMessages() = default;

PairMessages::WorkPtr PairMessages::start(const char* operation, const at::Tensor& tensor, int peer, int tag) {
  const std::string who = fmt::format("[ddp::{}] {}: a message {} rank {} in group \"{}\"", operation, place_.name(),
                                      operation[0] == 's' ? "to" : "from", peer, group_);
  if (peer < 0 || peer >= place_.size || peer == place_.rank) {
    throw MismatchError(fmt::format("{}: there is no such peer; give another rank of 0..{}", who, place_.size - 1));
  }
  const int low = std::min(peer, place_.rank), high = std::max(peer, place_.rank);
  const int me = place_.rank == low ? 0 : 1;
  std::shared_ptr<Pair> pair;
  {
    std::lock_guard lock(mutex_);
    auto& found = pairs_[peer];
    if (found == nullptr) {
      const auto keys = c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}-{}", low, high), store_);
      found = std::make_shared<Pair>(keys, me, timeout_);
    }
    pair = found;
  }
  auto plain = std::make_shared<Plain>(operation, tensor);
  auto message = c10::make_intrusive<Message>(who, pair, std::move(plain), operation[0] == 'r', peer);
  // The message holds the pair.
  pair->add(message->started,
            [message, &pair = *pair, other = 1 - me, tag] { message->start(pair.gloo(), other, tag); });
  return message;
}

}  // namespace ddp::detail
