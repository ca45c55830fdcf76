#include "ddp/meter.h"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <limits>

#include "ddp/collectives.h"
#include "ddp/error.h"

namespace ddp {
namespace {

void check_weight(double weight) {
  if (!(weight >= 0)) throw ConfigError(fmt::format("[ddp::Meter] a weight is at least 0, found {}", weight));
}

double ratio(double sum, double weight) { return weight > 0 ? sum / weight : std::numeric_limits<double>::quiet_NaN(); }

}  // namespace

void Meter::update(const torch::Tensor& value, double weight) {
  check_weight(weight);
  if (!value.defined() || value.numel() != 1) {
    throw ConfigError(fmt::format("[ddp::Meter] update takes one number, found a tensor of {} elements",
                                  value.defined() ? value.numel() : 0));
  }
  weight_ += weight;
  if (weight == 0) return;  // as if it were not there, also when it is NaN
  auto term = value.detach().reshape({}).to(torch::kDouble) * weight;
  device_sum_ = device_sum_.defined() ? device_sum_.to(term.device()) + term : term;
}

void Meter::update(double value, double weight) {
  check_weight(weight);
  weight_ += weight;
  if (weight > 0) host_sum_ += value * weight;
}

double Meter::local() const {
  return ratio(host_sum_ + (device_sum_.defined() ? device_sum_.item<double>() : 0.0), weight_);
}

double Meter::compute(const ProcessGroup& group) const {
  if (group.size() == 1) return local();
  auto totals = at::tensor({host_sum_, weight_}, torch::kDouble).to(group.device());
  if (device_sum_.defined()) totals[0] += device_sum_.to(group.device());
  all_reduce(totals, group);
  totals = totals.cpu();
  return ratio(totals[0].item<double>(), totals[1].item<double>());
}

void Meter::reset() { *this = Meter(); }

Throughput::Throughput() : start_(std::chrono::steady_clock::now()) {}

double Throughput::per_second() const {
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return seconds > 0 ? static_cast<double>(items_) / seconds : 0.0;
}

double Throughput::per_second(const ProcessGroup& group) const {
  if (group.size() == 1) return per_second();
  auto total = at::tensor({per_second()}, torch::kDouble).to(group.device());
  all_reduce(total, group);
  return total.item<double>();
}

void Throughput::reset() { *this = Throughput(); }

}  // namespace ddp
