// Collectives of ranks on several hosts, each with several ranks: inside a host through memory, between hosts through
// Gloo. The first ranks of each host, as many as the host with the fewest ranks has, are leaders: leader i of each host
// talks to leader i of the others, about slice i of the data. So the bytes of a host are shared by as many connections as
// it has leaders, and each byte leaves a host once.
//
//   TwoLevels levels(std::move(options));                   // connects the leaders
//   levels.all_reduce(buffers, shm::Op::kSum, 1.0);         // the caller does the work
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/failure_board.h"
#include "ddp/place.h"
#include "shm/join.h"
#include "shm/slices.h"

namespace ddp::detail {

struct TwoLevelsOptions {
  Place place;
  std::string group;
  std::chrono::milliseconds timeout;
  shm::Hosts hosts;
  /// Of the ranks of this host; null where this rank is alone on it.
  std::unique_ptr<shm::Exchange> exchange;
  /// With keys of its own.
  c10::intrusive_ptr<c10d::Store> store;
};

/// One rank's end. Not thread-safe. Each call is made by all ranks. Throws MismatchError where ranks disagree, before any
/// value is used, PeerError where one has ended, TimeoutError, CommError; the group cannot be used after that.
class TwoLevels {
 public:
  /// Collective. Throws c10::Error.
  explicit TwoLevels(TwoLevelsOptions options);
  ~TwoLevels();
  TwoLevels(const TwoLevels&) = delete;
  TwoLevels& operator=(const TwoLevels&) = delete;

  const Place& place() const { return options_.place; }
  uint64_t calls() const { return calls_; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  void set_timeout(std::chrono::milliseconds timeout);
  /// Whether all hosts have the same number of ranks, as `all_gather` requires.
  bool even() const { return even_; }

  /// Of the buffers as of one, all of one dtype: each rank's values times `scale`, added up on each host in the order of
  /// its ranks, and then between the hosts in the order of Gloo.
  void all_reduce(std::span<const shm::Buffer> buffers, shm::Op op, double scale);
  /// The same for rank `root` only; the others keep what they have.
  void reduce(const shm::Buffer& buffer, shm::Op op, int root);
  void broadcast(std::span<const shm::Buffer> buffers, int root);
  /// `outputs`: one of the size of `input` for each rank. Requires: even().
  void all_gather(const shm::Buffer& input, std::span<const shm::Buffer> outputs);
  void barrier();

  /// What is not done in two levels, over one Gloo group of all ranks, connected when it is first needed. `start` begins
  /// it; all ranks have made the same `call` before.
  void through_gloo(const shm::Call& call,
                    const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& gloo)>& start);

 private:
  using Gloo = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Clock = std::chrono::steady_clock;
  // Who waits for leaders waits a little longer than they, and they a little longer than who waits for a rank of the
  // host, so that the one who knows most is the first to give up.
  static constexpr std::chrono::milliseconds kSlack{100};
  enum class Watch { kHost, kNothing };  // while a leader waits for other hosts: ranks of this one

  template <class F>
  void collective(shm::Call call, F&& stages);
  void reduce_in_blocks(const shm::Strip& strip, shm::Op op, double scale, int root);
  WorkPtr start_reduction(const at::Tensor& slice, const c10d::ReduceOp& op, int root);
  WorkPtr say_call();
  void compare_calls(const WorkPtr& work, Watch watch);
  void agree();
  void await(const WorkPtr& work, Watch watch);
  [[noreturn]] void fail(const std::exception_ptr& error);
  void abandon_gloo() noexcept;
  std::string where() const;
  std::string peers() const;
  std::string news_of_host();
  bool leads() const { return gloo_ != nullptr; }
  bool leads(const shm::Slices& slices) const { return leads() && slices.size(local_) > 0; }
  shm::Exchange* exchange() const { return options_.exchange.get(); }
  void be_patient_on_host();
  at::Tensor scratch(int number, int64_t bytes);

  TwoLevelsOptions options_;
  FailureBoard board_;
  std::vector<int> host_of_;  // by rank
  int host_ = 0;              // this rank's
  int local_ = 0;             // its number there
  int leaders_ = 1;           // of each host
  bool even_ = true;
  std::vector<int> peers_;  // the leaders of this rank's slice, by host
  Gloo gloo_;               // between them; null where this rank leads none
  Gloo flat_;               // of all ranks

  const pid_t owner_;
  uint64_t calls_ = 0;
  shm::Call call_;
  Watch watch_ = Watch::kNothing;
  std::vector<at::Tensor> said_;  // the calls of the hosts, as bytes
  at::Tensor scratch_[2];         // kept from call to call
  std::string failure_;
};

}  // namespace ddp::detail
