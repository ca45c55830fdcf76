// Shared memory inside each host and Gloo between hosts, with real processes. Hosts are names that ranks pretend, so that
// every machine can run these tests; hosts_test.cpp has real network namespaces.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "ddp/c10d.h"
#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "ddp/fused_adam.h"
#include "ddp/grad.h"
#include "ddp/process_group.h"
#include "group_impl.h"
#include "shm/join.h"
#include "support/catch.h"
#include "support/spawn.h"

using namespace ddp::test;
using ddp::ProcessGroup;
using ddp::ReduceOp;
using torch::Tensor;

namespace {

using Shape = std::vector<int>;  // the number of ranks of each host

int size_of(const Shape& shape) { return std::accumulate(shape.begin(), shape.end(), 0); }

int host_of(const Shape& shape, int rank) {
  int host = 0;
  for (; rank >= shape[host]; ++host) rank -= shape[host];
  return host;
}

void pretend(const Shape& shape, int rank) {
  ddp::detail::shm::pretend_host("host" + std::to_string(host_of(shape, rank)));
}

void on_hosts(const Shape& shape, const std::function<void(const ProcessGroup&)>& body) {
  run_ranks(size_of(shape),
            [&](int rank) {
              pretend(shape, rank);
              const auto group = ProcessGroup::from_env({.timeout = 20s});
              DDP_CHECK(group.backend() == "shm+gloo");
              body(group);
            },
            {.deadline = 60s});
}

Tensor draw(int rank, int64_t count, torch::ScalarType dtype = torch::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + rank);
  return torch::randn({count}, generator, torch::kDouble).to(dtype);
}

Tensor draw_integers(int rank, int64_t count, torch::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(2000 + rank);
  const auto numbers = torch::randint(-20, 20, {count}, generator, torch::TensorOptions(torch::kInt64));
  return dtype == torch::kUInt8 ? numbers.abs().to(dtype) : dtype == torch::kBool ? (numbers > 0) : numbers.to(dtype);
}

using Combine = std::function<Tensor(const Tensor&, const Tensor&)>;

// The documented order: on each host in the order of its ranks, then the hosts. For two hosts it is all of the order; the
// order of Gloo's ring over three is its own.
Tensor in_order(const Shape& shape, const std::function<Tensor(int rank)>& of, const Combine& combine) {
  Tensor all;
  for (int rank = 0, host = 0; host < std::ssize(shape); ++host) {
    Tensor mine = of(rank++);
    for (int i = 1; i < shape[host]; ++i) mine = combine(of(rank++), mine);
    all = all.defined() ? combine(all, mine) : mine;
  }
  return all;
}

bool same_everywhere(const Tensor& tensor, const ProcessGroup& group) {
  Tensor first = tensor.clone();
  ddp::broadcast(first, group, 0);
  return torch::equal(first, tensor);
}

void reduce_directly(Tensor& tensor, const ProcessGroup& group, c10d::ReduceOp op) {
  std::vector<Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  ddp::c10d_group(group)->allreduce(tensors, options)->wait();
}

}  // namespace

TEST_CASE("shm+gloo: sums have the documented order, the same bits on all ranks, for sizes around every boundary") {
  for (const Shape& shape : {Shape{2, 2}, Shape{2, 1}, Shape{1, 3}, Shape{1, 2, 2}}) {
    on_hosts(shape, [&](const ProcessGroup& group) {
      const auto plus = [](const Tensor& a, const Tensor& b) { return a + b; };
      for (const int64_t count : {1, 2, 3, 17, 1000, 4096, 4097, 32769, 100003, 2500001}) {
        if (count > 1000000 && shape[0] == 1) continue;  // several blocks, with one leader and with two
        Tensor sum = draw(group.rank(), count);
        ddp::all_reduce(sum, group);
        const Tensor want = in_order(
            shape, [&](int rank) { return draw(rank, count); }, plus);
        DDP_CHECK(shape.size() == 2 ? torch::equal(sum, want) : torch::allclose(sum, want, 1e-5, 1e-5));
        DDP_CHECK(same_everywhere(sum, group));
        if (count > 1000000) continue;
        Tensor again = draw(group.rank(), count);
        ddp::all_reduce(again, group);
        DDP_CHECK(torch::equal(again, sum));
        Tensor numbers = draw_integers(group.rank(), count, torch::kInt64);
        ddp::all_reduce(numbers, group);
        DDP_CHECK(torch::equal(numbers,
                               in_order(
                                   shape, [&](int rank) { return draw_integers(rank, count, torch::kInt64); }, plus)));
      }
    });
  }
}

TEST_CASE("shm+gloo: every operation on every dtype") {
  const Shape shape{2, 2};
  on_hosts(shape, [&](const ProcessGroup& group) {
    using Op = c10d::ReduceOp;
    const std::vector<std::pair<Op::RedOpType, Combine>> operations = {
        {Op::SUM, [](const Tensor& a, const Tensor& b) { return a + b; }},
        {Op::PRODUCT, [](const Tensor& a, const Tensor& b) { return a * b; }},
        {Op::MIN, [](const Tensor& a, const Tensor& b) { return torch::minimum(a, b); }},
        {Op::MAX, [](const Tensor& a, const Tensor& b) { return torch::maximum(a, b); }},
        {Op::BAND, [](const Tensor& a, const Tensor& b) { return torch::bitwise_and(a, b); }},
        {Op::BOR, [](const Tensor& a, const Tensor& b) { return torch::bitwise_or(a, b); }},
        {Op::BXOR, [](const Tensor& a, const Tensor& b) { return torch::bitwise_xor(a, b); }}};
    const int64_t count = 40003;  // two slices of some bytes
    for (const auto dtype : {torch::kUInt8, torch::kInt8, torch::kInt16, torch::kInt32, torch::kInt64, torch::kBool}) {
      for (const auto& [op, combine] : operations) {
        Tensor value = draw_integers(group.rank(), count, dtype);
        reduce_directly(value, group, op);
        const Tensor want = in_order(
            shape, [&](int rank) { return draw_integers(rank, count, dtype); }, combine);
        DDP_CHECK(value.scalar_type() == dtype && torch::equal(value, want.to(dtype)));
      }
    }
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
      for (size_t i = 0; i < 4; ++i) {  // torch rounds 16-bit floats as we do: two at a time in float32
        Tensor value = draw(group.rank(), count, dtype);
        reduce_directly(value, group, operations[i].first);
        const auto of = [&](int rank) { return draw(rank, count, dtype); };
        DDP_CHECK(torch::equal(value, in_order(shape, of, operations[i].second)));
        Tensor whole = draw(group.rank(), count, dtype);
        std::vector<Tensor> bitwise{whole};
        c10d::AllreduceOptions options;
        options.reduceOp = Op::BAND;
        DDP_CHECK(message_of<ddp::MismatchError>([&] {
                    ddp::c10d_group(group)->allreduce(bitwise, options);
                  }).find("is not defined") != std::string::npos);
      }
      // Scaled before it is added up, as the reducer does; a quarter is exact.
      Tensor mean = draw(group.rank(), count, dtype);
      reduce_directly(mean, group, Op::AVG);
      const auto of = [&](int rank) { return draw(rank, count, dtype) * 0.25; };
      DDP_CHECK(torch::equal(mean, in_order(shape, of, operations[0].second)));
    }
  });
}

TEST_CASE("shm+gloo: every collective, on hosts with equal and with different numbers of ranks") {
  for (const Shape& shape : {Shape{2, 2}, Shape{2, 1}, Shape{1, 2}}) {
    on_hosts(shape, [](const ProcessGroup& group) {
      const int size = group.size(), rank = group.rank();
      for (const int64_t count : {int64_t{1}, int64_t{12} * 5003}) {
        const auto of = [&](int r) { return draw(r, count); };
        Tensor total = of(0);
        for (int r = 1; r < size; ++r) total = total + of(r);
        for (int root = 0; root < size; ++root) {
          Tensor t = of(rank);
          ddp::broadcast(t, group, root);
          DDP_CHECK(torch::equal(t, of(root)));
          const auto gathered = ddp::gather(of(rank), group, root);
          for (size_t r = 0; r < gathered.size(); ++r) DDP_CHECK(torch::equal(gathered[r], of(static_cast<int>(r))));
          std::vector<Tensor> parts;
          for (int r = 0; rank == root && r < size; ++r) parts.push_back(of(r) + root);
          Tensor part = torch::empty({count});
          ddp::scatter(part, parts, group, root);
          DDP_CHECK(torch::equal(part, of(rank) + root));
          Tensor sum = of(rank);
          ddp::reduce(sum, group, root);
          DDP_CHECK(rank == root ? torch::allclose(sum, total, 1e-5, 1e-5) : torch::equal(sum, of(rank)));
        }
        const auto all = ddp::all_gather(of(rank), group);
        for (int r = 0; r < size; ++r) DDP_CHECK(torch::equal(all[r], of(r)));
        if (count % size != 0) continue;
        const Tensor received = ddp::all_to_all(of(rank), group).view({size, -1});
        for (int r = 0; r < size; ++r) DDP_CHECK(torch::equal(received[r], of(r).view({size, -1})[rank]));
        DDP_CHECK(torch::allclose(ddp::reduce_scatter(of(rank), group), total.view({size, -1})[rank], 1e-5, 1e-5));
      }
      Tensor strided = torch::arange(6).view({2, 3}).t();
      ddp::all_reduce(strided, group);
      DDP_CHECK(torch::equal(strided, torch::arange(6).view({2, 3}).t() * size));
      Tensor none = torch::empty({0});
      ddp::all_reduce(none, group);
      DDP_CHECK(ddp::all_gather_object("rank " + std::to_string(rank), group)[size - 1] ==
                "rank " + std::to_string(size - 1));
      DDP_CHECK(ddp::any(rank == 0, group) && !ddp::all(rank == 0, group));
      ddp::barrier(group);
    });
  }
}

TEST_CASE("shm+gloo: what c10d offers beyond libddp's own collectives") {
  on_hosts({2, 2}, [](const ProcessGroup& group) {
    const int rank = group.rank();
    auto c10d_group = ddp::c10d_group(group);
    Tensor input = torch::full({4}, rank + 1.0), gathered = torch::empty({16});
    c10d_group->_allgather_base(gathered, input)->wait();
    DDP_CHECK(torch::equal(gathered.view({4, 4})[2], torch::full({4}, 3.0)));
    Tensor part = torch::empty({4});
    c10d_group->_reduce_scatter_base(part, gathered)->wait();
    DDP_CHECK(torch::equal(part, torch::full({4}, 4.0 * (rank + 1))));
    // Uneven all_to_all of a dtype that Gloo does not know: rank r sends r+1 elements to each.
    std::vector<int64_t> out_splits{1, 2, 3, 4}, in_splits(4, rank + 1);
    Tensor sent = torch::full({4 * (rank + 1)}, rank, torch::kInt16), received = torch::empty({10}, sent.options());
    c10d_group->alltoall_base(received, sent, out_splits, in_splits)->wait();
    DDP_CHECK(torch::equal(received, torch::tensor({0, 1, 1, 2, 2, 2, 3, 3, 3, 3}, torch::kInt16)));
    std::vector<Tensor> several{torch::ones({40000}), torch::full({2, 2}, rank * 1.0), torch::ones({7})};
    c10d::AllreduceCoalescedOptions mean;
    mean.reduceOp = c10d::ReduceOp::AVG;
    group.impl()->backend_for(c10::kCPU)->allreduce_coalesced(several, mean)->wait();  // as of one tensor
    DDP_CHECK(torch::equal(several[0], torch::ones({40000})) && torch::equal(several[2], torch::ones({7})));
    DDP_CHECK(torch::equal(several[1], torch::full({2, 2}, 1.5)));
    std::vector<Tensor> z{torch::complex(torch::ones({2}), torch::ones({2}))};
    c10d_group->allreduce(z)->wait();
    DDP_CHECK(torch::equal(z[0], torch::complex(torch::full({2}, 4.0f), torch::full({2}, 4.0f))));
    std::vector<Tensor> sparse{torch::eye(3).to_sparse()};
    c10d_group->allreduce(sparse)->wait();  // through Gloo, connected when it is first needed
    DDP_CHECK(torch::equal(sparse[0].to_dense(), torch::eye(3) * 4));
    // Messages, in a ring where all send first, while a collective goes on; and strided, of a dtype Gloo does not know.
    for (const int64_t count : {0, 1, 300000}) {
      std::vector<Tensor> out{draw(rank, count)}, in{torch::empty({count})};
      auto sending = c10d_group->send(out, (rank + 1) % 4, 7), receiving = c10d_group->recv(in, (rank + 3) % 4, 7);
      ddp::barrier(group);
      sending->wait(), receiving->wait();
      DDP_CHECK(torch::equal(in[0], draw((rank + 3) % 4, count)));
    }
    std::vector<Tensor> column{torch::zeros({5, 2}, torch::kInt16).select(1, 1)}, row{torch::arange(5, torch::kInt16)};
    if (rank == 0) c10d_group->send(row, 3, 1)->wait();
    if (rank == 3) c10d_group->recv(column, 0, 1)->wait();
    DDP_CHECK(rank != 3 || torch::equal(column[0], row[0]));
  });
}

TEST_CASE("shm+gloo: groups choose for themselves, and go on beside each other") {
  const Shape shape{2, 2};
  on_hosts(shape, [&](const ProcessGroup& group) {
    const int rank = group.rank();
    const auto host = group.split(rank / 2), across = group.split(rank % 2), three = group.split(rank == 3 ? 1 : 0);
    DDP_CHECK(host.backend() == "shm" && across.backend() == "gloo");
    DDP_CHECK(three.backend() == (rank == 3 ? "none" : "shm+gloo"));
    Tensor sum = torch::full({50000}, rank);
    ddp::all_reduce(sum, three);
    DDP_CHECK(sum[49999].item<int64_t>() == 3);
    // Collectives go on by themselves, so two groups may be used in another order on each host.
    const auto other = group.duplicate("other");
    DDP_CHECK(other.backend() == "shm+gloo");
    Tensor a = torch::ones({300000}), b = torch::full({300000}, 10.0);
    const bool swapped = rank >= 2;
    auto first = swapped ? ddp::all_reduce_async(b, other) : ddp::all_reduce_async(a, group);
    auto second = swapped ? ddp::all_reduce_async(a, group) : ddp::all_reduce_async(b, other);
    first.wait(), second.wait();
    DDP_CHECK(a[7].item<float>() == 4 && b[299999].item<float>() == 40);
    // A child made by fork has neither the threads nor the memory.
    const pid_t child = ::fork();
    if (child == 0) {
      const auto text = message_of<ddp::CommError>([&] { ddp::barrier(group); });
      ::_exit(text.find("a child made by fork cannot use it") == std::string::npos ? 1 : 0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    DDP_CHECK(status == 0);
    ddp::barrier(group);
  });
  // One rank on each host has no memory to share, and ranks of several hosts cannot have shm alone.
  const auto results = spawn_ranks(2, [](int rank) {
    pretend({1, 1}, rank);
    DDP_CHECK(ProcessGroup::from_env({.timeout = 20s}).backend() == "gloo");
  });
  for (const auto& result : results) CHECK(result.error.empty());
  const auto refused = spawn_ranks(3, [](int rank) {
    pretend({2, 1}, rank);
    ProcessGroup::from_env({.backend = "shm", .timeout = 20s});
  });
  for (const auto& result : refused) {
    CHECK_THAT(result.error, ContainsSubstring("backend shm needs all ranks on one host: rank 2 is on another host"));
  }
}

TEST_CASE("shm+gloo: the losses of DistributedDataParallel are those of all samples on one rank") {
  const auto samples = [](int rank) { return draw(100 + rank, 12 * 20).view({12, 20}); };
  const auto net = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(20, 300), torch::nn::ReLU(), torch::nn::Linear(300, 1));
  };
  for (const Shape& shape : {Shape{2, 2}, Shape{2, 1}}) {
    on_hosts(shape, [&](const ProcessGroup& group) {
      ddp::DistributedDataParallel model(net(), group);
      ddp::AdamW optim(model->parameters(), {.lr = 0.01});
      auto alone = net();
      ddp::AdamW reference(alone->parameters(), {.lr = 0.01});
      for (int step = 0; step < 5; ++step) {
        const Tensor loss = model(samples(group.rank())).square().mean();
        loss.backward();
        ddp::check_gradients(model);
        optim.step(), model.zero_grad();
        Tensor all = torch::zeros({});
        for (int rank = 0; rank < group.size(); ++rank) {
          const Tensor one = alone->forward(samples(rank)).square().mean();
          if (rank == group.rank()) DDP_CHECK(torch::allclose(one, loss, 1e-4, 1e-5));
          all = all + one;
        }
        (all / group.size()).backward();
        reference.step(), alone->zero_grad();
      }
      DDP_CHECK(ddp::replicas_equal(model));
    });
  }
}
