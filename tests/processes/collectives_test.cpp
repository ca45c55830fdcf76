// Each collective against a value computed by hand, at several world sizes, dtypes and layouts.
#include "ddp/collectives.h"

#include <cmath>
#include <functional>

#include "ddp/autograd.h"
#include "ddp/error.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;
using ddp::ReduceOp;
using torch::Tensor;

namespace {

constexpr const char* kBackends[] = {"shm", "gloo"};

void in_group(int ranks, const std::function<void(const ProcessGroup&)>& body) {
  for (const char* backend : kBackends) {
    INFO(backend);
    run_ranks(ranks, [&](int) { body(ProcessGroup::from_env({.backend = backend, .timeout = 20s})); });
  }
}

// What rank r contributes: small integers, so that every dtype holds every result exactly.
Tensor input_of(int rank, torch::ScalarType dtype) { return (torch::arange(6) % 3 + rank + 1).to(dtype); }

Tensor expected(ReduceOp op, int size, torch::ScalarType dtype) {
  Tensor result = input_of(0, torch::kInt64);
  for (int rank = 1; rank < size; ++rank) {
    const Tensor x = input_of(rank, torch::kInt64);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result = result + x;
        break;
      case ReduceOp::kMin:
        result = torch::minimum(result, x);
        break;
      case ReduceOp::kMax:
        result = torch::maximum(result, x);
        break;
      case ReduceOp::kProduct:
        result = result * x;
        break;
      case ReduceOp::kBitAnd:
        result = result.bitwise_and(x);
        break;
      case ReduceOp::kBitOr:
        result = result.bitwise_or(x);
        break;
      case ReduceOp::kBitXor:
        result = result.bitwise_xor(x);
        break;
    }
  }
  if (op == ReduceOp::kAvg) return (result.to(torch::kDouble) / size).to(dtype);
  return result.to(dtype);
}

constexpr ReduceOp kArithmetic[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
constexpr ReduceOp kBitwise[] = {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("all_reduce: every operation on every dtype") {
  for (const int ranks : {2, 3}) {
    in_group(ranks, [](const ProcessGroup& group) {
      const auto check = [&](ReduceOp op, torch::ScalarType dtype) {
        Tensor t = input_of(group.rank(), dtype);
        ddp::all_reduce(t, group, op);
        if (!torch::equal(t, expected(op, group.size(), dtype))) {
          throw std::runtime_error(std::string("wrong result for ") + c10::toString(dtype) + ", operation " +
                                   std::to_string(static_cast<int>(op)));
        }
      };
      for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
        for (const auto op : kArithmetic) check(op, dtype);
      }
      check(ReduceOp::kAvg, torch::kDouble);
      for (const auto dtype : {torch::kInt8, torch::kUInt8, torch::kInt16, torch::kInt32, torch::kInt64}) {
        for (const auto op : kArithmetic) check(op, dtype);
        for (const auto op : kBitwise) check(op, dtype);
      }
    });
  }
}

TEST_CASE("all_reduce of bool is logical, of complex a sum") {
  in_group(2, [](const ProcessGroup& group) {
    const bool first = group.is_root();
    const auto reduced = [&](ReduceOp op) {
      Tensor t = first ? torch::tensor({true, true, false, false}) : torch::tensor({true, false, true, false});
      ddp::all_reduce(t, group, op);
      return t;
    };
    const Tensor either = torch::tensor({true, true, true, false}), both = torch::tensor({true, false, false, false});
    for (const auto op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBitOr})
      DDP_CHECK(torch::equal(reduced(op), either));
    for (const auto op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBitAnd})
      DDP_CHECK(torch::equal(reduced(op), both));
    DDP_CHECK(torch::equal(reduced(ReduceOp::kBitXor), torch::tensor({false, true, true, false})));
    Tensor z = torch::complex(torch::tensor({1.0}), torch::tensor({first ? 2.0 : 3.0}));
    ddp::all_reduce(z, group);
    DDP_CHECK(torch::equal(z, torch::complex(torch::tensor({2.0}), torch::tensor({5.0}))));
  });
}

// Trap 16: Gloo itself gives wrong numbers and no error here.
TEST_CASE("tensors that are not contiguous are reduced and moved right") {
  in_group(2, [](const ProcessGroup& group) {
    const double scale = group.rank() + 1;
    const Tensor base = torch::arange(12, torch::kDouble).view({3, 4});
    Tensor storage = base.clone() * scale;
    Tensor t = storage.t();
    ddp::all_reduce(t, group);
    DDP_CHECK(torch::equal(storage, base * 3));
    storage = base.clone() * scale;
    Tensor column = storage.select(1, 2);
    ddp::broadcast(column, group, 1);
    DDP_CHECK(torch::equal(column, base.select(1, 2) * 2));
    DDP_CHECK(torch::equal(storage.select(1, 1), base.select(1, 1) * scale));  // its neighbours are untouched
    Tensor expanded = torch::full({1}, scale).expand({4});
    DDP_CHECK(torch::equal(ddp::all_gather(expanded, group)[1], torch::full({4}, 2.0)));
    const Tensor received = ddp::all_to_all((base * scale).t(), group);  // two rows of each rank's transpose
    const Tensor rows = base.t().narrow(0, 2 * group.rank(), 2);
    DDP_CHECK(torch::equal(received, torch::cat({rows, rows * 2})));
  });
}

TEST_CASE("broadcast, reduce, gather, all_gather, scatter from every root") {
  in_group(3, [](const ProcessGroup& group) {
    const int rank = group.rank(), size = group.size();
    for (int root = 0; root < size; ++root) {
      for (const auto dtype : {torch::kFloat, torch::kBool, torch::kInt16, torch::kBFloat16, torch::kComplexFloat}) {
        Tensor t = torch::tensor({rank, 0, 1}).to(dtype);
        ddp::broadcast(t, group, root);
        DDP_CHECK(torch::equal(t, torch::tensor({root, 0, 1}).to(dtype)));
      }
      Tensor t = torch::tensor({rank + 1.0});
      ddp::reduce(t, group, root, ReduceOp::kAvg);
      if (rank == root) DDP_CHECK(t.item<double>() == 2.0);
      const auto gathered = ddp::gather(torch::tensor({rank * 10}), group, root);
      DDP_CHECK(gathered.size() == (rank == root ? 3u : 0u));
      for (size_t r = 0; r < gathered.size(); ++r)
        DDP_CHECK(gathered[r].item<int64_t>() == static_cast<int64_t>(r) * 10);
      std::vector<Tensor> parts;
      if (rank == root) {
        for (int r = 0; r < size; ++r) parts.push_back(torch::tensor({100 * root + r}));
      }
      Tensor part = torch::tensor({0});
      ddp::scatter(part, parts, group, root);
      DDP_CHECK(part.item<int64_t>() == 100 * root + rank);
    }
    const auto all = ddp::all_gather(torch::tensor({rank, -rank}), group);
    for (int r = 0; r < size; ++r) DDP_CHECK(torch::equal(all[r], torch::tensor({r, -r})));
  });
}

TEST_CASE("reduce_scatter and all_to_all cut along dimension 0") {
  for (const int ranks : {2, 4}) {
    in_group(ranks, [](const ProcessGroup& group) {
      const int rank = group.rank(), size = group.size();
      const Tensor t = torch::arange(2 * size, torch::kDouble).view({size, 2}) * (rank + 1);
      const double factor = size * (size + 1) / 2.0;
      const Tensor mine = torch::arange(2 * rank, 2 * rank + 2, torch::kDouble).view({1, 2});
      DDP_CHECK(torch::equal(ddp::reduce_scatter(t, group), mine * factor));
      DDP_CHECK(torch::allclose(ddp::reduce_scatter(t, group, ReduceOp::kAvg), mine * factor / size));
      DDP_CHECK(torch::equal(t, torch::arange(2 * size, torch::kDouble).view({size, 2}) * (rank + 1)));  // unchanged
      Tensor sent = torch::full({size}, rank * 10) + torch::arange(size);
      for (int repeat = 0; repeat < 3; ++repeat) {
        DDP_CHECK(torch::equal(ddp::all_to_all(sent, group), torch::arange(size) * 10 + rank));
      }
    });
  }
}

TEST_CASE("async forms complete in any order of waiting") {
  in_group(2, [](const ProcessGroup& group) {
    Tensor a = torch::full({1000}, 1.0), b = torch::full({10}, group.rank() + 1.0);
    auto first = ddp::all_reduce_async(a, group);
    auto second = ddp::all_reduce_async(b, group, ReduceOp::kAvg);
    auto third = ddp::barrier_async(group);
    third.wait(), second.wait(), first.wait();
    first.wait();  // again: nothing
    DDP_CHECK(first.is_completed());
    DDP_CHECK(torch::equal(a, torch::full({1000}, 2.0)) && torch::equal(b, torch::full({10}, 1.5)));
  });
}

TEST_CASE("objects of any bytes and lengths, and decisions") {
  in_group(3, [](const ProcessGroup& group) {
    const int rank = group.rank();
    const std::string mine(static_cast<size_t>(rank) * 1000, static_cast<char>(rank));  // rank 0's is empty
    const auto all = ddp::all_gather_object(mine, group);
    for (int r = 0; r < 3; ++r) DDP_CHECK(all[r] == std::string(static_cast<size_t>(r) * 1000, static_cast<char>(r)));
    DDP_CHECK(ddp::broadcast_object(mine, group, 2) == all[2]);
    DDP_CHECK(ddp::broadcast_object(mine, group, 0).empty());
    DDP_CHECK(ddp::any(rank == 1, group) && !ddp::any(false, group));
    DDP_CHECK(!ddp::all(rank == 1, group) && ddp::all(true, group));
  });
}

TEST_CASE("empty tensors are fine") {
  in_group(2, [](const ProcessGroup& group) {
    Tensor empty = torch::empty({0, 3});
    ddp::all_reduce(empty, group);
    ddp::broadcast(empty, group);
    DDP_CHECK(ddp::all_gather(empty, group).size() == 2);
  });
}

TEST_CASE("arguments that cannot work are refused before anything is sent") {
  in_group(2, [](const ProcessGroup& group) {
    const auto refused = [&](const std::function<void()>& call, const std::string& part) {
      const auto text = message_of<ddp::MismatchError>(call);
      if (!contains(text, part)) throw std::runtime_error("expected \"" + part + "\" in: " + text);
    };
    const Tensor t = torch::ones({4});
    refused([&] { ddp::all_reduce(Tensor(), group); }, "undefined");
    refused([&] { ddp::all_reduce(t.to_sparse(), group); }, "sparse");
    refused([&] { ddp::all_reduce(t, group, ReduceOp::kBitXor); }, "bitwise");
    refused([&] { ddp::all_reduce(torch::ones({1}, torch::kInt64), group, ReduceOp::kAvg); }, "mean");
    refused([&] { ddp::all_reduce(torch::complex(t, t), group, ReduceOp::kMax); }, "summed or averaged");
    refused([&] { ddp::broadcast(t, group, 2); }, "root is 2, expected one of 0..1");
    refused([&] { ddp::broadcast(t, group, -1); }, "root is -1");
    refused([&] { ddp::reduce_scatter(torch::ones({3}), group); }, "cannot be cut into 2 equal parts");
    refused([&] { ddp::all_to_all(torch::ones({5, 2}), group); }, "cannot be cut");
    refused([&] { ddp::scatter(t, {t}, group, group.rank()); }, "1 inputs were given, expected 2");
    refused(
        [&] {
          ddp::all_gather_async({torch::ones({3}), torch::ones({4})}, t, group).wait();
        },
        "Float[3], expected Float[4]");
    Tensor after = torch::ones({1});
    ddp::all_reduce(after, group);  // the group is as good as before
    DDP_CHECK(after.item<float>() == 2);
  });
}

TEST_CASE("a collective whose sizes differ over ranks is an error, not a wrong number") {
  for (const char* backend : kBackends) {
    const auto results = spawn_ranks(2,
                                     [&](int rank) {
                                       const auto group = ProcessGroup::from_env({.backend = backend, .timeout = 3s});
                                       Tensor t = torch::ones({rank == 0 ? 1000 : 2000});
                                       ddp::all_reduce(t, group);
                                     },
                                     {.deadline = 20s});
    CHECK((results[0].exit_code == 1 || results[1].exit_code == 1));
  }
}

// The gradient of each rank's own loss, taken as one term of the sum over ranks, by hand.
TEST_CASE("collectives that gradients flow through") {
  in_group(2, [](const ProcessGroup& group) {
    const double mine = group.rank() + 1, weights[] = {3.0, 5.0};
    const double weight = weights[group.rank()];
    const auto gradient = [&](const std::function<Tensor(const Tensor&)>& f) {
      Tensor x = torch::full({2}, mine, torch::kDouble).requires_grad_(true);
      f(x).backward();
      return x.grad();
    };
    // loss = w * sum(all_reduce(x)): each x enters both losses.
    DDP_CHECK(
        torch::equal(gradient([&](const Tensor& x) { return weight * ddp::autograd::all_reduce(x, group).sum(); }),
                     torch::full({2}, 8.0, torch::kDouble)));
    DDP_CHECK(torch::equal(
        gradient([&](const Tensor& x) { return weight * ddp::autograd::all_reduce(x, group, ReduceOp::kAvg).sum(); }),
        torch::full({2}, 4.0, torch::kDouble)));
    // all_gather: rows of both ranks, weighted by their place.
    const Tensor place = torch::tensor({1.0, 10.0, 100.0, 1000.0}, torch::kDouble);
    const Tensor expected = (weights[0] + weights[1]) * place.narrow(0, 2 * group.rank(), 2);
    DDP_CHECK(torch::equal(
        gradient([&](const Tensor& x) { return weight * (ddp::autograd::all_gather(x, group) * place).sum(); }),
        expected));
    // reduce_scatter: element r goes to rank r's loss.
    DDP_CHECK(
        torch::equal(gradient([&](const Tensor& x) { return weight * ddp::autograd::reduce_scatter(x, group).sum(); }),
                     torch::tensor({3.0, 5.0}, torch::kDouble)));
    DDP_CHECK(torch::equal(gradient([&](const Tensor& x) {
                             return weight * ddp::autograd::reduce_scatter(x, group, ReduceOp::kAvg).sum();
                           }),
                           torch::tensor({1.5, 2.5}, torch::kDouble)));
    DDP_CHECK(contains(message_of<ddp::MismatchError>([&] { ddp::autograd::all_reduce(place, group, ReduceOp::kMax); }),
                       "only the sum and the mean"));
  });
}
