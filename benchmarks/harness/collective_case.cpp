#include "harness/collective_case.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>

#include "ddp/collectives.h"
#include "ddp/error.h"

namespace bench {
namespace {

// Values repeat after a prime, so that a chunk that lands at a wrong place, or comes from another rank, shows.
constexpr int64_t kPeriod = 251;
constexpr double kPoison = 255;  // no value of the patterns; bfloat16 and uint8 hold it exactly

// Values that are copied: 0..250, which each dtype holds exactly.
torch::Tensor copied(int64_t rank) { return (torch::arange(kPeriod) + 31 * rank).remainder(kPeriod); }

// Values that are added: 0..4, so that the sum of up to 63 ranks is exact in bfloat16 and uint8, whatever the order.
torch::Tensor summand(int64_t rank) { return (torch::arange(kPeriod) * 7 + 31 * rank).remainder(kPeriod).remainder(5); }

torch::Tensor sum_of_all(int64_t ranks) {
  auto sum = torch::zeros(kPeriod, torch::kInt64);
  for (int64_t rank = 0; rank < ranks; ++rank) sum += summand(rank);
  return sum;
}

// Elements offset .. offset + count of a pattern that repeats for ever.
torch::Tensor tile(const torch::Tensor& pattern, int64_t offset, int64_t count, const torch::TensorOptions& options) {
  offset %= kPeriod;
  return pattern.to(options).repeat((offset + count) / kPeriod + 1).slice(0, offset, offset + count).clone();
}

int64_t differing(const torch::Tensor& found, const torch::Tensor& expected) {
  return (found != expected).sum().item<int64_t>();
}

// Parts by rank: each is one tensor of `part` elements.
std::vector<torch::Tensor> empty_parts(int64_t ranks, int64_t part, const torch::TensorOptions& options) {
  std::vector<torch::Tensor> parts;
  for (int64_t rank = 0; rank < ranks; ++rank) parts.push_back(torch::full(part, kPoison, options));
  return parts;
}

int64_t differing_parts(const std::vector<torch::Tensor>& parts) {
  int64_t wrong = 0;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const auto& part = parts[rank];
    wrong += differing(part, tile(copied(static_cast<int64_t>(rank)), 0, part.numel(), part.options()));
  }
  return wrong;
}

// What every operation needs to know.
struct Setting {
  ddp::ProcessGroup group;
  int64_t rank, ranks, count, part;
  torch::TensorOptions options;
};

void fill_all_reduce(const Setting& s, Case& test) {
  auto input = tile(summand(s.rank), 0, s.count, s.options), buffer = torch::empty_like(input);
  test.refill = [=] { buffer.copy_(input); };
  test.call = [=] { ddp::all_reduce(buffer, s.group); };
  test.count_wrong = [=] { return differing(buffer, tile(sum_of_all(s.ranks), 0, s.count, s.options)); };
}

void fill_reduce(const Setting& s, Case& test) {
  auto input = tile(summand(s.rank), 0, s.count, s.options), buffer = torch::empty_like(input);
  test.refill = [=] { buffer.copy_(input); };
  test.call = [=] { ddp::reduce(buffer, s.group); };
  test.count_wrong = [=]() -> int64_t {
    return s.rank == 0 ? differing(buffer, tile(sum_of_all(s.ranks), 0, s.count, s.options)) : 0;
  };
}

void fill_broadcast(const Setting& s, Case& test) {
  auto input = tile(copied(0), 0, s.count, s.options), buffer = torch::empty_like(input);
  test.refill = [=] {
    if (s.rank == 0) {
      buffer.copy_(input);
    } else {
      buffer.fill_(kPoison);
    }
  };
  test.call = [=] { ddp::broadcast(buffer, s.group); };
  test.count_wrong = [=] { return differing(buffer, input); };
}

void fill_all_gather(const Setting& s, Case& test) {
  auto input = tile(copied(s.rank), 0, s.part, s.options);
  auto outputs = empty_parts(s.ranks, s.part, s.options);
  test.refill = [=] {
    for (const auto& output : outputs) output.fill_(kPoison);
  };
  test.call = [=] { ddp::all_gather_async(outputs, input, s.group).wait(); };
  test.count_wrong = [=] { return differing_parts(outputs); };
}

void fill_gather(const Setting& s, Case& test) {
  auto input = tile(copied(s.rank), 0, s.part, s.options);
  auto outputs = empty_parts(s.rank == 0 ? s.ranks : 0, s.part, s.options);
  test.refill = [=] {
    for (const auto& output : outputs) output.fill_(kPoison);
  };
  test.call = [=] { ddp::gather_async(outputs, input, s.group).wait(); };
  test.count_wrong = [=] { return differing_parts(outputs); };
}

void fill_scatter(const Setting& s, Case& test) {
  std::vector<torch::Tensor> inputs;
  for (int64_t rank = 0; s.rank == 0 && rank < s.ranks; ++rank) {
    inputs.push_back(tile(copied(rank), 0, s.part, s.options));
  }
  auto output = torch::empty(s.part, s.options);
  test.refill = [=] { output.fill_(kPoison); };
  test.call = [=] { ddp::scatter_async(output, inputs, s.group).wait(); };
  test.count_wrong = [=] { return differing(output, tile(copied(s.rank), 0, s.part, s.options)); };
}

void fill_reduce_scatter(const Setting& s, Case& test) {
  auto input = tile(summand(s.rank), 0, s.count, s.options), output = torch::empty(s.part, s.options);
  test.refill = [=] { output.fill_(kPoison); };
  test.call = [=] { ddp::reduce_scatter_async(output, input, s.group).wait(); };
  test.count_wrong = [=] { return differing(output, tile(sum_of_all(s.ranks), s.rank * s.part, s.part, s.options)); };
}

void fill_all_to_all(const Setting& s, Case& test) {
  auto input = tile(copied(s.rank), 0, s.count, s.options), output = torch::empty_like(input);
  test.refill = [=] { output.fill_(kPoison); };
  test.call = [=] { ddp::all_to_all_async(output, input, s.group).wait(); };
  test.count_wrong = [=] {
    int64_t wrong = 0;
    for (int64_t from = 0; from < s.ranks; ++from) {
      wrong += differing(output.slice(0, from * s.part, (from + 1) * s.part),
                         tile(copied(from), s.rank * s.part, s.part, s.options));
    }
    return wrong;
  };
}

void fill_barrier(const Setting& s, Case& test) {
  test.bytes = test.count = 0;
  test.refill = [] {};
  test.call = [=] { ddp::barrier(s.group); };
  test.count_wrong = [] { return 0; };
}

struct Operation {
  std::string name;
  void (*fill)(const Setting&, Case&);
  bool in_parts;                       // the size is that of one part per rank together
  double (*bus_factor)(double ranks);  // nccl-tests, doc/PERFORMANCE.md
};

double all_reduce_factor(double n) { return 2 * (n - 1) / n; }
double parts_factor(double n) { return (n - 1) / n; }
double one(double) { return 1; }

const std::vector<Operation>& table() {
  static const std::vector<Operation> operations = {
      {"all_reduce", fill_all_reduce, false, all_reduce_factor},
      {"broadcast", fill_broadcast, false, one},
      {"reduce", fill_reduce, false, one},
      {"all_gather", fill_all_gather, true, parts_factor},
      {"gather", fill_gather, true, parts_factor},
      {"scatter", fill_scatter, true, parts_factor},
      {"reduce_scatter", fill_reduce_scatter, true, parts_factor},
      {"all_to_all", fill_all_to_all, true, parts_factor},
      {"barrier", fill_barrier, false, one},
  };
  return operations;
}

template <class Names>
std::string join(const Names& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

const std::vector<std::string>& operations() {
  static const auto names = [] {
    std::vector<std::string> all;
    for (const auto& operation : table()) all.push_back(operation.name);
    return all;
  }();
  return names;
}

Case make_case(const std::string& operation, CaseOptions options, const ddp::ProcessGroup& group) {
  auto found = std::ranges::find(table(), operation, &Operation::name);
  if (found == table().end()) {
    throw ddp::ConfigError("[bench_all_reduce] --op is \"" + operation + "\", expected one of " + join(operations()));
  }
  auto element = static_cast<int64_t>(c10::elementSize(options.dtype));
  int64_t ranks = group.size();
  int64_t part = std::max<int64_t>(1, options.bytes / element / ranks);
  int64_t count = found->in_parts ? part * ranks : std::max<int64_t>(1, options.bytes / element);
  Case test{.bytes = count * element,
            .count = count,
            .bus_factor = found->bus_factor(static_cast<double>(ranks)),
            .refill = {},
            .call = {},
            .count_wrong = {}};
  found->fill({.group = group,
               .rank = group.rank(),
               .ranks = ranks,
               .count = count,
               .part = part,
               .options = torch::TensorOptions().dtype(options.dtype).device(group.device())},
              test);
  return test;
}

c10::ScalarType parse_dtype(const std::string& name) {
  static const std::map<std::string, c10::ScalarType> dtypes = {
      {"float32", c10::kFloat}, {"float64", c10::kDouble}, {"float16", c10::kHalf}, {"bfloat16", c10::kBFloat16},
      {"int32", c10::kInt},     {"int64", c10::kLong},     {"uint8", c10::kByte}};
  auto found = dtypes.find(name);
  if (found != dtypes.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, dtype] : dtypes) names.push_back(known);
  throw ddp::ConfigError("[bench_all_reduce] --dtype is \"" + name + "\", expected one of " + join(names));
}

}  // namespace bench
