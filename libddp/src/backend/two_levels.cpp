#include "backend/two_levels.h"

#include <fmt/format.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "backend/gloo.h"
#include "backend/no_sigpipe.h"
#include "ddp/error.h"
#include "error_text.h"

namespace ddp::detail {
namespace {

using at::Tensor;
using shm::Buffer;
using shm::Call;
using shm::Op;
using shm::Operation;
using shm::Slices;
using shm::Strip;
using std::chrono::milliseconds;

// Of a leader's slice: while one block is between the hosts, the next is added up and the last is collected.
constexpr int64_t kBlock = int64_t{4} << 20;

Call call_of(Operation operation, c10::ScalarType dtype, int64_t count, int root = -1) {
  return {
      .count = count, .root = root, .operation = static_cast<int8_t>(operation), .dtype = static_cast<int8_t>(dtype)};
}

// Gloo knows no bool: on bytes of 0 and 1 "or" is the maximum, "and" the minimum.
c10d::ReduceOp to_c10d(Op op, c10::ScalarType dtype) {
  const bool logical = dtype == c10::ScalarType::Bool;
  switch (op) {
    case Op::kSum:
      return logical ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    case Op::kProduct:
      return logical ? c10d::ReduceOp::MIN : c10d::ReduceOp::PRODUCT;
    case Op::kMin:
      return c10d::ReduceOp::MIN;
    case Op::kMax:
      return c10d::ReduceOp::MAX;
    case Op::kBitAnd:
      return c10d::ReduceOp::BAND;
    case Op::kBitOr:
      return c10d::ReduceOp::BOR;
    case Op::kBitXor:
      return c10d::ReduceOp::BXOR;
  }
  throw ConfigError("[ddp] unknown operation");
}

// What Gloo is given in place of `slice`: it knows neither bool nor int16.
Tensor to_gloo(const Tensor& slice) {
  if (slice.scalar_type() == c10::ScalarType::Bool) return slice.view(c10::ScalarType::Byte);
  return slice.scalar_type() == c10::ScalarType::Short ? slice.to(c10::ScalarType::Int) : slice;
}

std::byte* data_of(const Tensor& tensor) {
  return tensor.defined() ? static_cast<std::byte*>(tensor.data_ptr()) : nullptr;
}

}  // namespace

TwoLevels::TwoLevels(TwoLevelsOptions options)
    : options_(std::move(options)),
      board_(c10::make_intrusive<c10d::PrefixStore>("failed", options_.store), options_.place),
      host_of_(options_.place.size),
      owner_(::getpid()) {
  const auto& hosts = options_.hosts;
  leaders_ = static_cast<int>(hosts[0].size());
  for (int host = 0; host < std::ssize(hosts); ++host) {
    leaders_ = std::min(leaders_, static_cast<int>(hosts[host].size()));
    even_ = even_ && hosts[host].size() == hosts[0].size();
    for (int i = 0; i < std::ssize(hosts[host]); ++i) {
      host_of_[hosts[host][i]] = host;
      if (hosts[host][i] == options_.place.rank) host_ = host, local_ = i;
    }
  }
  if (local_ >= leaders_) return;
  for (const auto& ranks : hosts) peers_.push_back(ranks[local_]);
  try {
    const NoSigpipe no_sigpipe;
    const auto keys = c10::make_intrusive<c10d::PrefixStore>(fmt::format("slice/{}", local_), options_.store);
    gloo_ = make_gloo(keys, host_, static_cast<int>(hosts.size()), options_.timeout);
  } catch (const std::exception& e) {
    if (exchange() != nullptr) exchange()->give_up("it cannot reach the other hosts: " + error_text(e));
    throw;
  }
}

TwoLevels::~TwoLevels() {
  if (owner_ == ::getpid()) return;
  gloo_.release(), flat_.release();  // a child made by fork has none of their threads, which they would wait for
}

// Runs the stages of a call. Whatever fails in them ends the group.
template <class F>
void TwoLevels::collective(Call call, F&& stages) {
  call.number = ++calls_;
  call_ = call;
  if (!failure_.empty()) {
    throw CommError(fmt::format("{}: the group failed before and cannot be used any more: {}", where(), failure_));
  }
  try {
    if (exchange() != nullptr) {
      exchange()->set_timeout(options_.timeout);
      exchange()->begin(call);
    }
    stages();
  } catch (...) {
    fail(std::current_exception());
  }
}

void TwoLevels::set_timeout(milliseconds timeout) {
  if (timeout == options_.timeout) return;
  options_.timeout = timeout;
  if (gloo_ != nullptr) gloo_->setTimeout(timeout);
  if (flat_ != nullptr) flat_->setTimeout(timeout);
}

void TwoLevels::be_patient_on_host() {
  if (exchange() != nullptr) exchange()->set_timeout(options_.timeout + 2 * kSlack);
}

// Bytes of a leader's slice; those of large calls are not kept.
Tensor TwoLevels::scratch(int number, int64_t bytes) {
  if (bytes > kBlock) return at::empty({bytes}, at::kByte);
  Tensor& kept = scratch_[number];
  if (!kept.defined() || kept.numel() < bytes) kept = at::empty({bytes}, at::kByte);
  return kept.narrow(0, 0, bytes);
}

// Each leader tells the others of its slice what its host is about to do: sizes that differ would end in wrong sums, or
// in the middle of Gloo.
TwoLevels::WorkPtr TwoLevels::say_call() {
  if (!leads()) return nullptr;
  std::vector<Tensor> inputs{at::zeros({static_cast<int64_t>(sizeof(Call))}, at::kByte)};
  std::memcpy(inputs[0].data_ptr(), &call_, sizeof(Call));
  said_.clear();
  for (size_t host = 0; host < peers_.size(); ++host) said_.push_back(at::empty_like(inputs[0]));
  std::vector<std::vector<Tensor>> outputs{said_};
  return gloo_->allgather(outputs, inputs, c10d::AllgatherOptions());
}

void TwoLevels::compare_calls(const WorkPtr& work, Watch watch) {
  if (work == nullptr) return;
  await(work, watch);
  const auto call_of = [&](size_t host) {
    Call call;
    std::memcpy(&call, said_[host].data_ptr(), sizeof(Call));
    return call;
  };
  for (size_t host = 1; host < peers_.size(); ++host) {
    if (call_of(host) == call_of(0)) continue;
    throw MismatchError(fmt::format(
        "{}: ranks disagree: rank {} calls {}, rank {} calls {}; make the same calls with the same sizes in the same "
        "order on all ranks",
        where(), peers_[0], shm::Exchange::describe(call_of(0)), peers_[host], shm::Exchange::describe(call_of(host))));
  }
}

// All ranks have come, and make the same call.
void TwoLevels::agree() {
  shm::meet_on_host(exchange());
  if (local_ == 0) compare_calls(say_call(), Watch::kHost);
  be_patient_on_host();
  shm::meet_on_host(exchange());
}

TwoLevels::WorkPtr TwoLevels::start_reduction(const Tensor& slice, const c10d::ReduceOp& op, int root) {
  std::vector<Tensor> tensors{slice};
  if (root < 0) {
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return gloo_->allreduce(tensors, options);
  }
  c10d::ReduceOptions options;
  options.reduceOp = op;
  options.rootRank = host_of_[root];
  return gloo_->reduce(tensors, options);
}

// For `root`, or for all where it is -1.
void TwoLevels::reduce_in_blocks(const Strip& strip, Op op, double scale, int root) {
  struct Block {
    Slices slices;
    Tensor mine = {};      // this leader's slice
    Tensor for_gloo = {};  // the same, in what Gloo knows
    WorkPtr work = {};
  };
  const int64_t element = strip.element(), elements = strip.bytes() / element;
  const int64_t length = kBlock / element * leaders_;
  const bool wanted_here = root < 0 || host_of_[root] == host_;
  const bool wanted = root < 0 || root == options_.place.rank;
  int number = 0;
  const auto add_up = [&](int64_t begin) {
    Block block{.slices = Slices(begin * element, std::min(length, elements - begin), element, leaders_)};
    if (leads(block.slices)) {
      block.mine = scratch(number++ % 2, block.slices.size(local_)).view(strip.dtype());
    }
    shm::reduce_to_leaders(exchange(), strip, block.slices, op, scale, data_of(block.mine));
    return block;
  };
  const auto start = [&](Block& block) {
    if (!block.mine.defined()) return;
    block.for_gloo = to_gloo(block.mine);
    block.work = start_reduction(block.for_gloo, to_c10d(op, strip.dtype()), root);
  };

  const WorkPtr greeting = say_call();
  std::optional<Block> block = add_up(0);
  compare_calls(greeting, wanted_here ? Watch::kHost : Watch::kNothing);
  be_patient_on_host();
  start(*block);
  for (int64_t begin = 0; block; begin += length) {
    std::optional<Block> next;
    if (begin + length < elements) next = add_up(begin + length);
    await(block->work, wanted_here || next ? Watch::kHost : Watch::kNothing);
    if (block->mine.defined() && !block->for_gloo.is_alias_of(block->mine)) block->mine.copy_(block->for_gloo);
    if (next) start(*next);
    if (wanted_here) shm::gather_from_leaders(exchange(), strip, block->slices, data_of(block->mine), wanted);
    block = std::move(next);
  }
}

void TwoLevels::all_reduce(std::span<const Buffer> buffers, Op op, double scale) {
  const Strip strip(buffers);
  Call call = call_of(Operation::kAllReduce, strip.dtype(), strip.bytes() / strip.element());
  call.op = static_cast<int8_t>(op);
  collective(call, [&] { reduce_in_blocks(strip, op, scale, -1); });
}

void TwoLevels::reduce(const Buffer& buffer, Op op, int root) {
  Call call = call_of(Operation::kReduce, buffer.dtype, buffer.count, root);
  call.op = static_cast<int8_t>(op);
  collective(call, [&] { reduce_in_blocks(Strip(std::span(&buffer, 1)), op, 1.0, root); });
}

void TwoLevels::broadcast(std::span<const Buffer> buffers, int root) {
  const Strip strip(buffers);
  const int64_t elements = strip.bytes() / strip.element();
  const Slices slices(0, elements, strip.element(), leaders_);
  const bool here = host_of_[root] == host_;
  const Watch watch = here ? Watch::kNothing : Watch::kHost;  // on the root's host the others have what they need
  collective(call_of(Operation::kBroadcast, strip.dtype(), elements, root), [&] {
    const WorkPtr greeting = say_call();
    Tensor mine;
    if (leads(slices)) mine = scratch(0, slices.size(local_));
    if (here) {
      const auto& ranks = options_.hosts[host_];
      const auto number = std::find(ranks.begin(), ranks.end(), root) - ranks.begin();
      shm::broadcast_on_host(exchange(), strip, static_cast<int>(number));
      if (mine.defined()) strip.copy_out(slices.begin(local_), slices.size(local_), data_of(mine));
    }
    compare_calls(greeting, watch);
    if (mine.defined()) {
      std::vector<Tensor> tensors{mine};
      c10d::BroadcastOptions options;
      options.rootRank = host_of_[root];
      await(gloo_->broadcast(tensors, options), watch);
    }
    be_patient_on_host();
    if (!here) shm::gather_from_leaders(exchange(), strip, slices, data_of(mine));
  });
}

// Each rank leads its own part.
void TwoLevels::all_gather(const Buffer& input, std::span<const Buffer> outputs) {
  const auto& hosts = options_.hosts;
  collective(call_of(Operation::kAllGather, input.dtype, input.count), [&] {
    const WorkPtr greeting = say_call();
    std::vector<Tensor> inputs{scratch(0, input.bytes())};
    const Tensor gathered = scratch(1, input.bytes() * std::ssize(hosts));
    if (input.bytes() > 0) std::memcpy(inputs[0].data_ptr(), input.data, input.bytes());
    compare_calls(greeting, Watch::kHost);
    if (input.bytes() > 0) {
      std::vector<std::vector<Tensor>> parts{gathered.view({std::ssize(hosts), -1}).unbind(0)};
      await(gloo_->allgather(parts, inputs, c10d::AllgatherOptions()), Watch::kHost);
    }
    be_patient_on_host();
    const size_t ranks = hosts[host_].size();
    std::vector<std::vector<Buffer>> of_rank(ranks);
    std::vector<Strip> strips;
    for (size_t i = 0; i < ranks; ++i) {
      for (const auto& host : hosts) of_rank[i].push_back(outputs[host[i]]);
      strips.emplace_back(of_rank[i]);
    }
    shm::all_gather_on_host(exchange(), strips, data_of(gathered));
  });
}

void TwoLevels::barrier() {
  collective({.operation = static_cast<int8_t>(Operation::kBarrier)}, [&] { agree(); });
}

void TwoLevels::through_gloo(const Call& call, const std::function<WorkPtr(c10d::Backend& gloo)>& start) {
  collective(call, [&] {
    agree();
    if (flat_ == nullptr) {
      const auto keys = c10::make_intrusive<c10d::PrefixStore>("flat", options_.store);
      flat_ = make_gloo(keys, options_.place.rank, options_.place.size, options_.timeout);
    }
    await(start(*flat_), Watch::kNothing);
  });
}

}  // namespace ddp::detail
